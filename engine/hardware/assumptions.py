"""Typical performance of a machine of its kind, for whatever has not been measured."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache

from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import resources_dir
from engine.common.profile_file import best_match, near_names
from engine.hardware.disk import DiskInfo, DiskKind
from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.machine import GpuProfile, HardwareProfile, LinkProfile, Origin, machine_names, read_machine
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
    """Two 32-bit FMAs of the widest vector per cycle and core, at the sustained all-core clock."""
    has = set(probe.instructions)
    per_cycle = 64 if "avx512f" in has else 32 if has & {"avx2", "fma"} else 16
    fastest_hz = probe.processor.max_hz if probe.processor else None
    return cores * per_cycle * 0.85 * (fastest_hz or 3.5e9)


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
