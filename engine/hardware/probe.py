"""This machine's hardware, detected without torch, from the operating system and the drivers.

Unreadable values are `None`; nothing here raises for a missing sensor.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import psutil

from engine.common.paths import models_dir
from engine.hardware.cpu import CpuInfo, cpu_info
from engine.hardware.disk import DiskInfo, disk_info, free_disk_bytes
from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.gpus import graphics_cards
from engine.hardware.surroundings import Surroundings, cpu_quota, memory_limits, pinned_limit, surroundings

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
