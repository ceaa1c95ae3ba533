"""A graphics card of any vendor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Vendor(StrEnum):
    """A card's manufacturer."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"
    APPLE = "apple"
    OTHER = "other"


CARD_NAMES = ("cuda", "xpu", "mps")
"""What torch calls cards, and `--device` does: NVIDIA's and AMD's, Intel's, and Apple's."""

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables of the environment that hide NVIDIA's and AMD's cards from programs."""


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One graphics card, as its driver describes it; unknown values are None.

    Attributes:
        total_bytes, free_bytes: video memory; `free_bytes` excludes what other programs hold.
        compute_capability: NVIDIA's, such as `9.0`.
        pcie_generation, pcie_width: of the fastest link that card and slot support.
        used_by_others_bytes: video memory of all programs except this one and its children.
        pcie_generation_now, pcie_width_now: the current link: an idle card slows it down, a riser may narrow it.
        power_limit_w: watts that the card may draw.
        is_integrated: whether it is part of the processor and shares its RAM.
        memory_bytes_per_s: memory bandwidth, from bus width and clock.
        shows_desktop: whether a display is connected to it and used.
        shader_flops: 32-bit rate of its shader cores, from their number and maximum clock.
        bus: its PCI address, such as `0000:01:00.0`.
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
    shows_desktop: bool | None = None
