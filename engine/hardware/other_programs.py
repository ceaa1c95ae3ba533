"""CPU share of other programs over any interval.  No torch; nothing here raises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil

from engine.hardware.nvml import own_processes

BUSY = 0.15
"""CPU share of other programs above which a timing is unreliable."""

_MOMENT_S = 0.15
"""Systems count processor time in hundredths of a second."""

Share = Callable[[], float]
"""Returns the CPU share of other programs since it was created, 0 to 1."""


@dataclass(frozen=True, slots=True)
class _CpuSeconds:
    """CPU seconds since boot, over the CPUs that we may use: in total, busy, and ours."""

    total_s: float
    busy_s: float
    ours_s: float


class OtherPrograms:
    """Measures their share: all busy time minus our own processes'.

    Time that a hypervisor steals counts as theirs: it is not available to us either.

    Args:
        pids: our processes.
        cpu_times: of each logical CPU, as from `psutil.cpu_times(percpu=True)`.
        process_s: CPU seconds of a process; None if it has ended.
        usable: ids of the CPUs that we may use; None for all.
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
        """Starts an interval; calling the result gives the share up to that moment."""
        before = self._counts()

        def share() -> float:
            now = self._counts()
            if before is None or now is None or now.total_s <= before.total_s:
                return 0.0
            others_s = (now.busy_s - before.busy_s) - max(0.0, now.ours_s - before.ours_s)
            return min(1.0, max(0.0, others_s / (now.total_s - before.total_s)))

        return share

    def _counts(self) -> _CpuSeconds | None:
        try:
            cpus = self._cpu_times()
        except (OSError, psutil.Error):
            return None
        wanted = self._usable()
        allowed = None if wanted is None else set(wanted)
        mine = [cpu for place, cpu in enumerate(cpus) if allowed is None or place in allowed] or cpus
        # Guest time is included in user time.
        totals = [sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0) for cpu in mine]
        idle = [cpu.idle + getattr(cpu, "iowait", 0.0) for cpu in mine]
        ours = [taken for pid in self._pids() if (taken := self._process_s(pid)) is not None]
        return _CpuSeconds(sum(totals), sum(totals) - sum(idle), sum(ours))


def busy_now() -> float:
    """The share of other programs at this moment, in tenths: what they do from second to second changes by more."""
    taken = OtherPrograms().watch()
    time.sleep(_MOMENT_S)
    return round(taken(), 1)


class BusyLately:
    """Whether other programs have kept the machine busy of late; looks again after `every_s`, else says the same."""

    def __init__(
        self, others: OtherPrograms, every_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._others, self._every_s, self._clock = others, every_s, clock
        self._share: Share | None = None
        self._looked_s, self._is_busy = -every_s, False

    def __call__(self) -> bool:
        now_s = self._clock()
        if now_s - self._looked_s >= self._every_s:
            if self._share is not None:
                self._is_busy = is_busy(self._share())
            self._share, self._looked_s = self._others.watch(), now_s
        return self._is_busy


def is_busy(share: float) -> bool:
    """Whether timings taken meanwhile are unreliable."""
    return share >= BUSY


def _ours() -> frozenset[int]:
    """This process, its descendants and its ancestors, such as the window or a shell."""
    return own_processes() | {os.getppid()}


def _process_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)


def _usable() -> Iterable[int] | None:
    affinity = getattr(os, "sched_getaffinity", None)
    try:
        return None if affinity is None else set(affinity(0))
    except OSError:
        return None
