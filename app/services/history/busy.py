"""How long a lane was busy, per bucket; spans arrive in batches and may overlap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from app.services.history.buckets import BucketSeries, spread

_TAIL_NS = 2_000_000_000
"""Spans that arrive later than this may be counted twice where they overlap others of their lane."""

Moments = NDArray[np.int64]


class BusyTime:
    """Nanoseconds per bucket in which at least one of a lane's spans ran."""

    def __init__(self) -> None:
        self.series = BucketSeries()
        self._starts: Moments = np.empty(0, np.int64)
        self._ends: Moments = np.empty(0, np.int64)

    def add(self, starts: Moments, ends: Moments) -> None:
        """Add spans, in any order."""
        if not len(starts):
            return
        # Only spans that reach into the new ones can overlap them.
        first = int(np.searchsorted(self._ends, starts.min(), side="right"))
        old = self._starts[first:], self._ends[first:]
        new = union(np.concatenate((old[0], starts)), np.concatenate((old[1], ends)))
        begin, busy = spread(*new, (new[1] - new[0]).astype(np.float64))
        if len(old[0]):
            old_begin, old_busy = spread(*old, (old[1] - old[0]).astype(np.float64))
            busy[old_begin - begin : old_begin - begin + len(old_busy)] -= old_busy
        self.series.add(begin, busy)
        starts = np.concatenate((self._starts[:first], new[0]))
        ends = np.concatenate((self._ends[:first], new[1]))
        recent = int(np.searchsorted(ends, ends[-1] - _TAIL_NS))
        self._starts, self._ends = starts[recent:], ends[recent:]


def union(starts: Moments, ends: Moments) -> tuple[Moments, Moments]:
    """Disjoint intervals, in order, that cover the same time as these."""
    order = np.argsort(starts, kind="stable")
    starts, furthest = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > furthest[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(starts) - 1]))
    return starts[first], furthest[last]
