"""How much of the processor other programs take, over any stretch of time.  No torch; nothing here raises."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from engine.hardware.nvml import own_processes

BUSY = 0.15
"""Share of the processor that other programs may take before a timing says more about them than about us."""

Share = Callable[[], float]
"""What other programs have taken of the processor since it was made, 0 to 1."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Seconds since the system started: of all CPUs that we may use, of those what was busy, and what was ours."""

    total_s: float
    busy_s: float
    ours_s: float


class OtherPrograms:
    """Measures their share: all that is busy, less what our own processes take.

    What a hypervisor gives to other machines counts as theirs: it is not there for us either.

    Args:
        pids: the processes that are ours.
        cpu_times: of each logical CPU, as `psutil.cpu_times(percpu=True)` tells them.
        process_s: seconds of processor time that a process has had; None if it has gone.
        usable: numbers of the CPUs that we may use; None for all.
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
        """Begins a stretch; what is returned tells of it up to the moment at which it is called."""
        before = self._counts()

        def share() -> float:
            now = self._counts()
            if before is None or now is None or now.total_s <= before.total_s:
                return 0.0
            others_s = (now.busy_s - before.busy_s) - max(0.0, now.ours_s - before.ours_s)
            return min(1.0, max(0.0, others_s / (now.total_s - before.total_s)))

        return share

    def _counts(self) -> _Counts | None:
        try:
            cpus = self._cpu_times()
        except (OSError, psutil.Error):
            return None
        wanted = self._usable()
        allowed = None if wanted is None else set(wanted)
        mine = [cpu for place, cpu in enumerate(cpus) if allowed is None or place in allowed] or cpus
        # A guest's time is part of its user's.
        totals = [sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0) for cpu in mine]
        idle = [cpu.idle + getattr(cpu, "iowait", 0.0) for cpu in mine]
        ours = [taken for pid in self._pids() if (taken := self._process_s(pid)) is not None]
        return _Counts(sum(totals), sum(totals) - sum(idle), sum(ours))


def is_busy(share: float) -> bool:
    """Whether a timing that was taken meanwhile is not to be trusted."""
    return share >= BUSY


def _ours() -> frozenset[int]:
    """This process, what it has started, and who has started it: a window that draws what we do, or a shell."""
    return own_processes() | {os.getppid()}


def _process_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)


def _usable() -> Iterable[int] | None:
    told = getattr(os, "sched_getaffinity", None)
    try:
        return None if told is None else set(told(0))
    except OSError:
        return None
