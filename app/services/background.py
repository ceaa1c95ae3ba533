"""Runs slow functions off the GUI thread and delivers their results on it.

`LatestTask` is for results of which only the latest matters: a plan, a page of rows, a list.  `TaskQueue` is for work
that must be done: writing a file, deleting a folder.  Both run one function at a time, and belong to a `QObject` of
the GUI thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

from engine.common.errors import EngineError

_log = logging.getLogger("switchyard.background")

WAIT_S = 5.0
"""How long `close` waits for one function."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], Any]
    done: Callable[[Any], object]
    failed: Callable[[Exception], object]
    is_wanted: bool = True

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


class _Background(QObject):
    _ended = Signal(object, object, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._ended.connect(self._on_ended)

    @property
    def is_busy(self) -> bool:
        """Whether a function that is still wanted runs or waits."""
        return bool(self._waiting) or (self._running is not None and self._running.is_wanted)

    def close(self) -> None:
        """Waits for running and queued work; results not delivered by then may be lost."""
        while self._join() and self._waiting:
            self._start(self._waiting.popleft())

    def _begin(self) -> None:
        if self._running is None and self._waiting:
            self._start(self._waiting.popleft())

    def _start(self, job: _Job) -> None:
        self._running = job
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"background-{job.name}", daemon=True)
        self._thread.start()

    def _join(self) -> bool:
        if self._thread is not None:
            self._thread.join(WAIT_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, job: _Job) -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = job.function()
        except Exception as error:
            failure = error
        try:
            self._ended.emit(job, result, failure)
        except RuntimeError:
            _log.info("the result of %s is no longer needed", job.name)  # the window has closed

    def _on_ended(self, job: _Job, result: object, failure: Exception | None) -> None:
        if job is self._running:
            self._running = self._thread = None
        # Before delivery: the receiver may ask again, and that goes after what is already queued.
        self._begin()
        if not job.is_wanted:
            return
        if failure is not None:
            job.failed(failure)
        else:
            job.done(result)


class LatestTask(_Background):
    """Runs the function requested last.  A waiting one is replaced, a running one's result is dropped.

    Args:
        after_ms: debounce: how long to wait for a further request, as while typing or dragging.
    """

    def __init__(self, parent: QObject | None = None, *, after_ms: int = 0) -> None:
        super().__init__(parent)
        self._soon = QTimer(self, singleShot=True, interval=after_ms)
        self._soon.timeout.connect(self._begin)

    def ask(
        self,
        function: Callable[[], T],
        done: Callable[[T], object] = lambda _result: None,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Runs `function` in the background; then, on this thread, `done` with its result or `failed` with its error.

        Neither is called if there is another request meanwhile.  An error without `failed` is logged.
        """
        self.forget()
        job = _Job(function, done, failed or _log_failure(function))
        self._waiting.append(job)
        if self._soon.interval():
            self._soon.start()
        else:
            self._begin()

    def forget(self) -> None:
        """Cancels the request: a waiting function does not run, a running one's result is dropped."""
        self._soon.stop()
        self._waiting.clear()
        if self._running is not None:
            self._running.is_wanted = False

    def close(self) -> None:
        self.forget()
        super().close()

    def _begin(self) -> None:
        if not self._soon.isActive():
            super()._begin()


class TaskQueue(_Background):
    def add(
        self,
        function: Callable[[], T],
        done: Callable[[T], object] = lambda _result: None,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Runs `function` when its turn comes; then, on this thread, `done` with its result or `failed` with its error.

        An error without `failed` is logged.
        """
        self._waiting.append(_Job(function, done, failed or _log_failure(function)))
        self._begin()


def sentence_of(error: Exception) -> str:
    """What people are told of an error of ours; any other is raised again."""
    if isinstance(error, EngineError):
        return error.message
    raise error


def _log_failure(function: Callable[[], Any]) -> Callable[[Exception], None]:
    name = getattr(function, "__name__", type(function).__name__)
    # Only its type: the message may contain what the user wrote.
    return lambda error: _log.warning("%s failed in the background: %s", name, type(error).__name__)


def timer(parent: QObject, do: Callable[[], object], ms: int = 0, *, once: bool = False) -> QTimer:
    """Calls `do` every `ms` milliseconds, or once, after each start."""
    made = QTimer(parent, interval=ms, singleShot=once)
    made.timeout.connect(do)
    return made
