"""Jobs on a real Ray cluster on the loopback, under fire: every row is answered once, and nothing is left running."""

import contextlib
import csv
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.cluster import RealClusterPlan, bench_real_cluster
from engine.batch_files.journal import journal_path, known_jobs, read_answers
from engine.bench.report import Report
from engine.common.config import EngineConfig
from tests.engine.tiny_families import tiny_checkpoint
from tests.loopback_ray import CHECKOUT, LoopbackRay
from tests.refusals import until

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

KILLS = int(os.environ.get("SWITCHYARD_TEST_RAY_KILLS", "20"))
ROWS, NODES = 1000, 3
_MOST_TOKENS = 60
OTHER_PYTHON = os.environ.get("SWITCHYARD_TEST_RAY_PYTHON", "")
_WRONG_S = (-3 * 86400, 7200)
_WRONG_CLOCK = """
import os, time
right, right_ns = time.time, time.time_ns
def wrong():
    with open(os.environ["WRONG_CLOCK"]) as file:
        return int(file.read() or 0)
time.time, time.time_ns = lambda: right() + wrong(), lambda: right_ns() + wrong() * 10**9
with open(f"{os.environ['WRONG_CLOCK']}.{os.getpid()}.seen", "w") as file:
    file.write(str(time.time()))
"""
"""What Python on a node takes for the time of day.  Under libfaketime it cannot sleep: that is until a moment of the
clock since the start, which libfaketime shifts too."""
_NO_ROOM = 1000
"""Bytes: less than any engine needs."""


_JOINS = """
from ray._private import node, parameter
node.Node(parameter.RayParams(gcs_address="{address}", node_ip_address="127.0.0.1", num_cpus=1))
"""
"""What `ray start` does, which takes the loopback for the machine's own address."""


def _version_of(python: str) -> str:
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class ClusterUnderFire:
    """Jobs of `rows` rows on three nodes, one after the other, and what is known of their answers.

    Attributes:
        document: what the last one to end said of itself.
    """

    def __init__(self, folder: Path, home: Path, rows: int, nodes: int, python: str = sys.executable) -> None:
        self.folder, self.rows, self.chance = folder, rows, random.Random(7)
        self.output = folder / "out.csv"
        tiny_checkpoint("qwen3_moe", folder / "model")
        lines = (json.dumps({"text": f"Row {row}?", "id": row}) + "\n" for row in range(rows))
        (folder / "in.jsonl").write_text("".join(lines))
        self.ray = LoopbackRay(home, nodes, python)
        self.document: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._asking: subprocess.Popen[bytes] | None = None

    def begin(self, *, again: bool = False) -> subprocess.Popen[bytes]:
        """The program that asks; with `again` it forgets what was answered."""
        if again:
            self._known = {}
        words = ["-m", "engine.cli", "batch", str(self.folder / "in.jsonl"), "-o", str(self.output), "--json"]
        words += ["--restart" if again else "--resume", "--model", str(self.folder / "model"), "--device", "cpu"]
        words += ["--max-tokens", str(_MOST_TOKENS), "--ray", self.ray.address, "--precision", "bf16"]
        before = self.done()
        self._asking = subprocess.Popen(
            [sys.executable, *words],
            cwd=CHECKOUT,
            env=self.ray.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        asking = self._asking
        until(lambda: (0 if again else before) < self.done() < self.rows or asking.poll() is not None, 180)
        return asking

    def kill_asking(self) -> None:
        self._asking.kill()
        self._asking.communicate()
        self._look()
        until(lambda: not self.ray.engines(), 60)  # Ray ends what nobody owns
        self.begin()

    def kill_engine(self) -> None:
        engines = self.ray.engines()
        if engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(engines), signal.SIGKILL)

    def kill_node(self) -> None:
        self.ray.kill(self.chance.choice(self.ray.nodes))
        self.ray.add()

    def kill_raylet(self) -> None:
        self.ray.kill_raylet(self.chance.choice(self.ray.nodes))
        self.ray.add()

    def done(self) -> int:
        """Rows whose answers are kept."""
        return next((job.done for job in known_jobs()), 0)

    def run(self, kill: Callable[[], None], kills: int) -> int:
        """Jobs until so many kills were made; returns how many jobs it took."""
        made = jobs = 0
        while made < kills:
            jobs += 1
            self.begin(again=True)
            while made < kills and self.done() < 0.9 * self.rows and self._is_running():
                reached = self.done() + self.chance.randrange(1, max(2, self.rows // 6))
                until(lambda reached=reached: self.done() >= reached or not self._is_running(), 180)  # type: ignore[misc]
                if self._is_running():
                    kill()
                    made += 1
            self.finish()
        return jobs

    def _is_running(self) -> bool:
        return self._asking is not None and self._asking.poll() is None

    def finish(self) -> str:
        """Waits for the job's end, and looks at its result; returns what was said meanwhile."""
        said, noted = self._asking.communicate(timeout=600)
        assert self._asking.returncode == 0, noted.decode()[-2000:]
        self.document = json.loads(said)
        assert [self.document[key] for key in ("finished", "done", "failed")] == [True, self.rows, 0]
        self._look()
        with open(self.output, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["id"]) for row in rows] == list(range(self.rows))
        assert all(row["answer"] == self._known[int(row["id"])] for row in rows)
        assert list(self.folder.glob(".*")) == []
        return noted.decode()

    def _look(self) -> None:
        """What was kept before is there, unchanged, and each row once."""
        answers = read_answers(journal_path(self.output), limit=self.rows + 1)
        now = {answer.row: answer.text for answer in answers}
        assert len(now) == len(answers)
        assert self._known.items() <= now.items()
        self._known = now

    def close(self) -> None:
        if self._asking is not None and self._asking.poll() is None:
            self._asking.kill()
            self._asking.communicate()
        self.ray.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_node_that_nobody_tuned_measures_itself_once(tmp_path: Path, switchyard_home: Path) -> None:
    job = ClusterUnderFire(tmp_path / "job", switchyard_home, rows=30, nodes=1)
    with contextlib.closing(job):
        job.begin(again=True)
        assert " measures itself." in job.finish()
        (kept,) = switchyard_home.glob("data/measurements/*.json")
        measured = kept.read_bytes()
        assert json.loads(measured)["kind"] == "brief"
        job.begin(again=True)
        assert "measures itself" not in job.finish()
        assert kept.read_bytes() == measured


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_nodes_without_room_are_one_sentence(tmp_path: Path, switchyard_home: Path) -> None:
    job = ClusterUnderFire(tmp_path / "job", switchyard_home, rows=30, nodes=0)
    with contextlib.closing(job):
        for _ in range(2):
            job.ray.add(memory=_NO_ROOM)
        asking = job.begin(again=True)
        noted = asking.communicate(timeout=180)[1].decode()
        assert asking.returncode == 2, noted
        said = noted.splitlines()[-1]
        assert said.startswith("switchyard: No node of the Ray cluster at ")
        assert said.count("RAM") >= 2
        assert not job.output.exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER_PYTHON, reason="SWITCHYARD_TEST_RAY_PYTHON: a Python of another version, with our Ray")
