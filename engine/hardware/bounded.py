"""Calls with a timeout, for drivers and file systems that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Runs calls on its own threads, one at a time.

    A hanging call cannot be ended, only abandoned: its thread ends when the driver returns. Until then all further
    calls fail at once, so a driver that hangs for an hour blocks one thread and not thousands.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._left: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._left is not None and self._left.is_alive()

    def __call__(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises.

        Raises:
            TimeoutError: it took longer than `timeout_s`, or an earlier call still hangs.
        """
        with self._turn:
            if self.hangs:
                raise TimeoutError(f"{self._name}: an earlier call still hangs")
            outcome: _Outcome[T] = _Outcome()
            thread = threading.Thread(target=outcome.run, args=(function,), name=self._name, daemon=True)
            thread.start()
            thread.join(timeout_s)
            self._left = thread if thread.is_alive() else None
            return outcome.result(self._name)


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None

    def run(self, function: Callable[[], T]) -> None:
        try:
            self._values.append(function())
        except BaseException as error:  # re-raised in the calling thread
            self._error = error

    def result(self, name: str) -> T:
        if self._error is not None:
            raise self._error
        if not self._values:
            raise TimeoutError(f"{name}: no answer in time")
        return self._values[0]
