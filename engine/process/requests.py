"""Requests accepted but not yet answered: one queue, and exactly one terminal event each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from engine.process.failures import as_engine_error, log_failure
from engine.protocol import (
    BatchFinished,
    Cancelled,
    Failed,
    Finished,
    Generate,
    LoadModel,
    Request,
    SampleBatch,
    StartBatch,
    StartTuning,
    TerminalEvent,
    TuningFinished,
)

_log = logging.getLogger(__name__)


def cancelled_event(request: Request) -> TerminalEvent | None:
    """The terminal event if this request is cancelled before it starts; None if it cannot be cancelled."""
    if isinstance(request, Generate):
        return Finished(request.request_id, "cancelled")
    if isinstance(request, StartBatch | SampleBatch):
        return BatchFinished(request.request_id)
    if isinstance(request, StartTuning):
        return TuningFinished(request.request_id)
    return Cancelled(request.request_id) if isinstance(request, LoadModel) else None


class RequestQueue:
    """Hands requests to the engine thread one at a time, and ensures that each ends exactly once."""

    def __init__(self, send: Callable[[TerminalEvent], object]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._has_news = False
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._closed = False

    def accept(self, request: Request) -> None:
        """Queue a request.  One whose id is still open is dropped: that id will get its terminal event."""
        with self._changed:
            if self._opens(request):
                self._waiting.append(request)
                if self._closed:
                    self._drop(request)
                self._changed.notify_all()

    def accept_elsewhere(self, request: Request) -> bool:
        """Takes a request that another thread answers; returns whether that may begin.

        It ends with `end`; one whose id is still open is dropped, and one that comes too late has ended.
        """
        with self._changed:
            if not self._opens(request):
                return False
            if self._closed and (event := cancelled_event(request)) is not None:
                self._end(event)
            return not self._closed

    def _opens(self, request: Request) -> bool:
        if request.request_id in self._open:
            _log.warning("Dropped a request whose id is still open.")
            return False
        self._open.add(request.request_id)
        return True

    def look_after_others(self) -> None:
        """Other programs may be waiting for answers, or jobs for the engine: its thread should look."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def take(self) -> Request | None:
        """The next request, waiting for one; None if it is time to look after others, or the queue is over."""
        with self._changed:
            self.wait()
            self._has_news = False
            return self._waiting.popleft() if self._waiting else None

    def wait(self) -> None:
        """Waits until there is something to do, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_news or self._closed)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_over(self) -> bool:
        return self._closed and not self._waiting

    def waits(self, *kinds: type[Request]) -> bool:
        """Whether the next request is there, and of one of these kinds if any are named."""
        if not self._waiting:  # asked for every token
            return False
        with self._changed:
            return bool(self._waiting) and (not kinds or isinstance(self._waiting[0], kinds))

    def take_if(self, *kinds: type[Request]) -> Request | None:
        """The next request, if there is one now and it is of one of these kinds, if any are named."""
        with self._changed:
            return self._waiting.popleft() if self.waits(*kinds) else None

    def cancel(self, request_id: str) -> None:
        """End a waiting request now; flag a running one as cancelled.  Unknown ids are ignored."""
        with self._changed:
            if request_id not in self._open:
                return
            self._cancelled.add(request_id)
            for request in list(self._waiting):
                if request.request_id == request_id:
                    self._drop(request)

    def is_cancelled(self, request_id: str) -> bool:
        # Called for every token; set membership needs no lock.
        return request_id in self._cancelled

    def end(self, event: TerminalEvent) -> None:
        """Send a request's terminal event, unless it has had one."""
        with self._changed:
            self._end(event)

    def close(self) -> None:
        """Cancel everything and accept nothing more."""
        with self._changed:
            self._closed = True
            for request in list(self._waiting):
                self._drop(request)
            self._cancelled |= self._open
            self._changed.notify_all()

    def _drop(self, request: Request) -> None:
        if (event := cancelled_event(request)) is not None:
            self._waiting.remove(request)
            self._end(event)

    def _end(self, event: TerminalEvent) -> None:
        if event.request_id in self._open:
            self._open.discard(event.request_id)
            self._cancelled.discard(event.request_id)
            self._send(event)


def failed(request_id: str, error: BaseException, doing: str) -> Failed:
    """The end of a request, whatever happened: logged, and as a message for the user."""
    log_failure(error, doing)
    return Failed.of(as_engine_error(error, doing), request_id)


class RequestThreads:
    """Requests that are answered beside the engine's thread, each on a thread of its own."""

    def __init__(self, requests: RequestQueue) -> None:
        self._requests = requests
        self._running: list[threading.Thread] = []

    def begin(self, request: Request, name: str, doing: str, answer: Callable[[], TerminalEvent]) -> None:
        """Has `answer` find out how the request ends; whatever it raises ends it, too, as a failure of `doing`."""

        def run() -> None:
            try:
                ending = answer()
            except BaseException as error:
                ending = failed(request.request_id, error, doing)
            self._requests.end(ending)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running.append(thread)
        thread.start()

    @property
    def running(self) -> list[threading.Thread]:
        self._running = [thread for thread in self._running if thread.is_alive()]
        return self._running

    def join(self) -> None:
        for thread in list(self._running):
            thread.join()
