"""A machine's memory sizes, compute rates and bandwidths, from data sheets or measurements.

Profiles of known machines are shipped with the program: JSON in `resources/machines`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import GIGA, ProfileFile, best_match, find_profile, near_names, profile_names
from engine.common.paths import resources_dir
from engine.hardware.disk import DiskInfo, DiskKind
from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.probe import Probe

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_COPY_SHARE = 0.8
"""Fraction of a link's rate that a large copy reaches, after packet overhead."""
_PAGEABLE_SHARE = 0.5
"""Fraction of that for pageable memory, which the driver first copies into a buffer of its own ..."""
_MOST_PAGEABLE = 20e9
"""... on a single core."""
_DISK_BYTES_PER_S = {
    DiskKind.NVME: 3e9,
    DiskKind.SSD: 0.5e9,
    DiskKind.HDD: 0.15e9,
    DiskKind.NETWORK: 0.1e9,
    DiskKind.MEMORY: 5e9,
    DiskKind.HOST: 0.3e9,
    DiskKind.UNKNOWN: 0.5e9,
}
_MATRIX_OVER_SHADER = ((9, 0, 14.8), (8, 6, 2.0), (8, 0, 16.0), (7, 0, 4.0), (0, 0, 1.0))
"""Dense 16-bit matrix rate over the 32-bit rate of the ordinary cores, by minimum compute capability."""
_CONSUMER_BLACKWELL = (12, 0)
_BYTES_PER_S_OF_VRAM = 24.0
"""Lower bound: even the slowest cards read all of their memory about 24 times per second."""
_FLOPS_PER_BYTE = 100.0
"""Ratio of 16-bit matrix rate to memory bandwidth, for unknown cards."""


