"""Machine profiles shipped with the program: JSON in `resources/machines`."""

from __future__ import annotations

from pathlib import Path

from engine.common.paths import resources_dir
from engine.common.profile_file import GIGA, ProfileFile, find_profile
from engine.hardware.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile, PowerProfile


def machines_dir() -> Path:
    """Complete machines to plan for, with CPU, RAM, disk and card. `resources/hardware` beside it has the cards that a
    device can emulate, with only their memory and link."""
    return resources_dir() / "machines"


def machine_names(folder: Path | None = None) -> list[str]:
    """Names of all machines, sorted."""
    return sorted(path.stem for path in (folder or machines_dir()).glob("*.json"))


def read_machine(name: str, folder: Path | None = None) -> HardwareProfile:
    """The machine of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    path = find_profile(name, folder or machines_dir(), machine_names(folder), "machine")
    file = ProfileFile(path)
    gpu = file.part("gpu", optional=True)
    link, cpu = file.part("link"), file.part("cpu")
    power = file.part("power", optional=True)
    return HardwareProfile(
        name=path.stem,
        description=file.text("description"),
        source=file.text("source"),
        gpu=None
        if gpu is None
        else GpuProfile(
            name=gpu.text("name"),
            memory_bytes=gpu.whole("memory_bytes", 2**28, 2**42),
            flops=gpu.number("tflops", 0.01, 1e5) * 1e12,
            bytes_per_s=gpu.number("gbps", 1, 1e5) * GIGA,
            count=gpu.whole("count", 1, 64),
        ),
        link=LinkProfile(
            h2d=link.number("h2d_gbps", 0.001, 2000) * GIGA,
            d2h=link.number("d2h_gbps", 0.001, 2000) * GIGA,
            h2d_pageable=link.number("h2d_pageable_gbps", 0.001, 2000) * GIGA,
            latency_s=link.number("latency_us", 0, 1e5) * 1e-6,
        ),
        cpu=CpuProfile(
            name=cpu.text("name"),
            cores=cpu.whole("cores", 1, 4096),
            flops=cpu.number("tflops", 0.001, 1e4) * 1e12,
            ram_bytes_per_s=cpu.number("ram_gbps", 0.1, 1e4) * GIGA,
            ram_bytes=cpu.whole("ram_bytes", 2**28, 2**46),
            weights_bytes_per_s=cpu.by_threads("weights_gbps_by_threads"),
        ),
        disk_bytes_per_s=file.number("disk_gbps", 0.001, 1000) * GIGA,
        power=None
        if power is None
        else PowerProfile(
            power.number("cpu_base_w", 0, 1e4), power.number("cpu_per_core_w", 0, 1e3), power.number("gpu_w", 0, 1e4)
        ),
    )
