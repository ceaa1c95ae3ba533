"""What is told of a graphics card, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Vendor(StrEnum):
    """Who made a card."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    APPLE = "apple"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One graphics card, as its driver describes it; what the driver does not tell is None.

    Attributes:
        total_bytes, free_bytes: video memory; `free_bytes` already lacks what other programs hold.
        compute_capability: NVIDIA's, such as `9.0`.
        pcie_generation, pcie_width: of the fastest link the card and slot can make.
        used_by_others_bytes: video memory of every program but this one and those it has started.
        pcie_generation_now, pcie_width_now: of the link as it is: an idle card slows it down, a riser may narrow it.
        power_limit_w: watts that the card may draw.
        is_integrated: whether it is part of the processor and shares its RAM.
        memory_bytes_per_s: bandwidth of its memory, as width and clock give it.
        shader_flops: 32-bit rate of its ordinary cores, as their number and highest clock give it.
        bus: its place, such as `0000:01:00.0`.
    """

    name: str
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None
    compute_capability: str | None
    pcie_generation: int | None
    pcie_width: int | None = None
    used_by_others_bytes: int | None = None
    pcie_generation_now: int | None = None
    pcie_width_now: int | None = None
    power_limit_w: float | None = None
    vendor: Vendor = Vendor.NVIDIA
    is_integrated: bool = False
    bus: str | None = None
    memory_bytes_per_s: float | None = None
    shader_flops: float | None = None
