"""This machine's hardware, detected without torch, from the operating system and the drivers.

Unreadable values are `None`; nothing here raises for a missing sensor.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from engine.common.paths import models_dir
from engine.hardware.cpu import CpuInfo, cpu_info
from engine.hardware.disk import DiskInfo, disk_info, free_disk_bytes
from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.gpus import graphics_cards
from engine.hardware.nvml import own_processes
from engine.hardware.surroundings import Surroundings, cpu_quota, memory_limits, pinned_limit, surroundings

BUSY = 0.15
"""CPU share of other programs above which a timing is unreliable."""

_MOMENT_S = 0.15
"""Systems count processor time in hundredths of a second."""

Share = Callable[[], float]
"""Returns the CPU share of other programs since it was created, 0 to 1."""


@dataclass(frozen=True, slots=True)
class _CpuSeconds:
    """CPU seconds since boot, over the CPUs that we may use: in total, busy, and ours."""

    total_s: float
    busy_s: float
    ours_s: float


class OtherPrograms:
    """Measures their share: all busy time minus our own processes'.

    Time that a hypervisor steals counts as theirs: it is not available to us either.

    Args:
        pids: our processes.
        cpu_times: of each logical CPU, as from `psutil.cpu_times(percpu=True)`.
        process_s: CPU seconds of a process; None if it has ended.
        usable: ids of the CPUs that we may use; None for all.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]] = lambda: _ours(),
        *,
        cpu_times: Callable[[], list[Any]] = lambda: list(psutil.cpu_times(percpu=True)),
        process_s: Callable[[int], float | None] = lambda pid: _process_s(pid),
        usable: Callable[[], Iterable[int] | None] = lambda: _usable(),
    ) -> None:
        self._pids, self._cpu_times, self._process_s, self._usable = pids, cpu_times, process_s, usable

    def watch(self) -> Share:
        """Starts an interval; calling the result gives the share up to that moment."""
        before = self._counts()

        def share() -> float:
            now = self._counts()
            if before is None or now is None or now.total_s <= before.total_s:
                return 0.0
            others_s = (now.busy_s - before.busy_s) - max(0.0, now.ours_s - before.ours_s)
            return min(1.0, max(0.0, others_s / (now.total_s - before.total_s)))

        return share

    def _counts(self) -> _CpuSeconds | None:
        try:
            cpus = self._cpu_times()
        except (OSError, psutil.Error):
            return None
        wanted = self._usable()
        allowed = None if wanted is None else set(wanted)
        mine = [cpu for place, cpu in enumerate(cpus) if allowed is None or place in allowed] or cpus
        # Guest time is included in user time.
        totals = [sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0) for cpu in mine]
        idle = [cpu.idle + getattr(cpu, "iowait", 0.0) for cpu in mine]
        ours = [taken for pid in self._pids() if (taken := self._process_s(pid)) is not None]
        return _CpuSeconds(sum(totals), sum(totals) - sum(idle), sum(ours))


def busy_now() -> float:
    """The share of other programs at this moment, in tenths: what they do from second to second changes by more."""
    taken = OtherPrograms().watch()
    time.sleep(_MOMENT_S)
    return round(taken(), 1)


class BusyLately:
    """Whether other programs have kept the machine busy of late; looks again after `every_s`, else says the same."""

    def __init__(
        self, others: OtherPrograms, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._others, self._every_s, self._clock = others, every_s, clock
        self._share: Share | None = None
        self._looked_s, self._is_busy = -every_s, False

    def __call__(self) -> bool:
        now_s = self._clock()
        if now_s - self._looked_s >= self._every_s:
            if self._share is not None:
                self._is_busy = is_busy(self._share())
            self._share, self._looked_s = self._others.watch(), now_s
        return self._is_busy


def is_busy(share: float) -> bool:
    """Whether timings taken meanwhile are unreliable."""
    return share >= BUSY


def _ours() -> frozenset[int]:
    """This process, its descendants and its ancestors, such as the window or a shell."""
    return own_processes() | {os.getppid()}


def _process_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)


def _usable() -> Iterable[int] | None:
    affinity = getattr(os, "sched_getaffinity", None)
    try:
        return None if affinity is None else set(affinity(0))
    except OSError:
        return None


__all__ = ["GpuInfo", "Probe", "Vendor", "free_disk_bytes", "probe", "usable_cpus"]


