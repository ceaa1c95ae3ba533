"""Sensor samples over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from app.services.history.buckets import Floats
from engine.common.lanes import SENSOR_LANES
from engine.hardware.sensors import SensorSample

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
    """Samples in the order of time; one older than the last is ignored."""

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
        """Times and values of all samples."""
        first = self._count - len(self)
        column = self._values[first : self._count, GAUGES.index(gauge)]
        return self._at[first : self._count], column.astype(np.float64)

    def copy(self) -> GaugeHistory:
        """A copy that no longer changes with this one."""
        other = GaugeHistory(self._capacity)
        other._at, other._values, other._count = self._at.copy(), self._values.copy(), self._count
        other._told = self._told.copy()
        return other
