"""What this process runs inside of: a container, Windows's Linux, a virtual machine."""

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
    """Limits that are not the machine's own.

    Attributes:
        wsl: 1 or 2 inside Windows's Linux, which has half of the machine's RAM unless told otherwise; else None.
        hypervisor: whether the processor says that it is a virtual one; None if that cannot be seen.
        memory_limit_bytes, cpu_quota: of the control groups; None if they limit nothing.
    """

    wsl: int | None
    hypervisor: bool | None
    memory_limit_bytes: int | None
    cpu_quota: float | None


def surroundings(release: Path = _WSL_RELEASE, described: Path = Path("/proc/cpuinfo")) -> Surroundings:
    """Where this process runs."""
    kernel = (text_of(release) or "").lower()
    wsl = None if "microsoft" not in kernel else 2 if "wsl2" in kernel or "standard" in kernel else 1
    flags = text_of(described)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    hypervisor = None if flags is None or not is_x86 else " hypervisor" in flags
    limit, _ = memory_limits()
    return Surroundings(wsl, hypervisor, limit, cpu_quota())


def pinned_limit(ram_bytes: int, where: Surroundings) -> int | None:
    """Bytes that may be pinned at most as far as is known without trying; None where nothing but RAM limits it.

    Windows's drivers, and so WSL's, pin about half of the RAM that they see.
    """
    return ram_bytes // 2 if sys.platform == "win32" or where.wsl else None
