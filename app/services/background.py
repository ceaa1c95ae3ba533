"""A slow call off the GUI thread, its result back on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QObject, Signal

_log = logging.getLogger("switchyard.background")


class BackgroundCall(QObject):
    """Runs one function in a thread of its own and tells how it went on the thread that made the call.

    Signals:
        done(object): what the function returned.
        failed(object): the exception it raised.
    """

    done = Signal(object)
    failed = Signal(object)
    _ended = Signal(object, object)

    def __init__(self, function: Callable[[], Any], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._function = function
        self._ended.connect(self._tell)
        self._thread = threading.Thread(target=self._run, name=f"background-{_name(function)}", daemon=True)

    def start(self) -> BackgroundCall:
        self._thread.start()
        return self

    @property
    def is_started(self) -> bool:
        """Whether `start` has been called."""
        return self._thread.ident is not None

    def wait(self, timeout_s: float = 5.0) -> bool:
        """Waits for the function to return, not for its signal; False if it took longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = self._function()
        except Exception as error:
            failure = error
        try:
            self._ended.emit(result, failure)
        except RuntimeError:
            _log.info("nobody waits for %s any more", _name(self._function))  # the window closed meanwhile

    def _tell(self, result: object, failure: object) -> None:
        if failure is not None:
            self.failed.emit(failure)
        else:
            self.done.emit(result)


def _name(function: Callable[[], Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
