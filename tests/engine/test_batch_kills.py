"""`kill -9` at random moments of one job: every row is answered exactly once, none lost, none twice."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.batch_files.job_list import known_jobs
from tests.engine.tiny_families import tiny_checkpoint

_ROWS = 120


def _run(folder: Path, environment: dict[str, str], kill_after_s: float | None) -> tuple[int, str]:
    """The command, killed after so many seconds of answering; its exit code and what it printed."""
    command = [sys.executable, "-m", "engine.cli", "batch", str(folder / "in.jsonl"), "-o", str(folder / "out.csv")]
    command += ["--model", str(folder / "model"), "--threads", "1", "--max-tokens", "20", "--resume", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as done:
        if kill_after_s is not None:
            deadline = time.monotonic() + 100
            # The journal is opened once the model is loaded: what matters begins there.
            while done.poll() is None and time.monotonic() < deadline and not any(job.running for job in known_jobs()):
                time.sleep(0.01)
            time.sleep(kill_after_s)
            done.send_signal(signal.SIGKILL)
        text, errors = done.communicate()
    return done.returncode, text if done.returncode == 0 else errors


def _kill_and_resume(folder: Path, monkeypatch: pytest.MonkeyPatch, kills: int, seed: int) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(folder / "home"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    tiny_checkpoint("qwen3_moe", folder / "model")
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"text": f"Row {row}?", "id": row}) + "\n" for row in range(_ROWS))
    )
    chance = random.Random(seed)
    progress = [0]
    for _ in range(kills):
        code, _text = _run(folder, environment, chance.uniform(0, 0.4))
        (job,) = known_jobs()
        assert job.done >= progress[-1], "an answer that was kept is gone"
        progress.append(job.done)
        if code == 0:
            break
    code, text = _run(folder, environment, None)
    assert code == 0, text
    assert json.loads(text)["done"] == _ROWS
    with open(folder / "out.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [str(row) for row in range(_ROWS)]
    assert all(row["finish_reason"] in ("stop", "length") for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_jobs_answer_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _kill_and_resume(tmp_path, monkeypatch, kills=2, seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        _kill_and_resume(folder, monkeypatch, kills=10, seed=seed)
