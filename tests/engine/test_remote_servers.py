"""A job over real servers, one of which is killed at some moment: every row is answered once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer
from engine.common.config import BatchJob, SamplingParams
from engine.remote.endpoint import Endpoint, save_endpoint
from engine.remote.job import run_remote_job
from tests.real_servers import (
    cut_starter,
    gguf_of,
    llama_program,
    llama_server,
    note,
    switchyard,
    vllm_python,
    vllm_server,
)

ROWS, TOKENS = 500, 16
KILLS = int(os.environ.get("SWITCHYARD_TEST_KILLS", "20"))
_SEED = int(os.environ.get("SWITCHYARD_TEST_SEED", "21"))


class Standing:
    """A job's three servers, with two layers of the starter: one that was killed is started again in another folder.

    Args:
        folder: of all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        model = cut_starter(folder)
        self._starts: dict[str, Callable[[Path], AbstractContextManager[tuple[str, int]]]] = {
            "ours": lambda at: switchyard(at, model)
        }
        if llama_program() is not None:
            gguf = gguf_of(model, folder)
            self._starts["llama"] = lambda at: llama_server(at, gguf, "-np", "4", "-c", "4096")
        if vllm_python() is not None:
            self._starts["vllm"] = lambda at: vllm_server(at, model)
        for name in ("second", "third")[: 3 - len(self._starts)]:
            self._starts[name] = lambda at: switchyard(at, model)
        self._opened: dict[str, ExitStack] = {}
        self.processes: dict[str, int] = {}

    def start(self) -> None:
        """Starts those that do not run."""
        for name, start in self._starts.items():
            if name in self._opened:
                continue
            self._number += 1
            at = self._folder / f"{self._number}-{name}"
            at.mkdir()
            opened = self._opened[name] = ExitStack()
            url, self.processes[name] = opened.enter_context(start(at))
            save_endpoint(Endpoint(name, url))

    def bury(self, name: str) -> None:
        """It was killed: what is left of it ends."""
        self._opened.pop(name).close()

    def close(self) -> None:
        for name in list(self._opened):
            self.bury(name)


class Killer:
    """Looks on, and kills a server once so many rows have been answered."""

    def __init__(self, process: int, at: int) -> None:
        self._process, self._at = process, at
        self.answered = 0

    def on_answer(self, _answer: Answer, _question: str) -> None:
        self.answered += 1
        if self.answered == self._at:
            os.kill(self._process, signal.SIGKILL)

    def watcher(self) -> JobWatcher:
        return JobWatcher(
            on_pace=lambda _pace, _blocked: None,
            on_answer=self.on_answer,
            should_yield=lambda: False,
            give_way=lambda: None,
            cancelled=lambda: False,
            patience_s=300,
        )


def run(folder: Path, endpoints: Sequence[str], watcher: JobWatcher) -> JobEnding:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"Say something about {row}."}) + "\n" for row in range(ROWS)))
    sampling = SamplingParams(max_tokens=TOKENS)
    job = BatchJob(str(source), str(output), sampling=sampling, endpoints=tuple(endpoints))
    ending = run_remote_job(prepare(job), watcher)
    rows = [dict(row.fields) for row in open_source(output).rows()]
    assert [row["text"] for row in rows] == [f"Say something about {row}." for row in range(ROWS)]
    assert all(row["generated_tokens"] > 0 and not row["problem"] for row in rows)
    return ending


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.name != "posix", reason="servers are killed by a signal")
def test_a_server_that_is_killed_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, llama.cpp's and vLLM, as far as they are here; more of ours for the others."""
    left = Path(tempfile.mkdtemp(prefix="k"))  # short, for sockets: a server that is killed leaves its own behind
    monkeypatch.setenv("TMPDIR", str(left))
    chance = random.Random(_SEED)
    standing = Standing(tmp_path)
    try:
        for number in range(KILLS):
            standing.start()
            folder = tmp_path / f"job-{number}"
            folder.mkdir()
            victim, at = chance.choice(list(standing.processes)), chance.randrange(1, ROWS * 8 // 10)
            killer = Killer(standing.processes[victim], at)
            begun_s = time.monotonic()
            ending = run(folder, list(standing.processes), killer.watcher())
            assert (ending.finished, ending.pace.done, killer.answered) == (True, ROWS, ROWS)
            places = ", ".join(f"{place.name} {place.rows} ({place.state})" for place in ending.pace.places)
            seconds = time.monotonic() - begun_s
            note(f"kill {number + 1}: {victim} after {at} rows; {places}; {seconds:.1f} s")
            standing.bury(victim)
    finally:
        standing.close()
        shutil.rmtree(left, ignore_errors=True)
