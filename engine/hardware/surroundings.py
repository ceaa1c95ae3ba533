"""The environment of this process: a container, WSL, a virtual machine, a display.

In a Linux container `psutil` reports the whole machine, and allocating that gets us killed: the limits of the control
groups count.

What the operating system says: small kernel files (`/sys`, `/proc`), the output of programs, calls with a timeout.

Anything may be missing or hang: a file that cannot be read is None, a call that hangs is abandoned.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil


def text_of(path: Path) -> str | None:
    """The file's stripped text; None if it cannot be read or is empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def number_of(path: Path) -> int | None:
    """The integer in the file."""
    try:
        return int(text_of(path) or "", 0)
    except ValueError:
        return None


def cpus_of(text: str | None) -> frozenset[int]:
    """CPU ids of a list in the kernel's format: `0-3,8`."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def output_of(*command: str, timeout_s: float = 5.0) -> str | None:
    """A program's output; None if it fails, hangs or is missing."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # none flashes up beside the window
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


T = TypeVar("T")


class BoundedCalls:
    """Runs calls on its own threads, one at a time.

    A hanging call cannot be ended, only abandoned: its thread ends when the driver returns. Until then all further
    calls fail at once, so a driver that hangs for an hour blocks one thread and not thousands.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._left: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._left is not None and self._left.is_alive()

    def __call__(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises.

        Raises:
            TimeoutError: it took longer than `timeout_s`, or an earlier call still hangs.
        """
        with self._turn:
            if self.hangs:
                raise TimeoutError(f"{self._name}: an earlier call still hangs")
            outcome: Future[T] = Future()

            def run() -> None:
                try:
                    outcome.set_result(function())
                except BaseException as error:  # re-raised in the calling thread
                    outcome.set_exception(error)

            thread = threading.Thread(target=run, name=self._name, daemon=True)
            thread.start()
            thread.join(timeout_s)
            self._left = thread if thread.is_alive() else None
        if not outcome.done():
            raise TimeoutError(f"{self._name}: no answer in time")
        return outcome.result()


_ROOT = Path("/sys/fs/cgroup")


def memory_limits(root: Path = _ROOT, in_use: int = 0) -> tuple[int | None, int | None]:
    """(bytes that this process's control groups allow, bytes still available); None if unlimited.

    Args:
        in_use: bytes of cached files that are not to be reclaimed.
    """
    limits: list[tuple[int, int]] = []
    for folder in _own_groups(root, "memory"):
        limit = number_of(folder / "memory.max") or number_of(folder / "memory.limit_in_bytes")
        if limit is None or limit >= 2**60:  # version 1 writes "unlimited" as a number near 2^63
            continue
        used = number_of(folder / "memory.current") or number_of(folder / "memory.usage_in_bytes") or 0
        # Cached file pages count as used but are reclaimed on demand.
        reclaimable = _statistic(folder / "memory.stat", ("inactive_file", "total_inactive_file"))
        limits.append((limit, max(0, limit - used + min(used, max(0, reclaimable - in_use)))))
    if not limits:
        return None, None
    return min(limit for limit, _ in limits), min(free for _, free in limits)


_changed = threading.Lock()
_in_use = [0]
"""Bytes of mapped files that this process computes with."""


def count_as_used(nbytes: int) -> None:
    """Counts so many more bytes of mapped files as used; negative if they no longer are.

    For the system, pages of files are available, as it may drop them; but then this process would wait for the disk.
    """
    with _changed:
        _in_use[0] += nbytes


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
    in_use = _in_use[0]
    mapped = max(in_use, mapped_bytes() - _ORDINARILY_MAPPED)
    free = max(0, int(psutil.virtual_memory().available) - mapped)
    _, left = memory_limits(in_use=in_use)
    return free if left is None else min(free, left)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time, in CPUs, that this process's control groups allow; None if unlimited."""
    quotas = []
    for folder in _own_groups(root, "cpu"):
        words = (text_of(folder / "cpu.max") or "").split()
        if len(words) != 2:
            words = [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas) if quotas else None


def _own_groups(root: Path, controller: str) -> list[Path]:
    """Folders of our control group and its ancestors, in the v2 tree or in the v1 tree of `controller`."""
    folders = []
    for line in (text_of(Path("/proc/self/cgroup")) or "").splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tree = root / controller if controllers else root
        path = tree / group.strip("/")
        folders += [path, *(parent for parent in path.parents if parent.is_relative_to(tree))]
    # Inside a container this may be the host's path, of which only the root is visible.
    return [folder for folder in dict.fromkeys([*folders, root, root / controller]) if folder.is_dir()]


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    for line in (text_of(path) or "").splitlines():
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
