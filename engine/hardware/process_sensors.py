"""Resources of our own processes: CPU time, memory, page faults."""

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
