"""Events of work that threads of this process do."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from engine.common.errors import EngineError, ErrorCode
from engine.devices.failures import cancelled_error, fresh


class Worker(Protocol):
    """Whoever does the work of a stream."""

    @property
    def performer(self) -> int | None:
        """Identifier of the thread that does some of it at this moment."""

    def help_until(self, event: HostEvent) -> None:
        """Does work in the calling thread until `event` is done or somebody else is at it: a thread costs a wake."""


class HostEvent:
    """The end of one piece of work (see `engine.devices.device.Event`).

    Args:
        stream: its name.
        worker: does the work, unless the caller has done it.
    """

    __slots__ = ("_claimed", "_ended_s", "_failure", "_finished", "_started_s", "_stream", "_worker")

    def __init__(self, stream: str, worker: Worker | None = None) -> None:
        self._stream = stream
        self._worker = worker
        self._claimed = threading.Lock()  # whoever gets it decides: the stream runs the work, or a caller cancels it
        self._finished = threading.Event()
        self._failure: EngineError | None = None
        self._started_s = self._ended_s = 0.0

    def done(self) -> bool:
        """See `Event.done`."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`.  From work of the same stream it raises at once: that would be waiting for itself."""
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
        """Does what stands before this event, if nobody is at it: for a thread that has to wait for it anyway."""
        if self._worker is not None and not self._finished.is_set():
            self._worker.help_until(self)

    def cancel(self) -> bool:
        """See `Event.cancel`."""
        if not self.claim():
            return False
        self.fail(cancelled_error(self._stream))
        return True

    @property
    def failure(self) -> EngineError | None:
        """See `Event.failure`."""
        return self._failure if self._finished.is_set() else None

    @property
    def started_s(self) -> float:
        """See `Event.started_s`."""
        self._require_done()
        return self._started_s

    @property
    def ended_s(self) -> float:
        """See `Event.ended_s`."""
        self._require_done()
        return self._ended_s

    def claim(self) -> bool:
        """For the stream: whether the work is still to be done.  True once."""
        return self._claimed.acquire(blocking=False)

    def finish(self, started_s: float, ended_s: float) -> None:
        """For the stream: the work ended well."""
        self._started_s, self._ended_s = started_s, ended_s
        self._finished.set()

    def fail(self, error: EngineError) -> None:
        """For the stream: the work failed now, or will never be done."""
        self._failure = error
        self._started_s = self._ended_s = time.perf_counter()
        self._finished.set()

    def _require_done(self) -> None:
        if not self._finished.is_set():
            raise RuntimeError("the event is not done")
