"""Calls into drivers and file systems that may never come back, given up after a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCalls:
    """Makes calls on threads of its own, one at a time.

    A call that hangs cannot be ended, only left: its thread goes when the driver lets it, and until then every other
    call is refused at once, so that a driver that hangs for an hour holds one thread and not thousands.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._left: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether a call that was given up is still under way."""
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
        except BaseException as error:  # raised again where the call was made
            self._error = error

    def result(self, name: str) -> T:
        if self._error is not None:
            raise self._error
        if not self._values:
            raise TimeoutError(f"{name}: no answer in time")
        return self._values[0]
