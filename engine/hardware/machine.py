"""What a machine can do: memory, arithmetic and links, in numbers that can be looked up or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Origin(StrEnum):
    """How a number of a machine is known."""

    MEASURED = "measured"
    DRIVER = "driver"
    """Told by the driver or the operating system."""
    ASSUMED = "assumed"
    """From data sheets, or what machines of its kind have."""


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """Graphics cards of one kind, seen as one device when there are several (tensor parallelism).

    Attributes:
        name: as its maker calls it.
        memory_bytes: of one card.
        flops: dense 16-bit matrix rate of one card, 1 / s.
        bytes_per_s: memory bandwidth of one card.
        count: cards.
    """

    name: str
    memory_bytes: int
    flops: float
    bytes_per_s: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The way between RAM and the cards; bandwidths are what a large copy reaches, bytes / s, of one card's link.

    Attributes:
        h2d, d2h: from and to pinned memory.
        h2d_pageable: from memory that is not pinned.
        latency_s: that each copy takes besides.
    """

    h2d: float
    d2h: float
    h2d_pageable: float
    latency_s: float = 1e-5


@dataclass(frozen=True, slots=True)
class CpuProfile:
    """Processor and RAM.

    Attributes:
        name: as its maker calls it.
        cores: physical cores, all sockets.
        flops: rate of 16-bit or 32-bit products on all cores, whichever its kernels use, 1 / s.
        ram_bytes_per_s: theoretical bandwidth of the RAM.
        ram_bytes: size.
        weights_bytes_per_s: bandwidth at which experts were seen to be computed, by threads; empty if never measured.
    """

    name: str
    cores: int
    flops: float
    ram_bytes_per_s: float
    ram_bytes: int
    weights_bytes_per_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PowerProfile:
    """Watts while generating: the processor's package without and per busy core, and the card."""

    cpu_base_w: float
    cpu_per_core_w: float
    gpu_w: float


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine.

    Attributes:
        name: the profile's file name without `.json`.
        description: for people.
        source: where the numbers come from.
        gpu: None for a machine without one.
        link: between RAM and the card.
        cpu: processor and RAM.
        disk_bytes_per_s: reading.
        power: None if unknown.
        origins: how each number is known, by its path such as `gpu.flops`; empty for profiles out of files.
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

    @property
    def vram_bytes(self) -> int:
        """Memory of all cards together."""
        return self.gpu.memory_bytes * self.gpu.count if self.gpu else 0

    def with_memory(self, *, vram_bytes: int | None = None, ram_bytes: int | None = None) -> HardwareProfile:
        """The same machine with other sizes of memory: "what if"."""
        changed = self
        if vram_bytes is not None and self.gpu is not None:
            changed = replace(changed, gpu=replace(self.gpu, memory_bytes=vram_bytes // self.gpu.count))
        if ram_bytes is not None:
            changed = replace(changed, cpu=replace(self.cpu, ram_bytes=ram_bytes))
        return changed
