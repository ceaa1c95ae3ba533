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
import pynvml

from engine.hardware.disk import SYS, block_device
from engine.hardware.gpu_info import Vendor
from engine.hardware.gpus import DRM, SysfsCard, sysfs_cards
from engine.hardware.nvml import Nvml, NvmlCard, NvmlUnavailableError, memory_of, own_processes
from engine.hardware.surroundings import memory_limits, number_of, text_of

_TIMEOUT_S = 2.0
_SLOWED_BY = (
    ("HwThermalSlowdown", "heat"),
    ("SwThermalSlowdown", "heat"),
    ("SwPowerCap", "power limit"),
    ("HwPowerBrakeSlowdown", "power supply"),
    ("HwSlowdown", "hardware"),
)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One card at one moment; unknown values are None.

    Attributes:
        busy: fraction of the driver's last sampling period in which a kernel ran.
        memory_busy: the same for its memory.
        vram_total, vram_used, vram_ours, vram_others: bytes; `vram_ours` is this program's and its children's.
        clock_hz, memory_clock_hz: current.
        power_w, power_limit_w, temperature_c: current.
        pcie_rx, pcie_tx: bytes per second to and from the card, of all programs, sampled by the driver over 20 ms.
        slowed_by: why it runs below its maximum clock, such as `heat`; empty if it does not, or if unknown.
    """

    bus: str
    vendor: Vendor
    busy: float | None = None
    memory_busy: float | None = None
    vram_total: int | None = None
    vram_used: int | None = None
    vram_ours: int | None = None
    vram_others: int | None = None
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    pcie_rx: float | None = None
    pcie_tx: float | None = None
    slowed_by: tuple[str, ...] = ()


class GpuSensors:
    """Reads all cards.  Cards disappear with their driver and reappear with it."""

    def __init__(
        self, nvml: Nvml | None = None, drm: Path = DRM, pids: Callable[[], Iterable[int]] = own_processes
    ) -> None:
        self._pids = pids
        self._nvml = nvml or Nvml()
        self._drm = drm
        self._seen: tuple[GpuSample, ...] = ()

    def sample(self) -> tuple[GpuSample, ...]:
        """NVIDIA's cards in driver order, then the others.

        A card that no longer responds is still listed, with all values unknown.
        """
        ours = frozenset(self._pids())
        try:
            found = tuple(self._nvml.look(lambda card: _nvidia(card, ours), timeout_s=_TIMEOUT_S))
        except NvmlUnavailableError:
            found = ()
        found += tuple(_sysfs(card) for card in sysfs_cards(self._drm))
        here = {one.bus for one in found}
        lost = tuple(GpuSample(one.bus, one.vendor) for one in self._seen if one.bus not in here)
        self._seen = (*found, *lost)
        return self._seen

    def close(self) -> None:
        """Releases the driver's library."""
        self._nvml.close()


def _nvidia(card: NvmlCard, ours: frozenset[int]) -> GpuSample:
    total, free, mine, others = memory_of(card, ours)
    busy = card.read("nvmlDeviceGetUtilizationRates")
    place = getattr(card.read("nvmlDeviceGetPciInfo"), "busId", None)
    reasons = card.read("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # name in drivers before 2023
        reasons = card.read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuSample(
        bus=(place.decode("ascii", "replace") if isinstance(place, bytes) else str(place or card.index)).lower(),
        vendor=Vendor.NVIDIA,
        busy=None if busy is None else busy.gpu / 100,
        memory_busy=None if busy is None else busy.memory / 100,
        vram_total=total,
        vram_used=None if total is None or free is None else total - free,
        vram_ours=mine,
        vram_others=others,
        clock_hz=_scaled(card.read("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM), 1e6),
        memory_clock_hz=_scaled(card.read("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM), 1e6),
        power_w=_scaled(card.read("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit_w=_scaled(card.read("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_c=_scaled(card.read("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU), 1.0),
        pcie_rx=_scaled(card.read("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES), 1e3),
        pcie_tx=_scaled(card.read("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES), 1e3),
        slowed_by=_slowed_by(reasons or 0),
    )


def _slowed_by(reasons: int) -> tuple[str, ...]:
    found = (why for name, why in _SLOWED_BY if reasons & getattr(pynvml, f"nvmlClocksThrottleReason{name}"))
    return tuple(dict.fromkeys(found))


def _sysfs(card: SysfsCard) -> GpuSample:
    device = card.device

    def sensor(name: str, scale: float) -> float | None:
        values = (number_of(path) for path in sorted(device.glob(f"hwmon/hwmon*/{name}")))
        return _scaled(next((value for value in values if value is not None), None), scale)

    total, used = number_of(device / "mem_info_vram_total"), number_of(device / "mem_info_vram_used")
    return GpuSample(
        bus=card.bus,
        vendor=card.vendor,
        busy=_scaled(number_of(device / "gpu_busy_percent"), 0.01),
        memory_busy=_scaled(number_of(device / "mem_busy_percent"), 0.01),
        vram_total=total,
        vram_used=used,
        clock_hz=sensor("freq1_input", 1.0),
        memory_clock_hz=sensor("freq2_input", 1.0),
        power_w=sensor("power1_average", 1e-6) or sensor("power1_input", 1e-6),
        power_limit_w=sensor("power1_cap", 1e-6),
        temperature_c=sensor("temp1_input", 1e-3),
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


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