@dataclass(frozen=True, slots=True)
class Probe:
    """The machine as this process may use it.

    Attributes:
        usable_cpus: logical CPUs that affinity and the container's quota leave us.
        instructions: vector instruction sets that the CPU advertises (`/proc/cpuinfo` names).
        ram_bytes, ram_available_bytes: the container's limit if there is one, otherwise the machine's.
        gpu_note: why no graphics card is listed, or why NVIDIA's are missing.
        models_disk_free_bytes: free space on the models' disk.
        processor: details of the CPU.
        models_disk: the models' disk; None if it does not respond.
        where: limits imposed by a container or virtual machine; None if unknown.
        pinned_limit_bytes: known limit of pinned memory; None if only RAM limits it.
    """

    os: str
    architecture: str
    cpu: str | None
    physical_cores: int | None
    logical_cores: int | None
    usable_cpus: int
    instructions: tuple[str, ...]
    ram_bytes: int
    ram_available_bytes: int
    gpus: tuple[GpuInfo, ...]
    gpu_note: str
    models_disk_free_bytes: int | None
    processor: CpuInfo | None = None
    models_disk: DiskInfo | None = None
    where: Surroundings | None = None
    pinned_limit_bytes: int | None = None

    @property
    def lacks_avx2(self) -> bool:
        """Whether the processor is known to be too old for the fast kernels: it runs portable ones."""
        is_x86 = self.architecture.lower() in ("x86_64", "amd64")
        return is_x86 and bool(self.instructions) and "avx2" not in self.instructions

    @property
    def compute_gpu(self) -> GpuInfo | None:
        """The card to run models on: the first discrete one."""
        return next((gpu for gpu in self.gpus if not gpu.is_integrated), None)

    @property
    def compute_gpus(self) -> tuple[GpuInfo, ...]:
        """All cards that a model runs on unless one is asked for: discrete ones of the first one's vendor."""
        first = self.compute_gpu
        if first is None or not first.total_bytes:
            return ()
        others = (gpu for gpu in self.gpus if not gpu.is_integrated and gpu.vendor is first.vendor and gpu.total_bytes)
        return tuple(others)

    @property
    def card_device(self) -> str:
        """What the engine calls `compute_gpu`; empty without one."""
        gpu = self.compute_gpu
        if gpu is None:
            return ""
        return "xpu:0" if gpu.vendor is Vendor.INTEL else "cuda:0"

    @property
    def vram_in_use(self) -> int:
        """Bytes of `compute_gpus` in use, as far as their drivers tell."""
        told = ((gpu.total_bytes, gpu.free_bytes) for gpu in self.compute_gpus)
        return sum(max(0, (total or 0) - free) for total, free in told if free is not None)

    @property
    def ram_in_use(self) -> int:
        """Bytes of RAM in use."""
        return max(0, self.ram_bytes - self.ram_available_bytes)


def probe() -> Probe:
    """Detects the hardware.  Takes milliseconds, or some seconds if a driver or disk does not respond."""
    processor = cpu_info()
    gpus, gpu_note = graphics_cards()
    memory = psutil.virtual_memory()
    limit, limited_free = memory_limits()
    ram_bytes = memory.total if limit is None else min(limit, memory.total)
    where = surroundings()
    disk = disk_info(models_dir())
    return Probe(
        os=_os_name(),
        architecture=platform.machine(),
        cpu=processor.name,
        physical_cores=processor.physical_cores,
        logical_cores=processor.logical_cores,
        usable_cpus=usable_cpus(),
        instructions=processor.instructions,
        ram_bytes=ram_bytes,
        ram_available_bytes=memory.available if limited_free is None else min(limited_free, memory.available),
        gpus=gpus,
        gpu_note=gpu_note,
        models_disk_free_bytes=None if disk is None else disk.free_bytes,
        processor=processor,
        models_disk=disk,
        where=where,
        pinned_limit_bytes=pinned_limit(ram_bytes, where),
    )


def usable_cpus() -> int:
    """Number of logical CPUs that this process may use: its affinity, limited by the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def _os_name() -> str:
    system = platform.system()
    if system == "Linux":
        try:
            return platform.freedesktop_os_release()["PRETTY_NAME"]
        except (OSError, KeyError):
            return f"Linux {platform.release()}"
    if system == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{system} {platform.release()}"
