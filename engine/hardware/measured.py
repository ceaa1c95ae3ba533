"""Measurements of this machine, and the hardware profile that the planner derives from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.hardware.assumptions import (
    assumed_card,
    assumed_cpu_flops,
    assumed_disk_bytes_per_s,
    assumed_link,
    assumed_ram_bytes_per_s,
)
from engine.hardware.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin
from engine.hardware.probe import HardwareProfile as Probe

Numbers = dict[str, Origin]


@dataclass(frozen=True, slots=True)
class RamRead:
    """RAM read bandwidth with a number of threads, over far more memory than any cache holds."""

    threads: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Time of one expert with uncached weights.

    Attributes:
        device: `cpu`, or the device's name.
        hidden, inner: widths.
        precision: `bf16`, `int8` or `int4`.
        threads: of the CPU; 0 on a device.
        nbytes: of its record.
        seconds: for the expert and all `tokens` together.
    """

    device: str
    hidden: int
    inner: int
    precision: str
    tokens: int
    threads: int
    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Weights read per second."""
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class CopyTime:
    """A copy over the link.

    Attributes:
        direction: `h2d` or `d2h`.
        pinned: whether the host memory is pinned.
        both_ways: whether an equal copy ran in the other direction at the same time.
    """

    device: str
    direction: str
    pinned: bool
    both_ways: bool
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Read rate with `depth` requests of `nbytes` in flight; `direct`: bypassing the page cache."""

    depth: int
    nbytes: int
    direct: bool
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Throughput of large matrix products and large reads; `threads` is 0 on a device.

    Attributes:
        flops: 16-bit matrix products, 1 / s; 0 if not measured.
        memory_bytes_per_s: of the device's own memory; 0 if not measured.
    """

    device: str
    threads: int
    flops: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of one run.  What was not measured is empty, and `skipped` says why.

    Attributes:
        kind: `quick` or `thorough`.
        device: in addition to the CPU; empty without one.
        device_bytes: its usable memory.
        machine: the measured machine (see `measurement_files.described`).
        taken_at: ISO 8601, UTC.
        pinned_limit_bytes: host memory that could be pinned; None if not measured.
        skipped: reasons of skipped measurements, by name.
        unsteady: measurements that never settled, by name, with the remaining relative difference.
        notes: sentences for the user, such as that the CPU slowed down meanwhile.
        others: share of the CPU that other programs used meanwhile, 0 to 1.
    """

    kind: str
    device: str
    device_bytes: int
    machine: dict[str, str]
    taken_at: str
    ram: tuple[RamRead, ...] = ()
    experts: tuple[ExpertTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    disk: tuple[DiskRead, ...] = ()
    arithmetic: tuple[Arithmetic, ...] = ()
    pinned_limit_bytes: int | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    unsteady: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    others: float = 0.0

    def link(self, direction: str, *, pinned: bool) -> tuple[float, float] | None:
        """(latency in s, bytes / s) of a linear fit of the copies in one direction; None if there are none.

        The rate is the largest copy's; the latency is the smallest copy's time minus its transfer.
        """
        found = [c for c in self.copies if (c.direction, c.pinned, c.both_ways) == (direction, pinned, False)]
        if not found:
            return None
        small, large = min(found, key=lambda c: c.nbytes), max(found, key=lambda c: c.nbytes)
        if small.nbytes == large.nbytes or large.seconds <= small.seconds:
            return 0.0, large.nbytes / large.seconds
        rate = (large.nbytes - small.nbytes) / (large.seconds - small.seconds)
        return max(0.0, small.seconds - small.nbytes / rate), rate

    def weights_bytes_per_s(self, precision: str, expert_bytes: float | None = None) -> dict[int, float]:
        """Bandwidth at which the CPU computed one token's experts, by threads.

        Args:
            expert_bytes: of an expert; bigger ones are read faster. Between measured sizes the rate is interpolated
                over the logarithm of the size, beyond them it is constant. Without it: the rate of the best size.
        """
        found: dict[int, dict[int, float]] = {}
        for time in self.experts:
            if (time.device, time.precision, time.tokens) == ("cpu", precision, 1):
                by_size = found.setdefault(time.threads, {})
                by_size[time.nbytes] = max(by_size.get(time.nbytes, 0.0), time.bytes_per_s)
        if expert_bytes is None:
            return {threads: max(by_size.values()) for threads, by_size in found.items()}
        return {threads: _at_size(by_size, expert_bytes) for threads, by_size in found.items()}


def machine_profile(
    probe: Probe,
    measurements: Measurements | None = None,
    *,
    precision: str = "bf16",
    expert_bytes: float | None = None,
) -> HardwareProfile:
    """The hardware profile for the planner, with the origin of every number.

    Measured numbers describe the machine when everything else is idle. A measured emulated device counts as the
    machine's card.

    Args:
        precision, expert_bytes: of the experts for `cpu.weights_bytes_per_s`; see there.
    """
    origins: Numbers = {}
    by_threads = measurements.weights_bytes_per_s(precision, expert_bytes) if measurements else {}
    cpu = _cpu(probe, measurements, by_threads, origins)
    gpu = _gpu(probe, measurements, origins)
    link = _link(probe, measurements, origins)
    disk = max((read.bytes_per_s for read in measurements.disk), default=0.0) if measurements else 0.0
    origins["disk_bytes_per_s"] = Origin.MEASURED if disk else Origin.ASSUMED
    said = ", ".join(f"{name} {origin}" for name, origin in sorted(origins.items()))
    return HardwareProfile(
        name="this machine",
        description=", ".join(name for name in (cpu.name, gpu.name if gpu else "") if name),
        source=f"this machine: {said}",
        gpu=gpu,
        link=link,
        cpu=cpu,
        disk_bytes_per_s=disk or assumed_disk_bytes_per_s(probe.models_disk),
        origins=origins,
    )


def _at_size(by_size: dict[int, float], nbytes: float) -> float:
    known = sorted(by_size.items())
    for (small, slow), (large, fast) in itertools.pairwise(known):
        if small < nbytes < large:
            return slow + (fast - slow) * math.log(nbytes / small) / math.log(large / small)
    return known[0][1] if nbytes <= known[0][0] else known[-1][1]


def _cpu(probe: Probe, measured: Measurements | None, by_threads: dict[int, float], origins: Numbers) -> CpuProfile:
    cores = max(1, min(probe.physical_cores or probe.usable_cpus, probe.usable_cpus))
    flops = _best(entry.flops for entry in measured.arithmetic if entry.device == "cpu") if measured else 0.0
    # Single-token experts are bound by reading, and their kernels read faster than a plain sum does.
    ram = _best((*(entry.bytes_per_s for entry in measured.ram), *by_threads.values())) if measured else 0.0
    origins["cpu.cores"] = origins["cpu.ram_bytes"] = Origin.DRIVER
    origins["cpu.flops"] = Origin.MEASURED if flops else Origin.ASSUMED
    origins["cpu.ram_bytes_per_s"] = Origin.MEASURED if ram else Origin.ASSUMED
    if by_threads:
        origins["cpu.weights_bytes_per_s"] = Origin.MEASURED
    return CpuProfile(
        name=probe.cpu or "unknown processor",
        cores=cores,
        flops=flops or assumed_cpu_flops(probe, cores),
        ram_bytes_per_s=ram or assumed_ram_bytes_per_s(probe),
        ram_bytes=probe.ram_bytes,
        weights_bytes_per_s=by_threads,
    )


def _gpu(probe: Probe, measured: Measurements | None, origins: Numbers) -> GpuProfile | None:
    found = [entry for entry in measured.arithmetic if entry.device != "cpu"] if measured else []
    flops = _best(entry.flops for entry in found)
    bandwidth = _best(entry.memory_bytes_per_s for entry in found)
    if measured and measured.device.startswith("emulated"):
        card = GpuProfile(measured.device, measured.device_bytes, flops or 1e12, bandwidth or 1e10)
        origins["gpu.memory_bytes"] = Origin.DRIVER
    elif probe.compute_gpu is not None and probe.compute_gpu.total_bytes:
        card, known = assumed_card(probe.compute_gpu)
        origins["gpu.memory_bytes"] = Origin.DRIVER
        origins |= {f"gpu.{name}": origin for name, origin in known.items()}
    else:
        return None
    origins["gpu.flops"] = Origin.MEASURED if flops else origins.get("gpu.flops", Origin.ASSUMED)
    origins["gpu.bytes_per_s"] = Origin.MEASURED if bandwidth else origins.get("gpu.bytes_per_s", Origin.ASSUMED)
    return GpuProfile(card.name, card.memory_bytes, flops or card.flops, bandwidth or card.bytes_per_s)


def _link(probe: Probe, measured: Measurements | None, origins: Numbers) -> LinkProfile:
    assumed = assumed_link(probe.compute_gpu)
    to, back, pageable = (
        (measured.link(direction, pinned=pinned) if measured else None)
        for direction, pinned in (("h2d", True), ("d2h", True), ("h2d", False))
    )
    for name, found in (("h2d", to), ("d2h", back), ("h2d_pageable", pageable), ("latency_s", to)):
        origins[f"link.{name}"] = Origin.MEASURED if found else Origin.ASSUMED
    return LinkProfile(
        h2d=to[1] if to else assumed.h2d,
        d2h=back[1] if back else assumed.d2h,
        h2d_pageable=pageable[1] if pageable else assumed.h2d_pageable,
        latency_s=to[0] if to else assumed.latency_s,
    )


def _best(values: Iterable[float]) -> float:
    return max(values, default=0.0)