def test_a_cluster_with_another_python_is_one_sentence(tmp_path: Path, switchyard_home: Path) -> None:
    job = ClusterUnderFire(tmp_path / "job", switchyard_home, rows=30, nodes=1, python=OTHER_PYTHON)
    with contextlib.closing(job):
        asking = job.begin(again=True)
        noted = asking.communicate(timeout=180)[1].decode()
    assert asking.returncode == 2, noted
    ours, theirs = platform.python_version(), _version_of(OTHER_PYTHON)
    assert theirs != ours
    said = noted.splitlines()[-1]
    assert said.startswith(f"switchyard: The Ray cluster at {job.ray.address} runs Ray 2.60.")
    assert f" with Python {theirs}, and this computer Ray 2.60." in said
    assert (
        f" with Python {ours}: install Ray 2.60 on all of its computers and on this one, with the same Python" in said
    )
    assert not job.output.exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(not OTHER_PYTHON, reason="SWITCHYARD_TEST_RAY_PYTHON: a Python of another version, with our Ray")
def test_a_computer_with_another_python_does_not_become_a_node(tmp_path: Path, switchyard_home: Path) -> None:
    """Ray itself refuses it, and a job goes on without it."""
    job = ClusterUnderFire(tmp_path / "job", switchyard_home, rows=30, nodes=1)
    with contextlib.closing(job):
        joining = subprocess.run(
            [OTHER_PYTHON, "-c", _JOINS.format(address=job.ray.address)],
            env=job.ray.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert joining.returncode != 0
        assert "Version mismatch" in joining.stderr
        job.begin(again=True)
        job.finish()
        assert len(job.document["endpoints"]) == 1


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_clocks_of_nodes_may_be_wrong_and_jump(tmp_path: Path, switchyard_home: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WRONG_CLOCK)
    clocks, began_s = [tmp_path / "early", tmp_path / "late"], time.time()
    job = ClusterUnderFire(tmp_path / "job", switchyard_home, rows=1000, nodes=0)
    with contextlib.closing(job):
        for clock, wrong_s in zip(clocks, _WRONG_S, strict=True):
            clock.write_text(str(wrong_s))
            job.ray.add(WRONG_CLOCK=str(clock), PYTHONPATH=f"{tmp_path}{os.pathsep}{CHECKOUT}")
        job.begin(again=True)
        seen = [float(path.read_text()) - time.time() for path in tmp_path.glob("*.seen")]
        assert all(any(abs(each - wrong_s) < 3600 for each in seen) for wrong_s in _WRONG_S)
        for clock, wrong_s in zip(clocks, reversed(_WRONG_S), strict=True):
            clock.write_text(str(wrong_s))
        job.finish()
        (known,) = known_jobs()
        assert known.finished_s is not None
        assert began_s <= known.begun_s <= known.finished_s <= time.time()
        assert 0 < job.document["computing_seconds"] <= job.document["seconds"] <= time.time() - began_s
        assert all(place["state"] == "working" and place["tokens_per_s"] >= 0 for place in job.document["endpoints"])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < NODES - 1, reason="a node has a core of its own")
def test_nodes_on_cores_of_their_own_are_measured(tmp_path: Path) -> None:
    model = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    report, said = Report({}), list[str]()
    config = EngineConfig(str(model), precision="bf16")
    bench_real_cluster(config, RealClusterPlan(nodes=2, rows=16, tokens=4, repeats=1), report, said.append)
    assert [row.unit for row in report.rows] == ["rows/s", "rows/s", "cores", "cores"]
    assert all(row.value > 0 for row in report.rows)


@pytest.fixture
def fire(tmp_path: Path, switchyard_home: Path) -> Iterator[ClusterUnderFire]:
    with closing(ClusterUnderFire(tmp_path / "job", switchyard_home, ROWS, NODES)) as made:
        yield made


@pytest.mark.exhaustive
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("who", ["node", "engine", "raylet", "asking"])
def test_every_row_is_answered_once_whoever_is_killed(fire: ClusterUnderFire, who: str) -> None:
    jobs = fire.run(getattr(fire, f"kill_{who}"), KILLS)
    print(f"{who}: {KILLS} kills in {jobs} jobs of {ROWS:,} rows")  # noqa: T201
    until(lambda: not fire.ray.engines(), 60)
