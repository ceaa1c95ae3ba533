"""Chooses the cores that compute: the fast ones of a hybrid CPU, one thread each, within affinity and quota.

Experts and linear layers wait for memory and share a core's execution units: a core's second thread gains nothing, and
a slow core makes the fast ones wait at the end of every layer. Threads are counted, not pinned: the scheduler moves
busy threads to fast cores by itself and knows what else runs, and a pinned thread that loses its core to another
program stalls the whole team.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from engine.hardware.cgroup import cpu_quota
from engine.hardware.system_files import cpus_of, number_of, output_of, text_of

_DEVICES = Path("/sys/devices")
_SLOW = 0.6
"""Below this fraction of the fastest core's capacity or clock, a core counts as an efficiency core.

Cores of one kind differ by a few per cent (favoured cores); the middle tier of three still counts as fast."""


def compute_threads(allowed: frozenset[int] | None = None, quota: float | None = None) -> int:
    """The optimal number of compute threads: one per fast physical core that this process may use, at least one.

    Args:
        allowed: logical CPUs of this process' affinity; `None` asks the system.
        quota: CPU time, in CPUs, that it may use; `None` asks the control groups.
    """
    if allowed is None:
        allowed = allowed_cpus()
    if quota is None:
        quota = cpu_quota()
    cores = len(compute_cpus(allowed)) if platform.system() == "Linux" else _cores_elsewhere(len(allowed))
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> frozenset[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    try:
        return frozenset(psutil.Process().cpu_affinity() or ())
    except (AttributeError, psutil.Error, OSError):  # not supported on macOS
        return frozenset(range(os.cpu_count() or 1))


def compute_cpus(allowed: frozenset[int], devices: Path = _DEVICES) -> tuple[int, ...]:
    """One logical CPU for each allowed fast physical core, according to Linux.

    Efficiency cores only if nothing else is allowed.
    """
    fast = (fast_cpus(devices) or allowed) & allowed or allowed
    first: dict[tuple[str | int, ...], int] = {}
    for cpu in sorted(fast):
        topology = devices / "system" / "cpu" / f"cpu{cpu}" / "topology"
        package, core = text_of(topology / "physical_package_id"), text_of(topology / "core_id")
        # Core ids are unique only within a package and, on some Arm CPUs, within a cluster.
        cluster = text_of(topology / "cluster_id") or ""
        first.setdefault((cpu,) if package is None or core is None else (package, cluster, core), cpu)
    return tuple(first.values())


def fast_cpus(devices: Path = _DEVICES) -> frozenset[int]:
    """Logical CPUs of the fast kind; empty if all are alike or the kind is unknown.

    Intel's hybrids are listed by kind; Arm's have a capacity; for others the maximum clock decides.
    """
    fast, frugal = (cpus_of(text_of(devices / kind / "cpus")) for kind in ("cpu_core", "cpu_atom"))
    if fast and frugal:
        return fast
    system = devices / "system" / "cpu"
    cpus = cpus_of(text_of(system / "online"))
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        values = {cpu: number_of(system / f"cpu{cpu}" / file) for cpu in cpus}
        known = {cpu: value for cpu, value in values.items() if value}
        if known and len(known) == len(cpus) and min(known.values()) < _SLOW * max(known.values()):
            return frozenset(cpu for cpu, value in known.items() if value >= _SLOW * max(known.values()))
    return frozenset()


def _cores_elsewhere(allowed: int) -> int:
    """Number of fast physical cores on macOS and Windows, where core ids cannot be matched with affinity."""
    fast = None
    if platform.system() == "Darwin":
        count = output_of("sysctl", "-n", "hw.perflevel0.physicalcpu") or ""
        fast = int(count) if count.isdecimal() else None
    elif platform.system() == "Windows":
        from engine.hardware.windows_cpu import windows_cpu

        fast = windows_cpu().performance_cores
    return max(1, min(fast or psutil.cpu_count(logical=False) or 1, allowed))
