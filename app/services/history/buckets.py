"""Sums per time bucket at five resolutions, each in a ring buffer."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

BUCKET_NS = 1_000_000
"""The finest bucket; each level's are ten times as wide as those of the level before."""
_FACTOR = 10
_SIZES = (2**15, 2**14, 2**14, 2**14, 2**14)
"""Ring size: 30 s at 1 ms, almost 5 min at 10 ms, and so on to days at 10 s."""

Floats = NDArray[np.float64]


class BucketSeries:
    """One quantity over time.  Any range can be read at any resolution, from the finest level that covers it."""

    def __init__(self) -> None:
        self._rings = [np.zeros(size, np.float32) for size in _SIZES]
        self._newest: list[int] = [-1] * len(_SIZES)
        self._oldest: list[int] = [-1] * len(_SIZES)

    def add(self, first: int, values: Floats) -> None:
        """Adds `values` to the buckets `first`, `first + 1`, ... of the finest level."""
        if not len(values):
            return
        for level in range(len(_SIZES)):
            self._add_at(level, first, values)
            coarse = (first + np.arange(len(values))) // _FACTOR
            first = int(coarse[0])
            values = np.asarray(np.bincount(coarse - first, weights=values), np.float64)

    def read(self, edges_ns: Floats) -> Floats:
        """Sums between neighbouring edges, [n] for [n + 1] rising, evenly spaced edges.

        Within a bucket the quantity is taken to be spread evenly, so that the sums of a range do not depend on where
        its edges are.
        """
        level = self._level(float(edges_ns[0]), float(edges_ns[1] - edges_ns[0]))
        width = BUCKET_NS * _FACTOR**level
        size, newest = _SIZES[level], self._newest[level]
        first = max(int(edges_ns[0] // width), newest - size + 1, self._oldest[level])
        last = min(int(edges_ns[-1] // width), newest)
        if newest < 0 or last < first:
            return np.zeros(len(edges_ns) - 1)
        values = self._rings[level][np.arange(first, last + 1) % size]
        until = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
        return np.diff(np.interp(edges_ns / width - first, np.arange(len(until), dtype=np.float64), until))

    def copy(self) -> BucketSeries:
        """A copy that no longer changes with this one."""
        return copy.deepcopy(self)

    def _level(self, start_ns: float, pixel_ns: float) -> int:
        level = 0
        while level + 1 < len(_SIZES) and BUCKET_NS * _FACTOR ** (level + 1) <= pixel_ns:
            level += 1
        while level + 1 < len(_SIZES):
            wanted = max(int(start_ns // (BUCKET_NS * _FACTOR**level)), self._oldest[level])
            if wanted > self._newest[level] - _SIZES[level]:
                break
            level += 1
        return level

    def _add_at(self, level: int, first: int, values: Floats) -> None:
        ring, size, newest = self._rings[level], _SIZES[level], self._newest[level]
        last = first + len(values) - 1
        if newest < 0:
            self._newest[level], self._oldest[level] = last, first
        elif last > newest:
            if last - newest >= size:
                ring[:] = 0
            else:
                ring[np.arange(newest + 1, last + 1) % size] = 0
            self._newest[level] = last
        self._oldest[level] = min(self._oldest[level], first)
        kept = max(0, self._newest[level] - size + 1 - first)  # older buckets have left the ring
        if kept < len(values):
            ring[np.arange(first + kept, last + 1) % size] += values[kept:].astype(np.float32)


def spread(starts: NDArray[np.int64], ends: NDArray[np.int64], amounts: Floats) -> tuple[int, Floats]:
    """Amounts, each spread evenly over its own [start, end), summed per bucket of the finest level.

    Returns:
        Number of the first bucket, and the sums from there on.
    """
    if not len(starts):
        return 0, np.zeros(0)
    ends = np.maximum(ends, starts + 1)
    first = int(starts.min() // BUCKET_NS)
    count = int((ends.max() - 1) // BUCKET_NS) - first + 1
    origin = first * BUCKET_NS
    moments = np.concatenate((starts, ends)) - origin
    slopes = amounts / (ends - starts)
    order = np.argsort(moments, kind="stable")
    moments = moments[order].astype(np.float64)
    slope = np.cumsum(np.concatenate((slopes, -slopes))[order])
    until = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(moments))))
    edges = np.arange(count + 1, dtype=np.float64) * BUCKET_NS
    return first, np.maximum(np.diff(np.interp(edges, moments, until)), 0.0)
