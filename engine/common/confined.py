"""A child process for work that may loop forever, fill the memory or crash: both of its ends.

The child answers requests from its standard input, one at a time: a line of JSON, perhaps followed by bytes; the
answer is a line, perhaps after others. It ends itself when a request takes too long, and limits its own memory where
the system allows that; the parent watches both.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from engine.common.errors import CancelCheck, RequestCancelled
from engine.common.paths import confined_module

LOOK_S = 0.02

# --- the child's end ---


def limit_memory(nbytes: int) -> None:
    """Limits this process where the system allows it; the parent watches it too."""
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def dies_after(seconds: float) -> Iterator[None]:
    """Ends this process if it is not done by then, even if a library holds the GIL forever."""
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the system's own end, which needs nothing of Python
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        with open(os.devnull, "wb") as nowhere:
            # A C thread.  It reads the frames of a thread that runs, which may crash: the end is the same.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()


# --- the parent's end ---


def started(module: str, variables: Mapping[str, str] | None = None, *arguments: str) -> subprocess.Popen[bytes]:
    """The child, which runs one of our modules.

    Args:
        variables: its whole environment, if not that of what runs others' code.
    """
    command, confined = confined_module(module)
    # Ctrl-C in a terminal is for the parent, which ends the child.
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=confined if variables is None else variables,
        **apart,
    )


class Exchange:
    """A pending request and its answer, on a thread: pipes have no read timeout on every system.

    Args:
        on_line: told, on the thread, of each line before the answer; those are lists.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        request: bytes,
        seconds: float,
        sent: threading.Event | None = None,
        on_line: Callable[[list[Any]], object] | None = None,
    ) -> None:
        self.process, self.seconds = process, seconds
        self.begun_s = time.monotonic()
        self._sent, self._on_line = sent, on_line
        self.done = threading.Event()
        self.answer: dict[str, Any] | None = None
        """None until it arrives; stays None if the process has ended."""
        self._request = request
        self.thread = threading.Thread(target=self._run, name="confined", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(self._request)
            self.process.stdin.flush()
            if self._sent is not None:
                self._sent.set()
            while isinstance(line := json.loads(self.process.stdout.readline()), list):
                if self._on_line is not None:
                    self._on_line(line)
            self.answer = line
        except (OSError, ValueError):  # the process has ended, perhaps midway through an answer
            pass
        finally:
            self.done.set()


class ConfinedChild:
    """A child, started on first use and again after it was ended.  Thread-safe; one request at a time."""

    module: str

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._exchange: Exchange | None = None

    def over(self, seconds: float, nbytes: int = 0) -> Exception:
        """What to raise where it takes longer, or else more memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        if self._lock.acquire(timeout=1.0):  # a thread frozen at exit may hold it forever
            try:
                self._end()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _locked(self, cancelled: CancelCheck) -> Iterator[None]:
        while not self._lock.acquire(timeout=LOOK_S):
            if cancelled():
                raise RequestCancelled
        try:
            yield
        finally:
            self._lock.release()

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _child(self) -> subprocess.Popen[bytes]:
        if self._process is None or not self._is_alive():
            self._end()
            self._process = started(self.module)
        return self._process

    def _wait(self, exchange: Exchange, cancelled: CancelCheck, most_bytes: int) -> None:
        """Waits for the answer or the end of the process; ends it if it is over its limits or cancelled."""
        try:
            while not exchange.done.wait(LOOK_S):
                if cancelled():
                    raise RequestCancelled
                if time.monotonic() - exchange.begun_s > exchange.seconds + 1.0:  # it should have ended itself by now
                    raise self.over(exchange.seconds)
                if _memory_of(exchange.process) > most_bytes:
                    raise self.over(0, most_bytes)
        except BaseException:
            self._end()
            raise
        exchange.thread.join()
        if self._exchange is exchange:
            self._exchange = None

    def _end(self) -> None:
        process, self._process = self._process, None
        exchange, self._exchange = self._exchange, None
        if process is None:
            return
        process.kill()
        if exchange is not None:
            exchange.thread.join()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        process.wait()


def _memory_of(process: subprocess.Popen[bytes]) -> int:
    """Its bytes in RAM; 0 if it has ended, which is handled elsewhere."""
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.Error:
        return 0
