"""How long sweeps take once they are warm: what a few rows can say of how fast many will be."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleTime:
    """What answering a few rows took.

    Attributes:
        seconds: all of it, the time of others who had priority left out.
        sweep_rows, sweep_s: rows that shared a sweep, and the seconds of one that decodes; 0 if none was seen whole.
    """

    seconds: float
    sweep_rows: int = 0
    sweep_s: float = 0.0


class SweepClock:
    """Times sweeps by what is under way, which it is shown between layers.

    The first sweeps read prompts, and weights that nobody has touched since they were loaded: no later one does, so
    only those count in which the very same rows get one more token each.

    Args:
        under_way: (rows, tokens generated for them), as `BatchExecutor.under_way` has it.
    """

    def __init__(
        self, under_way: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._under_way, self._clock = under_way, clock
        self._begun_s = clock()
        self._away_s = 0.0
        self._last = (0, 0)
        self._last_s: float | None = None
        self._sweeps: list[tuple[int, float]] = []

    def look(self) -> None:
        """To be called between layers."""
        now = self._under_way()
        if now == self._last:
            return
        at = self._clock()
        rows, tokens = now
        decoded = rows == self._last[0] and tokens == self._last[1] + rows
        if decoded and self._last_s is not None:
            self._sweeps.append((rows, at - self._last_s))
        # Every row has its first token: from here on nobody reads a prompt.
        self._last, self._last_s = now, at if tokens >= rows else None

    def leave(self, others: Callable[[], None]) -> None:
        """Calls `others`, whose time is nobody's here; the sweep under way is not timed."""
        begun_s = self._clock()
        try:
            others()
        finally:
            self._away_s += self._clock() - begun_s
            self._last_s = None

    def time(self) -> SampleTime:
        """What there was: of sweeps of as many rows as most had, the median."""
        seconds = self._clock() - self._begun_s - self._away_s
        if not self._sweeps:
            return SampleTime(seconds)
        (rows, _count), *_ = Counter(rows for rows, _ in self._sweeps).most_common(1)
        return SampleTime(seconds, rows, statistics.median(took for shared, took in self._sweeps if shared == rows))
