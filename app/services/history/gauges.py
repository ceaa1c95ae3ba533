"""Sensor samples over time."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.common.lanes import SENSOR_LANES
from engine.hardware.sensors import SensorSample

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


CAPACITY = 2**15
"""Two hours at 4 Hz; older samples are dropped."""
HOLD_NS = 3_000_000_000
"""A sample is valid this long if no other follows; after that the value is unknown."""

GAUGES = (*(gauge for lane in SENSOR_LANES for gauge in lane.gauges), "major_faults")
"""Shares are 0 to 1 of all cores or cards, memory in bytes, faults and bytes per second, power in watts, clocks in
hertz (of the slowest card), temperatures in degrees Celsius (of the hottest)."""


def gauges_of(sample: SensorSample) -> dict[str, float | None]:
    """A value for each gauge, None where the machine does not report it."""
    cores = sample.cpu_by_core
    gpus = sample.gpus

    def known(name: str) -> list[float]:
        return [float(value) for gpu in gpus if (value := getattr(gpu, name)) is not None]

    def total(name: str) -> float | None:
        return sum(known(name)) if known(name) else None

    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    return {
        "gpu_busy": sum(busy) / len(busy) if busy else None,
        "cpu_all": sum(cores) / len(cores) if cores else None,
        "cpu_ours": min(1.0, sample.cpu_ours / len(cores)) if cores and sample.cpu_ours is not None else None,
        "ram_used": sample.ram_used,
        "ram_ours": sample.ram_ours,
        "vram_used": total("vram_used"),
        "vram_ours": total("vram_ours"),
        "minor_faults": sample.minor_faults,
        "major_faults": sample.major_faults,
        "gpu_power": total("power_w"),
        "cpu_power": sample.cpu_power_w,
        "disk_read": sample.disk_read,
        "disk_write": sample.disk_write,
        "pcie_rx": total("pcie_rx"),
        "pcie_tx": total("pcie_tx"),
        "gpu_clock": min(known("clock_hz"), default=None),
        "cpu_clock": sample.cpu_clock_hz,
        "gpu_temperature": max(known("temperature_c"), default=None),
        "cpu_temperature": sample.cpu_temperature_c,
    }


class GaugeHistory:
    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._at = np.empty(2 * capacity, np.int64)
        self._values = np.empty((2 * capacity, len(GAUGES)), np.float32)
        self._count = 0
        self._told: set[str] = set()

    def __len__(self) -> int:
        return min(self._count, self._capacity)

    def add(self, at_ns: int, values: Mapping[str, float | None]) -> None:
        """Add a sample; gauges that are missing from it or not finite are unknown."""
        if self._count and at_ns <= self._at[self._count - 1]:
            return
        if self._count == 2 * self._capacity:
            self._at[: self._capacity] = self._at[self._capacity :]
            self._values[: self._capacity] = self._values[self._capacity :]
            self._count = self._capacity
        self._at[self._count] = at_ns
        known = [values.get(name) for name in GAUGES]
        self._values[self._count] = [np.nan if value is None else value for value in known]
        self._told.update(name for name, value in zip(GAUGES, known, strict=True) if value is not None)
        self._count += 1

    def read(self, gauge: str, edges_ns: Floats) -> Floats:
        """Means between neighbouring edges, [n]; a sample holds until the next, NaN where no sample holds."""
        at, values = self.samples(gauge)
        first, last = np.searchsorted(at, edges_ns[[0, -1]])  # and the sample before, which may still hold
        at, values = at[max(int(first) - 1, 0) : int(last) + 1], values[max(int(first) - 1, 0) : int(last) + 1]
        if not len(at):
            return np.full(len(edges_ns) - 1, np.nan)
        index = np.searchsorted(at, edges_ns, side="right")
        is_known = np.isfinite(values)
        sums = np.concatenate(([0.0], np.cumsum(np.where(is_known, values, 0.0))))
        counts = np.concatenate(([0], np.cumsum(is_known)))
        inside = counts[index[1:]] - counts[index[:-1]]
        means = (sums[index[1:]] - sums[index[:-1]]) / np.maximum(inside, 1)
        before = np.maximum(index[1:] - 1, 0)
        held = np.where((index[1:] > 0) & (edges_ns[1:] - at[before] < HOLD_NS), values[before], np.nan)
        return np.asarray(np.where(inside > 0, means, held), np.float64)

    def knows(self, gauge: str) -> bool:
        return gauge in self._told

    def samples(self, gauge: str) -> tuple[NDArray[np.int64], Floats]:
        first = self._count - len(self)
        column = self._values[first : self._count, GAUGES.index(gauge)]
        return self._at[first : self._count], column.astype(np.float64)

    def copy(self) -> GaugeHistory:
        other = GaugeHistory(self._capacity)
        other._at, other._values, other._count = self._at.copy(), self._values.copy(), self._count
        other._told = self._told.copy()
        return other
