"""Measurements of this machine, and the hardware profile that the planner derives from them.

On disk they are one JSON file per machine, driver and device, in the data folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.paths import data_dir
from engine.hardware.gpu_info import GpuInfo
from engine.hardware.machine import (
    CallProfile,
    CpuProfile,
    GpuProfile,
    HardwareProfile,
    LinkProfile,
    Origin,
    assumed_card,
    assumed_cpu_flops,
    assumed_disk_bytes_per_s,
    assumed_link,
    assumed_ram_bytes_per_s,
    usual_row_s,
)
from engine.hardware.probe import Probe
from engine.hardware.profiles import EMULATED, emulated_cards, read_profile

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
class CallTime:
    """Fixed time of one of the engine's own calls, with next to no weights.

    Attributes:
        device: `cpu`, or the device's name.
        what: as the fields of `CallProfile` are called.
        threads: of the CPU; 0 on a device.
    """

    device: str
    what: str
    threads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Results of one run.  What was not measured is empty, and `skipped` says why.

    Attributes:
        kind: `quick` or `thorough`.
        device: in addition to the CPU; empty without one.
        device_bytes: its usable memory.
        machine: the measured machine (see `described`).
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
    calls: tuple[CallTime, ...] = ()

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

    @property
    def spread(self) -> float:
        """How far the RAM's bandwidth changed while all was measured, relative to its lowest; or what never settled."""
        by_threads: dict[int, list[float]] = {}
        for read in self.ram:
            by_threads.setdefault(read.threads, []).append(read.bytes_per_s)
        seen = (max(rates) / min(rates) - 1 for rates in by_threads.values())
        return max((*seen, *map(abs, self.unsteady.values())), default=0.0)

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
    small = [each for each in measurements.disk if each.nbytes <= _ROW_BYTES] if measurements else []
    disk = disk or assumed_disk_bytes_per_s(probe.models_disk)
    said = ", ".join(f"{name} {origin}" for name, origin in sorted(origins.items()))
    return HardwareProfile(
        name="this machine",
        description=", ".join(name for name in (cpu.name, gpu.name if gpu else "") if name),
        source=f"this machine: {said}",
        gpu=gpu,
        link=link,
        cpu=cpu,
        disk_bytes_per_s=disk,
        origins=origins,
        calls=_calls(measurements, origins),
        spread=max(measurements.spread, measurements.others) if measurements else 0.0,
        disk_row_s=min((each.nbytes / each.bytes_per_s for each in small), default=usual_row_s(disk)),
    )


_ROW_BYTES = 4096
"""Reads of at most so many bytes are like those of rows of tables."""


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
        cache_bytes=(probe.processor.l3_bytes or 0) if probe.processor else 0,
    )


def _gpu(probe: Probe, measured: Measurements | None, origins: Numbers) -> GpuProfile | None:
    found = [entry for entry in measured.arithmetic if entry.device != "cpu"] if measured else []
    flops = _best(entry.flops for entry in found)
    bandwidth = _best(entry.memory_bytes_per_s for entry in found)
    if measured and measured.device.startswith("emulated"):
        card = GpuProfile(measured.device, measured.device_bytes, flops or 1e12, bandwidth or 1e10)
        origins["gpu.memory_bytes"] = Origin.DRIVER
    elif probe.compute_gpu is not None and probe.compute_gpu.total_bytes:
        card, known = _alike(probe)
        origins["gpu.memory_bytes"] = Origin.DRIVER
        origins |= {f"gpu.{name}": origin for name, origin in known.items()}
    else:
        return None
    origins["gpu.flops"] = Origin.MEASURED if flops else origins.get("gpu.flops", Origin.ASSUMED)
    origins["gpu.bytes_per_s"] = Origin.MEASURED if bandwidth else origins.get("gpu.bytes_per_s", Origin.ASSUMED)
    return replace(card, flops=flops or card.flops, bytes_per_s=bandwidth or card.bytes_per_s)


def _alike(probe: Probe) -> tuple[GpuProfile, Numbers]:
    """The cards as so many of one kind: as fast as the slowest, with the memory that there is of all."""
    cards = [assumed_card(gpu) for gpu in probe.compute_gpus]
    slowest, known = min(cards, key=lambda each: each[0].bytes_per_s)
    memory, count = sum(card.memory_bytes for card, _ in cards), len(cards)
    return replace(cards[0][0] if count == 1 else slowest, memory_bytes=memory // count, count=count), known


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


def _calls(measured: Measurements | None, origins: Numbers) -> CallProfile:
    """The median over thread counts: they differ by less than a call does from the next."""
    found: dict[str, list[float]] = {}
    for call in measured.calls if measured else ():
        found.setdefault(call.what, []).append(call.seconds)
    known = {entry.name: statistics.median(found[entry.name]) for entry in fields(CallProfile) if entry.name in found}
    origins |= dict.fromkeys((f"calls.{name}" for name in known), Origin.MEASURED)
    return CallProfile(**known)


def _best(values: Iterable[float]) -> float:
    return max(values, default=0.0)


_VERSION = 1
ROWS: dict[str, type] = {
    "ram": RamRead,
    "experts": ExpertTime,
    "copies": CopyTime,
    "disk": DiskRead,
    "arithmetic": Arithmetic,
    "calls": CallTime,
}
Row = TypeVar("Row")


def described(probe: Probe) -> dict[str, str]:
    """What measurements depend on, in words: if any of it changes, they are outdated.

    Memory used by others, free space and the like are left out: they change by the minute.
    """
    gpu = probe.compute_gpu
    disk = probe.models_disk
    return {
        "system": f"{probe.os}, {probe.architecture}",
        "processor": f"{probe.cpu}, {probe.physical_cores} cores, {probe.usable_cpus} usable",
        # Rounded to half a GiB: the kernel's own share differs between its versions.
        "RAM": f"{round(probe.ram_bytes / 2**29) / 2:g} GiB",
        "graphics card": _several(probe) or ("none" if gpu is None else _card(gpu)),
        "driver": (gpu.driver if gpu else None) or "none",
        "slot": "none" if gpu is None else f"PCIe {gpu.pcie_generation or '?'} x{_lanes(gpu) or '?'}",
        "disk": "unknown" if disk is None else f"{disk.model or disk.device or disk.file_system}, {disk.kind}",
    }


def _card(gpu: GpuInfo) -> str:
    return f"{gpu.name}, {(gpu.total_bytes or 0) / 2**30:.1f} GiB"


def _several(probe: Probe) -> str:
    return " and ".join(map(_card, probe.compute_gpus)) if len(probe.compute_gpus) > 1 else ""


def measurements_file(machine: Mapping[str, str], device: str) -> Path:
    """The file with the measurements of a machine with a device."""
    mark = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:12]
    return _folder() / f"{re.sub('[^A-Za-z0-9_.-]', '-', device) or 'cpu'}-{mark}.json"


