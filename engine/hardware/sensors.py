"""Current activity of the machine, from drivers and the operating system.  No torch; nothing here raises.

These are driver samples, unlike the payload bytes that the engine counts itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.hardware.disk import SYS, block_device
from engine.hardware.gpu_sensors import GpuSample, GpuSensors
from engine.hardware.nvml import own_processes
from engine.hardware.surroundings import memory_limits
from engine.hardware.system_files import number_of, text_of

_PROC = Path("/proc")
_MINOR, _MAJOR = 9, 11
"""Fields of `/proc/PID/stat`, counted from 0 (proc(5))."""


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """Counts since the processes started; unknown values are None.

    Attributes:
        cpu_s: CPU seconds.
        rss_bytes: resident memory; shared pages count for each process.
        minor_faults: page faults served without the disk; major_faults: with the disk.
    """

    cpu_s: float
    rss_bytes: int
    minor_faults: int | None
    major_faults: int | None


def counts_by_process(
    pids: Callable[[], Iterable[int]] = own_processes, proc: Path = _PROC
) -> dict[tuple[int, float], ProcessCounts]:
    """Counts by process id and start time, as ids are reused."""
    found = {}
    for pid in pids():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info()
                began = process.create_time()
        except psutil.Error:
            continue
        minor, major = _faults(proc / str(pid) / "stat")
        if minor is None:
            minor = getattr(memory, "num_page_faults", None)  # Windows does not separate the two kinds
        found[pid, began] = ProcessCounts(times.user + times.system, memory.rss, minor, major)
    return found


def _faults(path: Path) -> tuple[int | None, int | None]:
    # The name, in parentheses, may itself contain spaces and parentheses.
    fields = (text_of(path) or "").rpartition(")")[2].split()
    try:
        return int(fields[_MINOR - 2]), int(fields[_MAJOR - 2])
    except (IndexError, ValueError):
        return None, None


__all__ = ["DeviceSensors", "GpuSample", "SensorSample"]

_SECTOR = 512
"""Unit of `/sys/block/*/stat` in bytes, whatever the disk's sector size."""


@dataclass(frozen=True, slots=True)
class SensorSample:
    """One sample; rates are averages since the previous sample, and None in the first one.

    Attributes:
        at_s: on `time.perf_counter`'s clock, like the engine's spans.
        gpus: the cards.
        cpu_by_core: busy fraction of each logical CPU, 0 to 1.
        cpu_ours: CPU time of our processes, in CPUs.
        cpu_clock_hz: mean over the cores.
        cpu_power_w: of all CPU packages, if their counters are readable.
        cpu_temperature_c: the hottest sensor.
        ram_used, ram_total: bytes, of the container if there is one.  ram_ours: of our processes.
        minor_faults, major_faults: of our processes, per second; major ones wait for the disk.
        disk_read, disk_write: bytes per second of the folder's disk, by all programs.
        disk_busy: busy fraction of the disk, 0 to 1.
    """

    at_s: float
    gpus: tuple[GpuSample, ...] = ()
    cpu_by_core: tuple[float, ...] | None = None
    cpu_ours: float | None = None
    cpu_clock_hz: float | None = None
    cpu_power_w: float | None = None
    cpu_temperature_c: float | None = None
    ram_used: int | None = None
    ram_total: int | None = None
    ram_ours: int | None = None
    minor_faults: float | None = None
    major_faults: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_busy: float | None = None


class DeviceSensors:
    """Takes samples, each in milliseconds, or about 50 ms with an NVIDIA card: never call it on a GUI thread.

    Args:
        folder: on the disk of interest, such as an expert bank's; None for no disk.
        pids: our processes.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        pids: Callable[[], Iterable[int]] = own_processes,
        gpus: GpuSensors | None = None,
        sys_root: Path = SYS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pids = pids
        self._gpus = gpus or GpuSensors(pids=pids)
        self._sys = sys_root
        self._clock = clock
        self._disk = _disk_of(folder, sys_root)
        self._before: _Counts | None = None

    def sample(self) -> SensorSample:
        """Takes a sample."""
        now = self._counts()
        before, self._before = self._before, now
        memory = psutil.virtual_memory()
        limit, left = memory_limits()
        total = memory.total if limit is None else min(limit, memory.total)
        free = memory.available if left is None else min(left, memory.available)
        rates = _Rates(before, now)
        return SensorSample(
            at_s=now.at_s,
            gpus=self._gpus.sample(),
            cpu_by_core=rates.by_core(),
            cpu_ours=rates.of_processes("cpu_s"),
            cpu_clock_hz=_cpu_clock_hz(),
            cpu_power_w=rates.power_w(),
            cpu_temperature_c=_cpu_temperature_c(),
            ram_used=max(0, total - free),
            ram_total=total,
            ram_ours=sum(each.rss_bytes for each in now.processes.values()),
            minor_faults=rates.of_processes("minor_faults"),
            major_faults=rates.of_processes("major_faults"),
            disk_read=rates.of_disk(0),
            disk_write=rates.of_disk(1),
            disk_busy=rates.of_disk(2),
        )

    def close(self) -> None:
        """Releases the drivers."""
        self._gpus.close()

    def _counts(self) -> _Counts:
        return _Counts(
            at_s=self._clock(),
            cpu=tuple((sum(core) - core.idle - getattr(core, "iowait", 0.0), sum(core)) for core in _cpu_times()),
            processes=counts_by_process(self._pids),
            energy_uj=_energy(self._sys),
            disk=None if self._disk is None else _disk_counts(self._disk),
        )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Monotonic counters at one moment; `energy_uj`: per package, with the value at which it wraps around."""

    at_s: float
    cpu: tuple[tuple[float, float], ...]
    processes: dict[tuple[int, float], ProcessCounts]
    energy_uj: dict[str, tuple[int, int]]
    disk: tuple[float, float, float] | None


