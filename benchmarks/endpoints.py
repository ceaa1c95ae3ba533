"""A job over three servers of known speed, one of which is killed at some moment: its time against the least possible.

The servers are processes on this machine that answer so many rows at once, each after so many seconds: their speeds
are known, and do not depend on each other as those of real models on the same cores would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.batch_files.job_watcher import JobWatcher
from engine.batch_files.journal import discard, journal_path
from engine.batch_files.prepared_job import prepare
from engine.bench.report import Report, in_turn
from engine.common.config import BatchJob, SamplingParams
from engine.common.paths import python_module
from engine.remote.job import run_remote_job

ROWS = 500
_ALLOWED = 1.2
"""Times the least possible."""


@dataclass(frozen=True, slots=True)
class Paced:
    """A server that answers so many rows at once, each after so many seconds."""

    slots: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.slots / self.seconds


SERVERS = (Paced(8, 0.4), Paced(4, 0.2), Paced(4, 0.4))


def bench_endpoints(repeats: int, report: Report, note: Callable[[str], None]) -> None:
    """Measures the job without a kill and with one at random moments, in turn."""
    chance = random.Random(1)

    def killed(_repeat: int) -> float:
        victim, at = chance.randrange(len(SERVERS)), chance.randrange(1, ROWS * 8 // 10)
        ratio = _ratio(victim, at)
        note(f"  {ratio:.2f} times the least time with server {victim + 1} killed after {at} rows")
        return ratio

    turns: dict[str, Callable[[int], float]] = {
        "all three servers": lambda _repeat: _ratio(None, 0),
        "one of them killed": killed,
    }
    found = in_turn(turns, repeats, report, note, warm_ups=0)
    for name, ratios in found.items():
        report.add(f"{name}, time over the least", ratios, "x", limit=_ALLOWED, higher_is_better=False)
        note(f"{name}, the longest: {max(ratios):.2f}")


def least_s(victim: int | None, killed_s: float) -> float:
    """The least seconds in which the servers can answer all rows, if one of them answers none after `killed_s`."""
    rate = sum(server.rate for server in SERVERS)
    if victim is None:
        return ROWS / rate
    return killed_s + max(0.0, ROWS - rate * killed_s) / (rate - SERVERS[victim].rate)


def _ratio(victim: int | None, at: int) -> float:
    with tempfile.TemporaryDirectory() as name, _servers() as servers:
        folder, answered, killed_s = Path(name), 0, 0.0
        source = folder / "in.jsonl"
        source.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(ROWS)))

        def on_answer(*_: object) -> None:
            nonlocal answered, killed_s
            answered += 1
            if victim is not None and answered == at:
                os.kill(servers[victim][0], signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
                killed_s = time.monotonic() - begun_s

        watcher = JobWatcher(
            lambda _pace, _blocked: None, on_answer, lambda: False, lambda: None, lambda: False, patience_s=60
        )
        endpoints = tuple(f"http://127.0.0.1:{port}/v1#paced" for _process, port in servers)
        job = BatchJob(
            str(source), str(folder / "out.jsonl"), sampling=SamplingParams(max_tokens=8), endpoints=endpoints
        )
        prepared = prepare(job)
        begun_s = time.monotonic()
        ending = run_remote_job(prepared, watcher)
        seconds = time.monotonic() - begun_s
        discard(journal_path(prepared.output))
        assert ending.finished
        assert ending.pace.done == answered == ROWS
    return seconds / least_s(victim, killed_s)


@contextmanager
def _servers() -> Iterator[list[tuple[int, int]]]:
    """Process id and port of each."""
    command, extra = python_module("benchmarks.endpoints")
    processes = [
        subprocess.Popen(
            [*command, str(server.slots), str(server.seconds)],
            env={**os.environ, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for server in SERVERS
    ]
    try:
        found = []
        for process in processes:
            assert process.stdout is not None
            found.append((process.pid, int(process.stdout.readline())))
        yield found
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def serve(slots: int, seconds: float) -> None:
    """Answers until the standard input ends; its port is the first line that it writes."""
    places = threading.Semaphore(slots)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "paced"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with places:
                time.sleep(seconds)
            message = {"role": "assistant", "content": "as it was asked"}
            usage = {"prompt_tokens": 4, "completion_tokens": 8}
            self._send({"model": "paced", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

        def _send(self, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    server = Listening(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
