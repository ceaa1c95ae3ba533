"""A machine's memory sizes, compute rates and bandwidths, from data sheets or measurements.

Profiles of known machines are shipped with the program: JSON in `resources/machines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from engine.common.paths import resources_dir
from engine.common.profile_file import GIGA, ProfileFile, find_profile


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
    """Complete machines to plan for, with CPU, RAM, disk and card. `resources/hardware` beside it has the cards that a
    device can emulate, with only their memory and link."""
    return resources_dir() / "machines"


def machine_names(folder: Path | None = None) -> list[str]:
    """Names of all machines, sorted."""
    return sorted(path.stem for path in (folder or machines_dir()).glob("*.json"))


def read_machine(name: str, folder: Path | None = None) -> HardwareProfile:
    """The machine of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    path = find_profile(name, folder or machines_dir(), machine_names(folder), "machine")
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
