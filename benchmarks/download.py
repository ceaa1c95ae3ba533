"""`switchyard bench download`: our downloader beside one `curl`, from the same server on this machine, in turn.

The server is a process of its own that sends ranges of one file over a line of a given speed, with a given latency
before every answer and a given limit for each connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.bench.report import Report, in_turn
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module

_NAME = "model.safetensors"
_CHUNK = 256 * 1024
_ETAG = '"one-file-for-good"'


@dataclass(frozen=True, slots=True)
class Line:
    """What lies between: `mb_per_s` of all connections together and of each (0: any), and seconds before an answer."""

    name: str
    size_mb: int
    mb_per_s: float = 0.0
    each_mb_per_s: float = 0.0
    latency_s: float = 0.0


LINES = (
    Line("1 Gbit/s", 500, mb_per_s=125.0),
    Line("no limit", 500),
    Line("200 ms, 5 MB/s a connection", 100, each_mb_per_s=5.0, latency_s=0.2),
)


def bench_download(repeats: int, report: Report, on_progress: Callable[[str], None]) -> None:
    """Adds a row for each line: megabytes a second until every byte is verified and in place, against curl's."""
    curl = shutil.which("curl")
    if curl is None:
        report.skip_peer("curl", "it is not installed")
    with _own_home() as home:
        for line in LINES:
            file = home / _NAME
            sha256 = _write_noise(file, line.size_mb)
            with _served(file, line) as address:
                turns = _turns(line, address, file, sha256, curl)
                rates = in_turn(turns, repeats, report, on_progress, warm_ups=0, what=line.name)
            peer = "curl" if "curl" in rates else None
            report.add(f"download, {line.name}", rates["ours"], "MB/s", peer=peer, peer_values=rates.get("curl"))


@contextlib.contextmanager
def _own_home() -> Iterator[Path]:
    """Downloads are kept apart from the user's, on the same disk."""
    from engine.common.paths import data_dir

    data_dir().mkdir(parents=True, exist_ok=True)
    before = os.environ.get("SWITCHYARD_HOME")
    with tempfile.TemporaryDirectory(prefix="bench-download-", dir=data_dir()) as home:
        os.environ["SWITCHYARD_HOME"] = home
        try:
            yield Path(home)
        finally:
            if before is None:
                del os.environ["SWITCHYARD_HOME"]
            else:
                os.environ["SWITCHYARD_HOME"] = before


def _turns(line: Line, address: str, file: Path, sha256: str, curl: str | None) -> dict[str, Callable[[int], float]]:
    """Megabytes a second of ours, and of curl's where it is installed."""
    turns: dict[str, Callable[[int], float]] = {"ours": lambda _repeat: line.size_mb / _fetch(address, file, sha256)}
    if curl is not None:
        turns["curl"] = lambda _repeat: line.size_mb / _curl(curl, address, file.parent)
    return turns


def _write_noise(file: Path, megabytes: int) -> str:
    sha = hashlib.sha256()
    block = os.urandom(1_000_000)
    with file.open("wb") as out:
        for number in range(megabytes):
            block = number.to_bytes(8, "little") + block[8:]
            out.write(block)
            sha.update(block)
    return sha.hexdigest()


def _fetch(address: str, file: Path, sha256: str) -> float:
    """Seconds until all is verified and in place."""
    from engine.checkpoint.downloads import queue
    from engine.checkpoint.hub import Candidate, RepoFile, Repository

    files = (RepoFile(_NAME, file.stat().st_size, sha256),)
    repository = Repository("huggingface", "bench/model", "main", files, "", "", False, endpoint=address)
    key = queue.add(Candidate(repository, "", files, "original")).key
    begun = time.perf_counter()
    done = queue.run(key)
    seconds = time.perf_counter() - begun
    if done.state != queue.DownloadState.DONE:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, done.problem or f"The download ended {done.state}.")
    shutil.rmtree(done.folder)
    queue.cancel(key)
    return seconds


def _curl(curl: str, address: str, folder: Path) -> float:
    """Seconds until the file is there."""
    target = folder / "curl.out"
    command = [curl, "--silent", "--fail", "--output", str(target), f"{address}/bench/model/resolve/main/{_NAME}"]
    begun = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


@contextlib.contextmanager
def _served(file: Path, line: Line) -> Iterator[str]:
    command, variables = python_module("benchmarks.download")
    limits = [str(line.mb_per_s), str(line.each_mb_per_s), str(line.latency_s)]
    server = subprocess.Popen(
        [*command, str(file), *limits], env={**os.environ, **variables}, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        if not port:
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The benchmark's own server did not start.")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        server.kill()
        server.communicate()


def _serve(path: str, mb_per_s: float, each_mb_per_s: float, latency_s: float) -> None:
    """Serves the file until killed, or until the benchmark is gone."""
    lock = threading.Lock()
    free_at = 0.0

    def due(count: int) -> float:
        """When the line has carried so many bytes more."""
        nonlocal free_at
        if not mb_per_s:
            return 0.0
        with lock:
            free_at = max(free_at, time.monotonic() - 0.02) + count / (mb_per_s * 1e6)
            return free_at

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            time.sleep(latency_s)
            size = os.path.getsize(path)
            first, last = 0, size - 1
            if asked := self.headers.get("Range"):
                first, last = (int(text) for text in asked.removeprefix("bytes=").split("-"))
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("ETag", _ETAG)
            self.end_headers()
            self.wfile.flush()
            begun = time.monotonic()
            with open(path, "rb") as file, contextlib.suppress(OSError):
                place = first
                while place <= last:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), place, min(_CHUNK, last + 1 - place))
                    place += sent
                    own = begun + (place - first) / (each_mb_per_s * 1e6) if each_mb_per_s else 0.0
                    time.sleep(max(0.0, due(sent) - time.monotonic(), own - time.monotonic()))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1], *(float(text) for text in sys.argv[2:5]))
