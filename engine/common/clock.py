"""The clock that the engine times itself by.

Usually it is the system's, and reading it costs what reading that costs. While a card is open whose time is modelled
(`engine.devices.emulated`), it is an `OwnClock`: it stands still while the processor does what the card would do, and
jumps to the moment at which the card would be done where the engine waits for it.

Read it as `clock.now()`, through the module: who imports the function itself keeps the system's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, perf_counter_ns

now: Callable[[], float] = perf_counter
"""Seconds."""
now_ns: Callable[[], int] = perf_counter_ns
"""The same moment in nanoseconds."""
own: OwnClock | None = None
"""The clock in use, if it is not the system's."""


def read() -> float:
    """`now`, whichever that is at the moment of the call: for who keeps a function to read the clock with."""
    return now()


class OwnClock:
    """A clock that can stand still, run at another pace, and jump ahead.  It never goes back.

    Args:
        is_fixed: the host's time does not pass by itself either, only as `advance` says: for results that can be
            repeated.
        source: the time that passes otherwise.
    """

    def __init__(self, *, is_fixed: bool = False, source: Callable[[], float] = perf_counter) -> None:
        self.is_fixed = is_fixed
        self._source = source
        self._lock = threading.RLock()
        self._stops = 0
        self._paces: list[float] = []
        # Moment, the source's time then, and pace since: replaced as a whole, so that reading needs no lock.
        self._since = (source(), source(), 0.0 if is_fixed else 1.0)

    def now(self) -> float:
        moment_s, source_s, pace = self._since
        return moment_s + (self._source() - source_s) * pace if pace else moment_s

    def now_ns(self) -> int:
        return round(self.now() * 1e9)

    def stopped(self) -> Stopped:
        """Within, it stands still."""
        return Stopped(self, 1)

    def going_on(self) -> Stopped:
        """Within `stopped`, on the same thread: it runs again."""
        return Stopped(self, -1)

    @contextmanager
    def paced(self, factor: float) -> Iterator[None]:
        """Within, it runs by this factor faster: what is done takes so much longer than it does here."""
        with self._lock:
            self._paces.append(factor)
            self._go_on()
        try:
            yield
        finally:
            with self._lock:
                self._paces.pop()
                self._go_on()

    def stop(self, more: int) -> None:
        """It stands still from now on, or runs on once what stopped it has ended; what this takes is not counted."""
        moment_s = self.now()
        with self._lock:
            self._stops += more
            self._go_on(moment_s)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._go_on(self.now() + max(0.0, seconds))

    def advance_to(self, moment_s: float) -> None:
        """Jumps ahead to a moment, unless that has passed."""
        with self._lock:
            self._go_on(max(self.now(), moment_s))

    def _go_on(self, moment_s: float | None = None) -> None:
        moment_s = self.now() if moment_s is None else moment_s
        pace = 0.0 if self._stops or self.is_fixed else self._paces[-1] if self._paces else 1.0
        self._since = (moment_s, self._source(), pace)


class Stopped:
    """A clock that stands still, or goes on, for a while."""

    __slots__ = ("_clock", "_more")

    def __init__(self, clock: OwnClock, more: int) -> None:
        self._clock, self._more = clock, more

    def __enter__(self) -> None:
        self._clock.stop(self._more)

    def __exit__(self, *_: object) -> None:
        self._clock.stop(-self._more)


def use(clock: OwnClock | None) -> None:
    """The clock from now on; None: the system's."""
    global now, now_ns, own
    own = clock
    now, now_ns = (perf_counter, perf_counter_ns) if clock is None else (clock.now, clock.now_ns)
