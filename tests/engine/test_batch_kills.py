"""`kill -9` at random moments of one job, of whoever works on it: every row is answered exactly once."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.batch_files.journal import KnownJob, known_jobs, read_answers
from engine.batch_files.result_file import harmless
from tests.engine.tiny_families import tiny_checkpoint

_PATIENCE_S = 900.0
_MOST_TOKENS = 20
_COUNTED = ("answer", "finish_reason", "prompt_tokens", "generated_tokens", "problem")


class JobUnderFire:
    """One job that the command line and the window work on in turn, and what is known of its answers.

    Args:
        rows: of the input.
    """

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        self.folder, self.rows = folder, rows
        self.chance = random.Random(seed)
        self.kills = {"command": 0, "worker": 0, "window": 0, "writing": 0}
        self._known: dict[int, str] = {}
        self._window: subprocess.Popen[bytes] | None = None
        tiny_checkpoint("qwen3_moe", folder / "model")
        (folder / "in.jsonl").write_text(
            "".join(json.dumps({"text": f"Row {row}?", "id": row}) + "\n" for row in range(rows))
        )
        (folder / "home" / "config").mkdir(parents=True)
        settings = {"default_model": str(folder / "model")}
        (folder / "home" / "config" / "settings.json").write_text(json.dumps(settings))
        self._environment = {
            **os.environ,
            "SWITCHYARD_HOME": str(folder / "home"),
            "QT_QPA_PLATFORM": "offscreen",
            "OMP_NUM_THREADS": "1",
        }

    @property
    def output(self) -> Path:
        return self.folder / "out.csv"

    # --- who works on it ------------------------------------------------------------------------------

    def command(self) -> subprocess.Popen[bytes]:
        """The command line, which goes on with the job."""
        words = ["-m", "engine.cli", "batch", str(self.folder / "in.jsonl"), "-o", str(self.output), "--resume"]
        words += ["--model", str(self.folder / "model"), "--max-tokens", str(_MOST_TOKENS), "--json"]
        return self._process(words)

    def window(self) -> subprocess.Popen[bytes]:
        """The window, in which somebody clicks Resume; the one that is open, if one is."""
        if self._window is None:
            words = ["-m", "tests.app.batch_window", str(self.folder / "in.jsonl"), str(self.output)]
            self._window = self._process([*words, str(_MOST_TOKENS)])
        return self._window

    def close_window(self) -> None:
        """By force, with its worker."""
        if self._window is not None:
            workers = _workers(self._window)
            self._window.kill()
            self._window.communicate()
            self._window = None
            _gone, alive = psutil.wait_procs(workers, timeout=_PATIENCE_S)
            assert not alive, "a worker outlived its window"

    def _process(self, words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *words], env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    # --- who is killed --------------------------------------------------------------------------------

    def kill_command(self) -> None:
        with self.command() as process:
            _until(lambda: _is_running() or process.poll() is not None)
            self._a_moment()
            process.kill()
        self._was_killed("command")

    def kill_worker(self) -> None:
        window = self.window()
        _until(lambda: _is_running() or window.poll() is not None)
        self._a_moment()
        for worker in _workers(window):
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(_PATIENCE_S)
        self._was_killed("worker")

    def kill_window(self) -> None:
        window = self.window()
        _until(lambda: _is_running() or window.poll() is not None)
        self._a_moment()
        self.close_window()
        self._was_killed("window")

    def kill_while_writing(self) -> None:
        """Of a job that is done: the command line writes its result again, and dies in the middle of that."""
        with self.command() as process:
            parts = self.folder.glob
            _until(lambda: any(parts(".out.csv.*.part")) or process.poll() is not None)
            time.sleep(self.chance.uniform(0, 0.05))
            process.kill()
        self._was_killed("writing")

    def _a_moment(self) -> None:
        time.sleep(self.chance.uniform(0, 0.8))

    # --- what must be so ------------------------------------------------------------------------------

    def _was_killed(self, what: str) -> None:
        self.kills[what] += 1
        now = answers_of(_job(), self.rows)
        assert self._known.items() <= now.items(), "an answer that was kept is gone, or another"
        self._known = now
        if self.output.exists():
            self._require_whole(set(now))

    def finish(self) -> None:
        """The job is done by the command line, and everything is there once."""
        self.close_window()
        with self.command() as process:
            text, _ = process.communicate()
        assert process.returncode == 0
        assert json.loads(text)["done"] == self.rows
        self._was_killed("command")
        self.kills["command"] -= 1
        assert set(self._known) == set(range(self.rows))
        self._require_whole(set(range(self.rows)))

    def _require_whole(self, may_be_there: set[int]) -> None:
        """The result holds each of its rows once, with the very answer that was kept."""
        with open(self.output, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        ids = [int(row["id"]) for row in rows]
        assert ids == sorted(set(ids)), "a row is in the result twice, or out of its order"
        assert set(ids) <= may_be_there
        assert all(all(row[name] is not None for name in _COUNTED) for row in rows), "a row was cut"
        assert all(row["finish_reason"] in ("stop", "length") for row in rows)
        assert all(row["answer"] == harmless(self._known[int(row["id"])]) for row in rows)


def answers_of(job: KnownJob | None, rows: int) -> dict[int, str]:
    """What the journal holds."""
    answers = [] if job is None else read_answers(job.journal, limit=rows + 1)
    assert len({answer.row for answer in answers}) == len(answers)
    return {answer.row: answer.text for answer in answers}


def _job() -> KnownJob | None:
    jobs = known_jobs()
    assert len(jobs) <= 1
    return jobs[0] if jobs else None


def _is_running() -> bool:
    return any(job.running for job in known_jobs())


def _workers(window: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(window.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "engine.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
    return found


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # each look reads the list of jobs


@contextlib.contextmanager
def _under_fire(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, seed: int) -> Iterator[JobUnderFire]:
    monkeypatch.setenv("SWITCHYARD_HOME", str(folder / "home"))
    # A window's socket lies in the temporary folder; one that is killed leaves it there.
    with tempfile.TemporaryDirectory(prefix="w-") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        job = JobUnderFire(folder, rows, seed)
        try:
            yield job
        finally:
            job.close_window()


@pytest.mark.timeout(600)
def test_a_job_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=120, seed=1) as job:
        job.kill_command()
        assert len(job._known) < job.rows
        job.finish()
        assert list(tmp_path.glob(".*")) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_job_survives_a_kill_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=400, seed=1) as job:
        job.kill_command()
        job.kill_worker()
        job.kill_window()
        job.finish()
        job.kill_while_writing()
        job.finish()
        assert list(tmp_path.glob(".*")) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_kills_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _under_fire(tmp_path, monkeypatch, rows=30_000, seed=2) as job:
        kinds = [job.kill_command] * 30 + [job.kill_worker] * 35 + [job.kill_window] * 25
        job.chance.shuffle(kinds)
        for kill in kinds:
            if kill == job.kill_command:
                job.close_window()
            kill()
            done = len(job._known)
            assert done < job.rows, f"the job was over after {sum(job.kills.values())} kills: give it more rows"
        job.finish()
        for _ in range(10):
            job.kill_while_writing()
        job.finish()
        assert sum(job.kills.values()) == 100
        assert list(tmp_path.glob(".*")) == []
