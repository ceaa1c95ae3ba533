"""A job over real servers, one of which is killed at some moment: every row is answered once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer
from engine.bench.peers.editions import LLAMA_CPP
from engine.common.config import BatchJob, SamplingParams
from engine.remote.endpoint import Endpoint, save_endpoint
from engine.remote.job import run_remote_job
from tests.engine.test_serve_verb import served
from tests.engine.tiny_families import tiny_checkpoint
from tests.peers import _HOMES

ROWS, TOKENS = 500, 32
KILLS = int(os.environ.get("SWITCHYARD_TEST_KILLS", "20"))
_GGUF = Path.home() / ".cache/Switchyard/gguf"
_SEED = int(os.environ.get("SWITCHYARD_TEST_SEED", "21"))


def note(text: str) -> None:
    """For who measures: shown with `-s`."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def switchyard(folder: Path, model: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of `switchyard serve`, which may be dead in the end."""
    with contextlib.suppress(AssertionError), served(folder, model) as (url, server):
        yield f"{url}/v1", server


def _program() -> Path:
    home = _HOMES[LLAMA_CPP.name]
    assert isinstance(home, Path)
    return home / LLAMA_CPP.server().relative_to(LLAMA_CPP.home())


@contextlib.contextmanager
def llama_server(folder: Path, model: Path) -> Iterator[tuple[str, int]]:
    """The same of llama.cpp's server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(_program()),
        "-m",
        str(model),
        "--port",
        str(port),
        "-np",
        "4",
        "-c",
        "4096",
        "-t",
        "1",
        "--no-webui",
    ]
    with open(folder / "llama.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        process.kill()
        process.wait()


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
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.name != "posix", reason="servers are killed by a signal")
def test_a_server_that_is_killed_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of ours and llama.cpp's, if that is built; a third of ours otherwise."""
    gguf = next(_GGUF.glob("qwen3-moe-tiny*.gguf"), None)
    model = tiny_checkpoint("mixtral", tmp_path / "tiny")
    left = Path(tempfile.mkdtemp(prefix="k"))  # short, for sockets: a server that is killed leaves its own behind
    monkeypatch.setenv("TMPDIR", str(left))
    chance = random.Random(_SEED)
    try:
        for number in range(KILLS):
            with ExitStack() as opened:
                servers = {}
                for name in ("first", "second", "third"):
                    folder = tmp_path / f"{number}-{name}"
                    folder.mkdir()
                    if name == "third" and gguf is not None and _program().exists():
                        servers[name] = opened.enter_context(llama_server(folder, gguf))
                    else:
                        servers[name] = opened.enter_context(switchyard(folder, model))
                    # The peer is so much faster that it would leave nothing to the others.
                    save_endpoint(Endpoint(name, servers[name][0], at_once=1 if name == "third" else None))
                victim, at = chance.choice(list(servers)), chance.randrange(1, ROWS * 8 // 10)
                killer = Killer(servers[victim][1], at)
                begun_s = time.monotonic()
                ending = run(folder, list(servers), killer.watcher())
                assert (ending.finished, ending.pace.done, killer.answered) == (True, ROWS, ROWS)
                places = ", ".join(f"{place.name} {place.rows} ({place.state})" for place in ending.pace.places)
                seconds = time.monotonic() - begun_s
                note(f"kill {number + 1}: {victim} after {at} rows; {places}; {seconds:.1f} s")
    finally:
        shutil.rmtree(left)
