"""What our own processes take: processor time, memory, page faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.hardware.nvml import own_processes
from engine.hardware.system_files import text_of

_PROC = Path("/proc")
_MINOR, _MAJOR = 9, 11
"""Fields of `/proc/PID/stat`, counted from 0 (proc(5))."""


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """Since the processes began; what the system does not tell is None.

    Attributes:
        cpu_s: seconds of processor time.
        rss_bytes: RAM that they hold; what they share counts for each.
        minor_faults: page faults that needed no disk; major_faults: that did.
    """

    cpu_s: float
    rss_bytes: int
    minor_faults: int | None
    major_faults: int | None


def counts_by_process(
    pids: Callable[[], Iterable[int]] = own_processes, proc: Path = _PROC
) -> dict[tuple[int, float], ProcessCounts]:
    """Counts of each process, by its number and when it began: numbers are used again."""
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
            minor = getattr(memory, "num_page_faults", None)  # Windows counts both kinds together
        found[pid, began] = ProcessCounts(times.user + times.system, memory.rss, minor, major)
    return found


def _faults(path: Path) -> tuple[int | None, int | None]:
    # The name, in brackets, may have spaces and brackets of its own.
    fields = (text_of(path) or "").rpartition(")")[2].split()
    try:
        return int(fields[_MINOR - 2]), int(fields[_MAJOR - 2])
    except (IndexError, ValueError):
        return None, None