@cache
def data_sheets() -> tuple[GpuProfile, ...]:
    """The cards of `resources/cards.json`, with the memory that they usually have."""
    try:
        listed = json.loads((resources_dir() / "cards.json").read_text(encoding="utf-8"))["cards"]
        return tuple(
            GpuProfile(card["name"], round(card["gb"] * 2**30), card["tflops"] * 1e12, card["gbps"] * 1e9)
            for card in listed
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()  # without its data files, planning still works from the driver's numbers


@cache
def known_cards() -> dict[str, tuple[float, float]]:
    """(matrix rate in 1 / s, memory bandwidth in bytes / s) of cards with data sheets, by `card_key`.

    From `resources/cards.json` and the machine profiles shipped with the program.
    """
    found = {card_key(card.name): (card.flops, card.bytes_per_s) for card in data_sheets()}
    for name in machine_names():
        try:
            gpu = read_machine(name).gpu
        except EngineError:
            continue
        if gpu is not None:
            found.setdefault(card_key(gpu.name), (gpu.flops, gpu.bytes_per_s))
    return found


def card_key(name: str) -> str:
    """A card's name without the parts that vary between drivers: vendor, `GPU`, memory size."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    idle = {
        "nvidia",
        "geforce",
        "amd",
        "radeon",
        "quadro",
        "tesla",
        "gpu",
        "generation",
        "graphics",
        "intel",
        "r",
        "tm",
    }
    return " ".join(word for word in words if word not in idle and not re.fullmatch(r"\d+gb", word))


def assumed_card(gpu: GpuInfo) -> tuple[GpuProfile, dict[str, Origin]]:
    """A card from its data sheet or driver, with the origins of `flops` and `bytes_per_s`.

    The driver's bandwidth takes precedence: cards of the same name can differ in memory.
    """
    assert gpu.total_bytes is not None
    flops, bandwidth = known_cards().get(card_key(gpu.name), (None, None))
    origins = {"flops": Origin.ASSUMED, "bytes_per_s": Origin.ASSUMED}
    if gpu.memory_bytes_per_s:
        bandwidth = gpu.memory_bytes_per_s
        origins["bytes_per_s"] = Origin.DRIVER
    bandwidth = bandwidth or gpu.total_bytes * _BYTES_PER_S_OF_VRAM
    if flops is None and gpu.shader_flops:
        flops = gpu.shader_flops * _matrix_factor(gpu)
    return GpuProfile(gpu.name, gpu.total_bytes, flops or bandwidth * _FLOPS_PER_BYTE, bandwidth), origins


def assumed_link(gpu: GpuInfo | None) -> LinkProfile:
    """Copy rates of the fastest link that card and slot support: an idle card slows its link down."""
    generation, width = (gpu.pcie_generation or 4, gpu.pcie_width or 16) if gpu else (4, 16)
    if gpu is not None and gpu.pcie_width_now:  # a lasting limit, set by slot or riser
        width = min(width, gpu.pcie_width_now)
    rate = _LANE_BYTES_PER_S[min(max(generation, 1), 6)] * width * _COPY_SHARE
    return LinkProfile(h2d=rate, d2h=rate, h2d_pageable=min(rate * _PAGEABLE_SHARE, _MOST_PAGEABLE))


def assumed_cpu_flops(probe: Probe, cores: int) -> float:
    """Two 32-bit FMAs of the widest vector per cycle and core, at the sustained all-core clock; half as many more where
    there are products of 16-bit numbers (the kernels on a Zen 5, by the width of experts: 1.2 to 2.2 times)."""
    has = set(probe.instructions)
    per_cycle = 96 if has & _OF_16_BITS else 64 if "avx512f" in has else 32 if has & {"avx2", "fma"} else 16
    fastest_hz = probe.processor.max_hz if probe.processor else None
    return cores * per_cycle * 0.85 * (fastest_hz or 3.5e9)


_OF_16_BITS = {"avx512_bf16", "amx_tile"}


def assumed_ram_bytes_per_s(probe: Probe) -> float:
    """Two channels of DDR4 or DDR5, four or more with many cores; theoretical."""
    processor = probe.processor
    channels = 2 if (probe.physical_cores or 1) <= 16 else 4 if (probe.physical_cores or 1) <= 32 else 8
    nodes = max(1, (processor.numa_nodes or 1) if processor else 1)
    has_ddr5 = bool({"avx_vnni", "amx_tile", "avx512_bf16"} & set(probe.instructions))
    return channels * nodes * (38.4e9 if has_ddr5 else 25.6e9)


def assumed_disk_bytes_per_s(disk: DiskInfo | None) -> float:
    """Bytes per second of large reads."""
    return _DISK_BYTES_PER_S[disk.kind if disk else DiskKind.UNKNOWN]


def _matrix_factor(gpu: GpuInfo) -> float:
    if gpu.vendor is not Vendor.NVIDIA or not gpu.compute_capability:
        return 2.0
    major, _, minor = gpu.compute_capability.partition(".")
    capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    if capability >= _CONSUMER_BLACKWELL:
        return 2.0
    return next(factor for *least, factor in _MATRIX_OVER_SHADER if capability >= tuple(least))


_GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CardChoice:
    """A card to choose: `GeForce RTX 3060, 12 GB`, and a machine that has it."""

    name: str
    machine: HardwareProfile


@cache
def card_choices() -> tuple[CardChoice, ...]:
    """Every card of the shipped machine profiles and data sheets, without duplicates, by its memory and name."""
    machines = []
    for name in machine_names():
        try:
            machines.append(read_machine(name))
        except EngineError:  # one broken file must not hide the others
            continue
    link = assumed_link(None)
    base = next((machine for machine in machines if machine.gpu is not None), None)
    if base is not None:
        machines += [replace(base, name=card.name, gpu=card, link=link) for card in data_sheets()]
    found: dict[str, CardChoice] = {}
    for machine in machines:
        if machine.gpu is not None:
            count = f"{machine.gpu.count} × " if machine.gpu.count > 1 else ""
            shown = f"{count}{machine.gpu.name.removeprefix('NVIDIA ')}, {machine.gpu.memory_bytes / _GIB:g} GB"
            found.setdefault(shown, CardChoice(shown, machine))
    return tuple(sorted(found.values(), key=lambda one: (one.machine.vram_bytes, one.name)))


def find_card(text: str) -> CardChoice:
    """The card that a few letters mean, such as `4090`; a size, as in `rtx 3080 12 gb`, is its memory.

    Raises:
        EngineError: `INVALID_REQUEST`, no card is called so.
    """
    choices = {one.name: one for one in card_choices()}
    listed = best_match(text, list(choices))
    if listed is not None:
        return choices[listed]
    size = _SIZE.search(text)
    unsized = best_match(_SIZE.sub(" ", text), list(choices))
    if size is not None and unsized is not None:
        card = choices[unsized].machine
        assert card.gpu is not None
        with_size = card.with_memory(vram_bytes=round(float(size[1]) * _GIB) * card.gpu.count)
        return CardChoice(f"{unsized.rpartition(',')[0]}, {float(size[1]):g} GB", with_size)
    near = near_names(text.strip(), list(choices))[:2]
    hint = f"did you mean {' or '.join(near)}?" if near else "choose one from the list."
    raise EngineError(ErrorCode.INVALID_REQUEST, f"No graphics card called “{text.strip()[:60]}” is known: {hint}")


class Origin(StrEnum):
    """The origin of a machine's number."""

    MEASURED = "measured"
    DRIVER = "driver"
    """Reported by the driver or the operating system."""
    ASSUMED = "assumed"
    """From data sheets, or typical of such machines."""
    MODELLED = "modelled"
    """Of a machine whose time is modelled: reached by definition."""


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Identical graphics cards.  What several do together depends on how a model is shared among them
    (`engine.planner.costs.Cards`).

    Attributes:
        name: the manufacturer's name.
        memory_bytes: of one card.
        flops: dense 16-bit matrix rate of one card, 1 / s.
        bytes_per_s: memory bandwidth of one card.
        count: number of cards.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The link between RAM and a card; bandwidths in bytes / s, as reached by large copies.

    Attributes:
        h2d, d2h: from and to pinned memory.
        h2d_pageable: from memory that is not pinned.
        latency_s: fixed cost of each copy.
        peer: from one card to another; 0 where such copies go through RAM.
    """

    h2d: float
    d2h: float
    h2d_pageable: float
    latency_s: float = 1e-5
    peer: float = 0.0

    def between_cards(self, nbytes: float) -> float:
        """Seconds of a copy from one card to another: direct, or through RAM where that is sooner."""
        through_ram = nbytes / self.d2h + nbytes / self.h2d + 2 * self.latency_s
        return min(nbytes / self.peer + self.latency_s, through_ram) if self.peer else through_ram


@dataclass(frozen=True, slots=True)
class CpuProfile:
    """CPU and RAM.

    Attributes:
        name: the manufacturer's name.
        cores: physical cores, all sockets.
        flops: compute rate of all cores in the width that the kernels use, 16 or 32 bits, 1 / s.
        ram_bytes_per_s: theoretical bandwidth of the RAM.
        ram_bytes: size.
        weights_bytes_per_s: measured weight bandwidth of expert kernels, by threads; empty if never measured.
        cache_bytes: of the last-level caches; 0 if unknown.
    """

    name: str
    cores: int
    flops: float
    ram_bytes_per_s: float
    ram_bytes: int
    weights_bytes_per_s: Mapping[int, float] = field(default_factory=dict)
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CallProfile:
    """Fixed costs of the engine's own calls here, in seconds, weights aside; 0 where they were never measured.

    Attributes:
        native_s: of a call into the native kernels that computes next to nothing, its hand-over to threads included.
        router_s: of a norm and a router in the library's operators.
        layer_s: of an expert layer that card and CPU share, without experts: the routing's way to the CPU, and the sum.
        card_s, host_s: added if the card, or the CPU, computes any of its experts.
        host_expert_s: added for each expert that the CPU computes.
        single_s: of an expert that the card computes in a call of its own.
        fetch_s: of letting an expert be fetched; sum_s: of letting what another card has made come to the first one.
        launch_s: from one kernel to the next on a card whose time is modelled; flags_s: of the flags and rows by which
            its tokens ask the CPU for a layer's experts.
    """

    native_s: float = 0.0
    router_s: float = 0.0
    layer_s: float = 0.0
    card_s: float = 0.0
    host_s: float = 0.0
    host_expert_s: float = 0.0
    single_s: float = 0.0
    fetch_s: float = 0.0
    sum_s: float = 0.0
    launch_s: float = 0.0
    flags_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Watts while generating: the CPU package when idle and per busy core, and the card."""

    cpu_base_w: float
    cpu_per_core_w: float
    gpu_w: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine.

    Attributes:
        name: the profile's file name without `.json`.
        description: display text.
        source: origin of the numbers.
        gpu: None for a machine without one.
        link: between RAM and the card.
        cpu: CPU and RAM.
        disk_bytes_per_s: read rate; disk_row_s: of a read of a few kB, where many are under way.
        power: None if unknown.
        calls: fixed costs of calls; measured or unknown.
        spread: relative change of measured rates while they were measured, or the share of other programs then.
        origins: origin of each number, by path such as `gpu.flops`; empty for profiles read from files.
    """

    name: str
    description: str
    source: str
    gpu: GpuProfile | None
    link: LinkProfile
    cpu: CpuProfile
    disk_bytes_per_s: float
    power: PowerProfile | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    calls: CallProfile = CallProfile()
    spread: float = 0.0
    disk_row_s: float = 0.0

    @property
    def vram_bytes(self) -> int:
        """Memory of all cards together."""
        return self.gpu.memory_bytes * self.gpu.count if self.gpu else 0

    def with_memory(self, *, vram_bytes: int | None = None, ram_bytes: int | None = None) -> HardwareProfile:
        """The same machine with different memory sizes, for "what if"."""
        changed = self
        if vram_bytes is not None and self.gpu is not None:
            changed = replace(changed, gpu=replace(self.gpu, memory_bytes=vram_bytes // self.gpu.count))
        if ram_bytes is not None:
            changed = replace(changed, cpu=replace(self.cpu, ram_bytes=ram_bytes))
        return changed


_SECONDS_OF_A_ROW = ((1e9, 8e-6), (0.3e9, 25e-6), (0.0, 5e-3))
"""Of disks that read so many bytes a second: 120,000 and 40,000 small reads a second, and what a head takes to move."""


def usual_row_s(disk_bytes_per_s: float) -> float:
    """Seconds of a small read, where many are under way, on disks of this read rate."""
    return next(seconds for rate, seconds in _SECONDS_OF_A_ROW if disk_bytes_per_s >= rate)


def machines_dir() -> Path:
    """Complete machines to plan for, with CPU, RAM, disk and card."""
    return resources_dir() / "machines"


def machine_names() -> list[str]:
    return profile_names(machines_dir())


def read_machine(name: str) -> HardwareProfile:
    """The machine of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    path = find_profile(name, machines_dir(), "machine")
    return machine_in(ProfileFile(path), path.stem)


def machine_in(file: ProfileFile, name: str) -> HardwareProfile:
    """The machine that a JSON object describes.

    Raises:
        EngineError: `INVALID_REQUEST` if it has invalid values.
    """
    gpu = file.part("gpu", optional=True)
    link, cpu = file.part("link"), file.part("cpu")
    power = file.part("power", optional=True)
    return HardwareProfile(
        name=name,
        description=file.text("description"),
        source=file.text("source"),
        gpu=None
        if gpu is None
        else GpuProfile(
            name=gpu.text("name"),
            memory_bytes=gpu.whole("memory_bytes", 2**28, 2**42),
            flops=gpu.number("tflops", 0.01, 1e5) * 1e12,
            bytes_per_s=gpu.number("gbps", 1, 1e5) * GIGA,
            count=gpu.whole("count", 1, 64),
        ),
        link=LinkProfile(
            h2d=link.number("h2d_gbps", 0.001, 2000) * GIGA,
            d2h=link.number("d2h_gbps", 0.001, 2000) * GIGA,
            h2d_pageable=link.number("h2d_pageable_gbps", 0.001, 2000) * GIGA,
            latency_s=link.number("latency_us", 0, 1e5) * 1e-6,
            peer=link.number("peer_gbps", 0, 2000) * GIGA if "peer_gbps" in link.content else 0.0,
        ),
        cpu=CpuProfile(
            name=cpu.text("name"),
            cores=cpu.whole("cores", 1, 4096),
            flops=cpu.number("tflops", 0.001, 1e4) * 1e12,
            ram_bytes_per_s=cpu.number("ram_gbps", 0.1, 1e4) * GIGA,
            ram_bytes=cpu.whole("ram_bytes", 2**28, 2**46),
            weights_bytes_per_s=cpu.by_threads("weights_gbps_by_threads"),
        ),
        disk_bytes_per_s=(disk := file.number("disk_gbps", 0.001, 1000) * GIGA),
        power=None
        if power is None
        else PowerProfile(
            power.number("cpu_base_w", 0, 1e4), power.number("cpu_per_core_w", 0, 1e3), power.number("gpu_w", 0, 1e4)
        ),
        disk_row_s=usual_row_s(disk),
    )
