"""Requests accepted but not yet answered: one queue, and exactly one terminal event each."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.batch_files.messages import BatchFinished, SampleBatch, StartBatch
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import (
    Cancelled,
    Failed,
    Finished,
    FinishReason,
    Generate,
    LoadModel,
    TerminalEvent,
    UnloadModel,
)
from engine.tuning.messages import StartTuning, TuningFinished

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerOthers:
    """Other programs may be waiting for answers, or jobs for the engine: its thread should look.  It has no terminal
    event."""

    request_id: str = ""


Request = LoadModel | UnloadModel | Generate | StartBatch | SampleBatch | StartTuning
_OTHERS = AnswerOthers()


def cancelled_event(request: Request) -> TerminalEvent | None:
    """The terminal event if this request is cancelled before it starts; None if it cannot be cancelled."""
    reason: FinishReason = "cancelled"
    if isinstance(request, Generate):
        return Finished(request.request_id, reason, 0, 0, 0)
    if isinstance(request, StartBatch | SampleBatch):
        return BatchFinished(request.request_id, False, 0, 0, 0, 0, 0.0, "")
    if isinstance(request, StartTuning):
        return TuningFinished(request.request_id, False, None, False, None)
    return Cancelled(request.request_id) if isinstance(request, LoadModel) else None


class RequestQueue:
    """Hands requests to the engine thread one at a time, and ensures that each ends exactly once."""

    def __init__(self, send: Callable[[TerminalEvent], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._waiting: deque[Request | AnswerOthers] = deque()
        self._open: set[str] = set()
        self._cancelled: set[str] = set()
        self._closed = False

    def accept(self, request: Request) -> None:
        """Queue a request.  One whose id is still open is dropped: that id will get its terminal event."""
        with self._changed:
            if request.request_id in self._open:
                _log.warning("Dropped a request whose id is still open.")
                return
            self._open.add(request.request_id)
            self._waiting.append(request)
            if self._closed:
                self._drop_waiting()
            self._changed.notify_all()

    def accept_elsewhere(self, request: Request) -> bool:
        """Takes a request that another thread answers; returns whether that may begin.

        It ends with `end`; one whose id is still open is dropped, and one that comes too late has ended.
        """
        with self._changed:
            if request.request_id in self._open:
                _log.warning("Dropped a request whose id is still open.")
                return False
            self._open.add(request.request_id)
            if self._closed and (event := cancelled_event(request)) is not None:
                self._end(event)
            return not self._closed

    def look_after_others(self) -> None:
        """Queues `AnswerOthers`, unless it is queued already."""
        with self._changed:
            if _OTHERS not in self._waiting and not self._closed:
                self._waiting.append(_OTHERS)
                self._changed.notify_all()

    def take(self) -> Request | AnswerOthers | None:
        """The next request, waiting for one; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def wait(self) -> None:
        """Waits until there is something to take, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)

    def waits(self, *kinds: type[Request]) -> bool:
        """Whether the next request of the window is there and of one of these kinds."""
        if not self._waiting:
            return False
        with self._changed:
            return isinstance(self._next_of_window(), kinds)

    @property
    def is_closed(self) -> bool:
        """Whether the window wants nothing any more."""
        return self._closed

    @property
    def window_waits(self) -> bool:
        """Whether the window has asked for something that nobody has taken yet."""
        if not self._waiting:
            return False
        with self._changed:
            return self._next_of_window() is not None

    def take_if(self, *kinds: type[Request]) -> Request | None:
        """The next request of the window, if there is one now and it is of one of these kinds."""
        if not self._waiting:
            return None
        with self._changed:
            first = self._next_of_window()
            if first is None or not isinstance(first, kinds):
                return None
            self._waiting.remove(first)
            return first

    def _next_of_window(self) -> Request | None:
        return next((each for each in self._waiting if not isinstance(each, AnswerOthers)), None)

    def cancel(self, request_id: str) -> None:
        """End a waiting request now; flag a running one as cancelled.  Unknown ids are ignored."""
        with self._changed:
            if request_id not in self._open:
                return
            self._cancelled.add(request_id)
            for request in self._waiting:
                if isinstance(request, AnswerOthers) or request.request_id != request_id:
                    continue
                if (event := cancelled_event(request)) is not None:
                    self._waiting.remove(request)
                    self._end(event)
                    return

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
            self._drop_waiting()
            self._cancelled |= self._open
            self._changed.notify_all()

    def _drop_waiting(self) -> None:
        for request in list(self._waiting):
            if isinstance(request, AnswerOthers):
                self._waiting.remove(request)
                continue
            event = cancelled_event(request)
            if event is not None:
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
    """Requests that are answered beside the engine's thread, each on a thread of its own.

    Args:
        name: of the threads.
        doing: what is said of a failure, such as "asking another server".
    """

    def __init__(self, requests: RequestQueue, name: str, doing: str) -> None:
        self._requests, self._name, self._doing = requests, name, doing
        self._running: list[threading.Thread] = []

    def begin(self, request: Request, answer: Callable[[], TerminalEvent]) -> None:
        """Has `answer` find out how the request ends; whatever it raises ends it, too."""

        def run() -> None:
            try:
                ending = answer()
            except BaseException as error:
                ending = failed(request.request_id, error, self._doing)
            self._requests.end(ending)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._running.append(thread)
        thread.start()

    @property
    def running(self) -> list[threading.Thread]:
        """Those that have not ended yet."""
        self._running = [thread for thread in self._running if thread.is_alive()]
        return self._running

    def join(self) -> None:
        for thread in list(self._running):
            thread.join()
