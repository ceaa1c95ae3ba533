"""Jobs on a real Ray cluster on the loopback, under fire: every row is answered once, and nothing is left running."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.batch_files.job_list import known_jobs, read_answers
from engine.batch_files.journal import journal_path
from engine.bench.real_cluster import RealClusterPlan, bench_real_cluster
from engine.bench.report import Report
from engine.common.config import EngineConfig
from tests.engine.tiny_families import tiny_checkpoint
from tests.loopback_ray import CHECKOUT, LoopbackRay, until

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

KILLS = int(os.environ.get("SWITCHYARD_TEST_RAY_KILLS", "20"))
ROWS, NODES = 1000, 3
_MOST_TOKENS = 60
_NO_ROOM = 1000
"""Bytes: less than any engine needs."""


class ClusterUnderFire:
    """Jobs of `rows` rows on three nodes, one after the other, and what is known of their answers."""

    def __init__(self, folder: Path, home: Path, rows: int, nodes: int) -> None:
        self.folder, self.rows, self.chance = folder, rows, random.Random(7)
        self.output = folder / "out.csv"
        tiny_checkpoint("qwen3_moe", folder / "model")
        lines = (json.dumps({"text": f"Row {row}?", "id": row}) + "\n" for row in range(rows))
        (folder / "in.jsonl").write_text("".join(lines))
        self.ray = LoopbackRay(home, nodes)
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
        assert self._asking is not None
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
        assert self._asking is not None
        said, noted = self._asking.communicate(timeout=600)
        assert self._asking.returncode == 0, noted.decode()[-2000:]
        document = json.loads(said)
        assert (document["finished"], document["done"], document["failed"]) == (True, self.rows, 0)
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
    made = ClusterUnderFire(tmp_path / "job", switchyard_home, ROWS, NODES)
    yield made
    made.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("who", ["node", "engine", "raylet", "asking"])
def test_every_row_is_answered_once_whoever_is_killed(fire: ClusterUnderFire, who: str) -> None:
    jobs = fire.run(getattr(fire, f"kill_{who}"), KILLS)
    print(f"{who}: {KILLS} kills in {jobs} jobs of {ROWS:,} rows")  # noqa: T201
    until(lambda: not fire.ray.engines(), 60)
