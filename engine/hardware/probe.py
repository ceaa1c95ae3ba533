"""What this machine has, found without torch: asked of the operating system, never assumed.

What cannot be read is `None`: a missing sensor is an answer, and nothing here raises for it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.hardware.cgroup import cpu_quota, memory_limits
from engine.paths import models_dir

_NVIDIA_QUERY = ("name", "memory.total", "memory.free", "driver_version", "compute_cap", "pcie.link.gen.max")
_KNOWN_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One graphics card, as its driver describes it.

    Attributes:
        total_bytes, free_bytes: video memory; `free_bytes` already lacks what other programs hold.
        compute_capability: NVIDIA's, such as `9.0`.
        pcie_generation: of the fastest link the card and slot can make.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None
    compute_capability: str | None
    pcie_generation: int | None


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """The machine as this process may use it.

    Attributes:
        usable_cpus: logical CPUs that affinity and the container's quota leave us.
        instructions: vector instruction sets that the CPU advertises (`/proc/cpuinfo` names).
        ram_bytes, ram_available_bytes: the container's limit where there is one, else the machine's.
        gpu_note: why no graphics card is listed, if none is.
        models_disk_free_bytes: free space where models are kept.
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


def probe() -> HardwareProfile:
    """Look at the machine.  Takes milliseconds, or as long as `nvidia-smi` does (at most 10 s)."""
    cpu, flags = _cpu_name_and_flags()
    gpus, gpu_note = _nvidia_gpus()
    memory = psutil.virtual_memory()
    limit, limited_free = memory_limits()
    return HardwareProfile(
        os=_os_name(),
        architecture=platform.machine(),
        cpu=cpu,
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        usable_cpus=usable_cpus(),
        instructions=tuple(name for name in _KNOWN_INSTRUCTIONS if name in flags),
        ram_bytes=memory.total if limit is None else min(limit, memory.total),
        ram_available_bytes=memory.available if limited_free is None else min(limited_free, memory.available),
        gpus=gpus,
        gpu_note=gpu_note,
        models_disk_free_bytes=free_disk_bytes(models_dir()),
    )


def usable_cpus() -> int:
    """Logical CPUs that this process may use: its affinity, cut to the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def free_disk_bytes(folder: Path) -> int | None:
    """Free space of the disk that holds `folder`, which need not exist yet."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


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


def _cpu_name_and_flags() -> tuple[str | None, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _cpu_name_elsewhere(), frozenset()
    fields: dict[str, str] = dict(re.findall(r"^([^:\n]+?)\s*: ?(.*)$", text, re.MULTILINE))
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name") or platform.processor() or None, frozenset(flags.split())


def _cpu_name_elsewhere() -> str | None:
    if platform.system() == "Darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or None
    return platform.processor() or None


def _nvidia_gpus() -> tuple[tuple[GpuInfo, ...], str]:
    if shutil.which("nvidia-smi") is None:
        return (), "No NVIDIA driver was found (there is no nvidia-smi)."
    listing = _output_of("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_QUERY)}", "--format=csv,noheader,nounits")
    if listing is None:
        return (), "nvidia-smi is there but does not answer: the driver may need a restart or an update."
    gpus = tuple(gpu for line in listing.splitlines() if (gpu := parse_gpu_line(line)) is not None)
    return gpus, "" if gpus else "nvidia-smi lists no graphics card."


def parse_gpu_line(line: str) -> GpuInfo | None:
    """One line of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`, or None if it is none."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_NVIDIA_QUERY):
        return None
    name, total, free, driver, capability, generation = (None if "N/A" in cell or not cell else cell for cell in cells)
    if name is None:
        return None
    return GpuInfo(name, _mebibytes(total), _mebibytes(free), driver, capability, _whole(generation))


def _mebibytes(cell: str | None) -> int | None:
    number = _whole(cell)
    return None if number is None else number * 2**20


def _whole(cell: str | None) -> int | None:
    return int(cell) if cell is not None and cell.isdecimal() else None


def _output_of(*command: str, timeout_s: float = 10.0) -> str | None:
    """What a program prints, or None if it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
