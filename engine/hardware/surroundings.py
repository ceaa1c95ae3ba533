"""The environment of this process: a container, WSL, a virtual machine."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.hardware.cgroup import cpu_quota, memory_limits
from engine.hardware.system_files import text_of

_WSL_RELEASE = Path("/proc/sys/kernel/osrelease")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Limits imposed by the environment.

    Attributes:
        wsl: 1 or 2 inside WSL, which by default has half of the machine's RAM; otherwise None.
        hypervisor: whether the CPU reports a hypervisor; None if unknown.
        memory_limit_bytes, cpu_quota: of the control groups; None if unlimited.
    """

    wsl: int | None
    hypervisor: bool | None
    memory_limit_bytes: int | None
    cpu_quota: float | None


def surroundings(release: Path = _WSL_RELEASE, described: Path = Path("/proc/cpuinfo")) -> Surroundings:
    """The environment of this process."""
    kernel = (text_of(release) or "").lower()
    wsl = None if "microsoft" not in kernel else 2 if "wsl2" in kernel or "standard" in kernel else 1
    flags = text_of(described)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    hypervisor = None if flags is None or not is_x86 else " hypervisor" in flags
    limit, _ = memory_limits()
    return Surroundings(wsl, hypervisor, limit, cpu_quota())


def pinned_limit(ram_bytes: int, where: Surroundings) -> int | None:
    """The known limit of pinned memory in bytes; None if only RAM limits it.

    Windows drivers, also under WSL, pin at most about half of the RAM.
    """
    return ram_bytes // 2 if sys.platform == "win32" or where.wsl else None
