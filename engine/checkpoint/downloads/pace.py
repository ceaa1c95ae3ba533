"""How fast, how many at once, and when again: the clockwork of a transfer.  Every clock can be replaced."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]

FIRST_CONNECTIONS, MOST_CONNECTIONS = 8, 16
_STEP_S = 2.0
_WORTH_IT = 1.08
_SETTLED_S = 30.0
_LEAST_PER_CONNECTION = 128 * 1024
"""Bytes a second of a limit: more lines than that would each get too little to stay alive."""


class Meter:
    """The rate of the last seconds.  It falls to 0 when nothing arrives: there is no frozen speed."""

    SHORT_S, LONG_S = 6.0, 30.0
    _APART_S = 0.2

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._begun = clock()
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque([(self._begun, 0)])

    def add(self, count: int) -> None:
        """That many bytes have arrived."""
        with self._lock:
            self._total += count

    def rate(self, window_s: float = SHORT_S) -> float:
        """Bytes per second over the last `window_s`, or since the beginning if that is shorter."""
        now = self._clock()
        with self._lock:
            if now - self._samples[-1][0] >= self._APART_S:
                self._samples.append((now, self._total))
            while len(self._samples) > 1 and now - self._samples[1][0] > self.LONG_S:
                self._samples.popleft()
            first = next((each for each in self._samples if now - each[0] <= window_s), (now, self._total))
            return (self._total - first[1]) / (now - first[0]) if now > first[0] else 0.0

    def eta_s(self, remaining: int) -> float | None:
        """Seconds until `remaining` bytes will have arrived; None while nothing arrives, or too little is known."""
        if remaining <= 0:
            return 0.0
        now_rate, rate = self.rate(), self.rate(self.LONG_S)
        if now_rate <= 0 or rate <= 0 or self._clock() - self._begun < 1.0:
            return None
        return remaining / rate

    @property
    def total(self) -> int:
        """Bytes so far."""
        return self._total

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._begun


class Limit:
    """A speed limit over all lines: who has received bytes waits until they were due."""

    _BURST_S = 0.05
    _LOOK_S = 0.1

    def __init__(self, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._sleep, self._lock = clock, sleep, threading.Lock()
        self.bytes_per_s = 0
        self._due = clock()

    def set(self, bytes_per_s: int) -> None:
        """0 for none; holds from the next bytes on."""
        with self._lock:
            if bytes_per_s != self.bytes_per_s:
                self.bytes_per_s, self._due = bytes_per_s, self._clock()

    def wait(self, count: int, stopped: Callable[[], bool]) -> None:
        """Waits until `count` more bytes were due, or `stopped`, or the limit is changed."""
        with self._lock:
            limit = self.bytes_per_s
            if not limit:
                return
            self._due = due = max(self._due, self._clock() - self._BURST_S) + count / limit
        while not stopped() and self.bytes_per_s == limit and (left := due - self._clock()) > 0:
            self._sleep(min(left, self._LOOK_S))


class Crew:
    """How many lines at once: more as long as that brings more, fewer when the server says so."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.wanted = FIRST_CONNECTIONS
        self._most = MOST_CONNECTIONS
        self._looked = clock()
        self._before: tuple[int, float] | None = None
        self._settled_until = 0.0

    def look(self, rate: float, limit_bytes_per_s: int = 0) -> int:
        """How many there should be, given what arrives now; to be asked often."""
        now = self._clock()
        if limit_bytes_per_s:
            return max(1, min(self.wanted, limit_bytes_per_s // _LEAST_PER_CONNECTION))
        if now - self._looked < _STEP_S or now < self._settled_until:
            return self.wanted
        self._looked = now
        if self._before is not None and rate < self._before[1] * _WORTH_IT:
            self.wanted, self._before, self._settled_until = self._before[0], None, now + _SETTLED_S
        elif self.wanted < self._most and rate > 0:
            self._before = self.wanted, rate
            self.wanted = min(self._most, self.wanted + max(2, self.wanted // 2))
        else:
            self._before = None
        return self.wanted

    def too_many(self) -> None:
        """The server has had enough: half of them, for as long as this runs."""
        self.wanted = self._most = max(1, self.wanted // 2)
        self._before, self._settled_until = None, self._clock() + _SETTLED_S


class Waits:
    """Growing waits with jitter between tries, endless; whatever arrives starts them over."""

    FIRST_S, LONGEST_S = 0.5, 60.0

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._tries = 0
        self.until = 0.0

    def failed(self, least_s: float = 0.0) -> None:
        """Wait, at least so long.  Failures of several lines at once count as one."""
        now = self._clock()
        if now >= self.until or least_s > self.until - now:
            grown = min(self.LONGEST_S, self.FIRST_S * 2 ** min(self._tries, 20))
            self.until = now + max(least_s, grown * random.uniform(0.5, 1.0))
            self._tries += 1

    def went_well(self) -> None:
        """Something arrived."""
        self._tries = 0

    @property
    def left_s(self) -> float:
        """How long still."""
        return max(0.0, self.until - self._clock())