def save_measurements(measurements: Measurements) -> Path:
    """Saves them, replacing earlier ones of the same machine and device.

    Raises:
        OSError: they could not be written; the old file is unchanged.
    """
    path = measurements_file(measurements.machine, measurements.device)
    write_private(path, json.dumps({"version": _VERSION, **asdict(measurements)}, indent=1))
    return path


def load_measurements(probe: Probe, device: str = "") -> Measurements | None:
    """This machine's measurements with this device; None if there are none, or they are unreadable.

    Args:
        device: `cuda:0`, `emulated:NAME`; empty or `cpu` for the CPU alone.
    """
    return read_measurements(measurements_file(described(probe), "" if device == "cpu" else device))


def measured_ceilings(probe: Probe, device: str) -> dict[str, float]:
    """Fastest copies and reads that were measured, in bytes per second by lane (`h2d`, `d2h`, `disk`).

    Args:
        device: that a model runs on; the link of an emulated one is what its profile says.
    """
    found: dict[str, float] = {}
    is_emulated = device.startswith(EMULATED)
    if is_emulated:
        with contextlib.suppress(EngineError):
            profile = read_profile(emulated_cards(device)[0])
            found |= {"h2d": profile.link_h2d_gbps * 1e9, "d2h": profile.link_d2h_gbps * 1e9}
    measurements = load_measurements(probe, "" if is_emulated else device)
    if measurements is None:
        return found
    for lane in ("h2d", "d2h"):
        line = measurements.link(lane, pinned=True) or measurements.link(lane, pinned=False)
        if line is not None:
            found.setdefault(lane, line[1])
    if measurements.disk:
        found["disk"] = max(read.bytes_per_s for read in measurements.disk)
    return found


def changes(probe: Probe, device: str = "") -> tuple[str, ...]:
    """What has changed since this device was last measured, in sentences; empty if nothing has."""
    if load_measurements(probe, device) is not None:
        return ()
    # By their own timestamps: copying a folder changes file dates.
    earlier = max(_all_of("" if device == "cpu" else device), key=lambda one: one.taken_at, default=None)
    if earlier is None:
        return ()
    now = described(probe)
    return tuple(
        f"The {name} was {was} and is now {now[name]}."
        for name, was in earlier.machine.items()
        if name in now and now[name] != was
    )


def read_measurements(path: Path) -> Measurements | None:
    """The measurements in a file; None if there is none, or it is not one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        for name, kind in ROWS.items():
            # Older files have no calls; what they do have still holds.
            content[name] = tuple(
                _row(kind, row) for row in (content[name] if name != "calls" else content.get(name, []))
            )
        content["notes"] = tuple(str(note) for note in content["notes"])
        content["others"] = float(content.get("others", 0.0))
        limit = content["pinned_limit_bytes"]
        whole = [content["device_bytes"], 0 if limit is None else limit]
        texts = [content[name] for name in ("kind", "device", "taken_at")]
        tables = [content[name] for name in ("machine", "skipped", "unsteady")]
        sound = all(type(number) is int and number >= 0 for number in whole)
        if not (sound and all(type(text) is str for text in texts) and all(type(table) is dict for table in tables)):
            return None
        measurements = Measurements(**content)
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return measurements


def _row(kind: type[Row], content: Mapping[str, Any]) -> Row:
    """Raises: ValueError, TypeError: wrong fields, or an impossible number."""
    for entry in fields(kind):  # type: ignore[arg-type]  # rows are dataclasses
        value = content[entry.name]
        if entry.type in ("int", "float"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (entry.name == "seconds" and value == 0):
                raise ValueError(entry.name)
        elif not isinstance(value, bool if entry.type == "bool" else str):
            raise ValueError(entry.name)
    return kind(**content)


def _all_of(device: str) -> list[Measurements]:
    found = (read_measurements(path) for path in _folder().glob("*.json"))
    return [one for one in found if one is not None and one.device == device]


def _lanes(gpu: Any) -> int | None:
    known = [lanes for lanes in (gpu.pcie_width, gpu.pcie_width_now) if lanes]
    return min(known, default=None)


def _folder() -> Path:
    return data_dir() / "measurements"