class _Rates:
    def __init__(self, before: _Counts | None, now: _Counts) -> None:
        self._before, self._now = before, now
        self._span_s = now.at_s - before.at_s if before else 0.0

    def by_core(self) -> tuple[float, ...] | None:
        before = self._before
        if before is None or len(before.cpu) != len(self._now.cpu):
            return None
        pairs = zip(before.cpu, self._now.cpu, strict=True)
        spans = [(busy - busy_before, total - total_before) for (busy_before, total_before), (busy, total) in pairs]
        if not all(total > 0 for _, total in spans):
            return None
        return tuple(min(1.0, max(0.0, busy / total)) for busy, total in spans)

    def of_processes(self, name: str) -> float | None:
        """Rate over the current processes; a process first seen now counts from its start."""
        if self._before is None or self._span_s <= 0:
            return None
        total = 0.0
        for key, counts in self._now.processes.items():
            earlier = self._before.processes.get(key)
            value = getattr(counts, name)
            if value is None:
                return None
            if earlier is not None:
                total += max(0.0, value - (getattr(earlier, name) or 0))
        return total / self._span_s

    def power_w(self) -> float | None:
        before, now = (self._before.energy_uj if self._before else {}), self._now.energy_uj
        if not now or before.keys() != now.keys() or self._span_s <= 0:
            return None
        used = sum((value - before[name][0]) % (most + 1) for name, (value, most) in now.items())
        return used / 1e6 / self._span_s

    def of_disk(self, index: int) -> float | None:
        before = self._before.disk if self._before else None
        if before is None or self._now.disk is None or self._span_s <= 0:
            return None
        rate = max(0.0, self._now.disk[index] - before[index]) / self._span_s
        return min(1.0, rate) if index == 2 else rate


def _cpu_times() -> list[Any]:
    try:
        return list(psutil.cpu_times(percpu=True))
    except OSError:
        return []


def _disk_of(folder: Path | None, sys_root: Path) -> Path | None:
    if folder is None:
        return None
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        return block_device(existing, sys_root)
    except (OSError, StopIteration):
        return None


def _disk_counts(device: Path) -> tuple[float, float, float] | None:
    """(bytes read, bytes written, seconds busy) since the system started."""
    fields = (text_of(device / "stat") or "").split()
    try:
        return float(fields[2]) * _SECTOR, float(fields[6]) * _SECTOR, float(fields[9]) / 1e3
    except (IndexError, ValueError):
        return None


def _energy(sys_root: Path) -> dict[str, tuple[int, int]]:
    """Microjoules of each CPU package (RAPL), and its counter's range; on many systems only root may read it."""
    found = {}
    for package in sorted((sys_root / "class" / "powercap").glob("intel-rapl:[0-9]*")):
        if package.name.count(":") > 1 or not (text_of(package / "name") or "").startswith("package"):
            continue
        value, most = number_of(package / "energy_uj"), number_of(package / "max_energy_range_uj")
        if value is None or most is None:
            return {}
        found[package.name] = (value, most)
    return found


def _cpu_clock_hz() -> float | None:
    try:
        clock = psutil.cpu_freq()
    except (OSError, AttributeError, NotImplementedError):
        return None
    return clock.current * 1e6 if clock is not None and clock.current else None


def _cpu_temperature_c() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)
    try:
        sensors = read() if read is not None else {}
    except (OSError, ValueError):
        return None
    names = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
    for name in names:
        if found := [float(each.current) for each in sensors.get(name, ())]:
            return max(found)
    return None
