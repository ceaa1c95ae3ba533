"""Slow functions off the GUI thread, their results back on it.

`LatestTask` is for what is only wanted as of now: a plan, a page of rows, a list.  `TaskQueue` is for what must happen:
a file to write, a folder to delete.  Both run one function at a time, and belong to a `QObject` of the GUI thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

_log = logging.getLogger("switchyard.background")

WAIT_S = 5.0
"""So long `close` waits for one function."""

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
    """One thread at a time; what came of it is told on the thread of this object, and to nobody once that is gone."""

    _ended = Signal(object, object, object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._waiting: deque[_Job] = deque()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._ended.connect(self._on_ended)

    @property
    def is_busy(self) -> bool:
        """Whether something that is wanted runs, or waits for its turn."""
        return bool(self._waiting) or (self._running is not None and self._running.is_wanted)

    def close(self) -> None:
        """Waits for what runs and for what must run; results that have not been told by then may not be told at all."""
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
            _log.info("nobody waits for %s any more", job.name)  # the window closed meanwhile

    def _on_ended(self, job: _Job, result: object, failure: Exception | None) -> None:
        if job is self._running:
            self._running = self._thread = None
        # Before it is told: who is told may ask for more, and that comes after what waits already.
        self._begin()
        if not job.is_wanted:
            return
        if failure is not None:
            job.failed(failure)
        else:
            job.done(result)


class LatestTask(_Background):
    """Runs the function asked for last.  What waits when another is asked for never runs; what runs is not told of.

    Args:
        after_ms: wait so long for another question before beginning: who types or drags asks once.
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

        Neither is called if something else is asked meanwhile.  An error that nobody wants to know of is logged.
        """
        self.forget()
        job = _Job(function, done, failed or _log_failure(function))
        self._waiting.append(job)
        if self._soon.interval():
            self._soon.start()
        else:
            self._begin()

    def forget(self) -> None:
        """Nobody wants to know any more: what waits does not run, and of what runs nothing is told."""
        self._soon.stop()
        self._waiting.clear()
        if self._running is not None:
            self._running.is_wanted = False

    def close(self) -> None:
        """As `forget`, and waits for what runs."""
        self.forget()
        super().close()

    def _begin(self) -> None:
        if not self._soon.isActive():
            super()._begin()


class TaskQueue(_Background):
    """Runs every function, one after the other, in the order in which they came."""

    def add(
        self,
        function: Callable[[], T],
        done: Callable[[T], object] = lambda _result: None,
        failed: Callable[[Exception], object] | None = None,
    ) -> None:
        """Runs `function` when its turn comes; then, on this thread, `done` with its result or `failed` with its error.

        An error that nobody wants to know of is logged.
        """
        self._waiting.append(_Job(function, done, failed or _log_failure(function)))
        self._begin()


def _log_failure(function: Callable[[], Any]) -> Callable[[Exception], None]:
    name = getattr(function, "__name__", type(function).__name__)
    # Its kind alone: a message may hold what a person wrote.
    return lambda error: _log.warning("%s failed in the background: %s", name, type(error).__name__)
