"""A clock that stops while a job waits, so that rates and estimates count computing time only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ComputingClock:
    """Monotonic seconds, starting at 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._waited_s = 0.0
        self._waits_since_s: float | None = None

    def now(self) -> float:
        """Seconds of computing so far."""
        return (self._clock() if self._waits_since_s is None else self._waits_since_s) - self._begun_s - self._waited_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock inside the block; may be nested."""
        if self._waits_since_s is not None:
            yield
            return
        self._waits_since_s = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - self._waits_since_s
            self._waits_since_s = None
