"""Events of work done by threads of this process, and sleeping until a moment, to within some tens of microseconds."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.devices.failures import cancelled_error, fresh

if TYPE_CHECKING:
    from engine.devices.threaded_stream import ThreadedStream

_PR_SET_TIMERSLACK = 29
_LONGEST_S = 0.005
"""Interval at which a sleep checks for interruption."""
_SPIN_S = 20e-6
"""Sleeps overshoot, so the last stretch yields the CPU in a loop instead."""


_sharpened = threading.local()


def sharpen_timers() -> None:
    """Makes sleeps of the calling thread precise: Linux delays them by 50 microseconds to save power."""
    if getattr(_sharpened, "done", False):
        return
    _sharpened.done = True
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        except (OSError, AttributeError):
            return


def sleep_until(moment_s: float, interrupted: Callable[[], bool]) -> bool:
    """Sleeps until `time.perf_counter()` has reached `moment_s`; False as soon as `interrupted()`."""
    while True:
        if interrupted():
            return False
        left_s = moment_s - time.perf_counter()
        if left_s <= 0:
            return True
        time.sleep(0 if left_s <= _SPIN_S else min(left_s - _SPIN_S, _LONGEST_S))


class HostEvent:
    """The end of one unit of work (see `engine.devices.device.Event`).

    Args:
        stream: its name.
        worker: runs the work, unless the caller did.
    """

    __slots__ = ("_claimed", "_ended_s", "_failure", "_finished", "_started_s", "_stream", "_worker")

    def __init__(self, stream: str, worker: ThreadedStream | None = None) -> None:
        self._stream = stream
        self._worker = worker
        self._claimed = threading.Lock()  # taken once: by the stream to run the work, or by a caller to cancel it
        self._finished = threading.Event()
        self._failure: EngineError | None = None
        self._started_s = self._ended_s = 0.0

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`.  Raises if called by work of the same stream, which would wait for itself."""
        if not self._finished.is_set():
            worker = self._worker
            if worker is not None and worker.performer == threading.get_ident():
                raise EngineError(
                    ErrorCode.INTERNAL, f"Work on {self._stream} waits for what is queued behind it: report this."
                )
            if timeout_s is None:
                self.help()
            if not self._finished.wait(timeout_s):
                return False
        if self._failure is not None:
            raise fresh(self._failure)
        return True

    def help(self) -> None:
        """Runs the work before this event, if no thread does: for a caller that has to wait anyway."""
        if self._worker is not None and not self._finished.is_set():
            self._worker.help_until(self)

    def cancel(self) -> bool:
        if not self.claim():
            return False
        self.fail(cancelled_error(self._stream))
        return True

    @property
    def failure(self) -> EngineError | None:
        return self._failure if self._finished.is_set() else None

    @property
    def started_s(self) -> float:
        self._require_done()
        return self._started_s

    @property
    def ended_s(self) -> float:
        self._require_done()
        return self._ended_s

    def claim(self) -> bool:
        """Called by the stream: claims the work; true exactly once."""
        return self._claimed.acquire(blocking=False)

    def finish(self, started_s: float, ended_s: float) -> None:
        """Called by the stream: the work succeeded."""
        self._started_s, self._ended_s = started_s, ended_s
        self._finished.set()

    def fail(self, error: EngineError) -> None:
        """Called by the stream: the work failed, or will never run."""
        self._failure = error
        self._started_s = self._ended_s = clock.now()
        self._finished.set()

    def _require_done(self) -> None:
        if not self._finished.is_set():
            raise RuntimeError("the event is not done")
