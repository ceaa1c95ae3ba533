"""The environment of this process: a container, WSL, a virtual machine, a display.

In a Linux container `psutil` reports the whole machine, and allocating that gets us killed: the limits of the control
groups count.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.hardware.system_files import text_of

_ROOT = Path("/sys/fs/cgroup")


def memory_limits(root: Path = _ROOT, in_use: int = 0) -> tuple[int | None, int | None]:
    """(bytes that this process's control groups allow, bytes still available); None if unlimited.

    Args:
        in_use: bytes of cached files that are not to be reclaimed.
    """
    limits: list[tuple[int, int]] = []
    for folder in _own_groups(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= 2**60:  # version 1 writes "unlimited" as a number near 2^63
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Cached file pages count as used but are reclaimed on demand.
        reclaimable = _statistic(folder / "memory.stat", ("inactive_file", "total_inactive_file"))
        limits.append((limit, max(0, limit - used + min(used, max(0, reclaimable - in_use)))))
    if not limits:
        return None, None
    return min(limit for limit, _ in limits), min(free for _, free in limits)


class _FilesInUse:
    """Bytes of mapped files that this process computes with."""

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        with self._changed:
            self.nbytes += nbytes


_IN_USE = _FilesInUse()


def count_as_used(nbytes: int) -> None:
    """Counts so many more bytes of mapped files as used; negative if they no longer are.

    For the system, pages of files are available, as it may drop them; but then this process would wait for the disk.
    """
    _IN_USE.add(nbytes)


def mapped_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of files that this and other programs have mapped and in RAM; 0 where the system does not tell.

    Memory that programs share is mapped, too, but never counts as available: all of it is left out.
    """
    found = dict(re.findall(r"^(Mapped|Shmem): +(\d+) kB", text_of(meminfo) or "", re.MULTILINE))
    return max(0, int(found.get("Mapped", 0)) - int(found.get("Shmem", 0))) * 1024


_ORDINARILY_MAPPED = 2**30
"""Bytes of programs and their libraries; more than that are models, ours in another process or other programs'."""


def available_ram() -> int:
    """Bytes of RAM available now, within the machine and its control groups."""
    in_use = _IN_USE.nbytes
    mapped = max(in_use, mapped_bytes() - _ORDINARILY_MAPPED)
    free = max(0, int(psutil.virtual_memory().available) - mapped)
    _, left = memory_limits(in_use=in_use)
    return free if left is None else min(free, left)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time, in CPUs, that this process's control groups allow; None if unlimited."""
    quotas = []
    for folder in _own_groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas) if quotas else None


def _own_groups(root: Path, controller: str) -> list[Path]:
    """Folders of our control group and its ancestors, in the v2 tree or in the v1 tree of `controller`."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tree = root / controller if controllers else root
        path = tree / group.strip("/")
        folders += [path, *(parent for parent in path.parents if parent.is_relative_to(tree))]
    # Inside a container this may be the host's path, of which only the root is visible.
    return [folder for folder in dict.fromkeys([*folders, root, root / controller]) if folder.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name in names and value.isdecimal():
            return int(value)
    return 0


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


DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
"""On Linux one of these is set if there is an X server, a Wayland compositor or another Qt platform."""


def has_display() -> bool:
    """Whether there is a display: on Linux, if one of `DISPLAY_VARIABLES` is set; elsewhere always."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in DISPLAY_VARIABLES)
