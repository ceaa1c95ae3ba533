"""Apple's graphics through `torch.mps`: they share the processor's memory, so nothing is copied to them, or cached.

A model runs there with all of its experts where they lie, or on the CPU.  There is one queue of work, and no way to
order other work with it but to wait.  Not yet run on such a machine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch

from engine.devices.card import HEADROOM_BYTES, CardKind, hard_fraction
from engine.devices.cpu import InlineStream
from engine.devices.device import ROLES, CopyLog, Device, Direction, Event
from engine.devices.host_memory import HostMemory, aligned, available_ram
from engine.devices.memory_budget import MemoryBudget

_LEAST_FRACTION = 0.01
"""To torch a limit of 0 is none."""


class AppleCards:
    """`torch.mps` with the names that other kinds of cards have in torch."""

    def __init__(self, mps: Any) -> None:
        self.mps = mps

    def is_available(self) -> bool:
        return bool(self.mps.is_available())

    def device_count(self) -> int:
        return int(self.mps.device_count())

    def get_device_name(self, _index: int) -> str:
        return "Apple graphics"

    def get_arch_list(self) -> list[str]:
        return ["Metal"]  # torch makes their code at run time


class AppleStream(InlineStream):
    """An event is done when the work is, which is waited for: little is submitted where nothing is copied."""

    def __init__(self, name: str, copy_log: CopyLog, synchronize: Callable[[], None]) -> None:
        super().__init__(name, copy_log)
        self._synchronize = synchronize

    def _run(self, work: Callable[[], object], copied: tuple[Direction, int] | None = None) -> Event:
        def done() -> None:
            work()
            self._synchronize()

        return super()._run(done, copied)


def open_apple(kind: CardKind, index: int, vram_bytes: int | None) -> Device:
    """Opens the graphics of a chip of Apple's; without a budget, with what the system recommends and RAM has free."""
    mps: Any = kind.torch.mps
    name, place = f"{kind.name}:{index}", torch.device(kind.name, index)
    most = mps.recommended_max_memory()
    usable = max(0, min(most - mps.driver_allocated_memory(), available_ram()) - HEADROOM_BYTES)
    budget = usable if vram_bytes is None else min(usable, vram_bytes)
    mps.set_per_process_memory_fraction(max(_LEAST_FRACTION, hard_fraction(budget, most)))
    log = CopyLog()
    return Device(
        name=name,
        torch_device=place,
        memory=MemoryBudget(name, budget, lambda nbytes: aligned(nbytes, place)),
        host_memory=HostMemory(),
        streams=tuple(AppleStream(f"{name} {role}", log, mps.synchronize) for role in ROLES),
        copy_log=log,
        compute_follows_caller=True,
        is_unified=True,
        identity=kind.identity(index),
    )


def identity_of(_index: int) -> str:
    """What times depend on: the chip, its memory and the system."""
    return f"{platform.processor() or platform.machine()} macOS {platform.mac_ver()[0]} Metal"


MPS = CardKind(
    "mps",
    AppleCards(torch.mps),
    lambda _place: HostMemory(),
    identity_of,
    is_built=lambda: bool(torch.backends.mps.is_built()),
    opens=open_apple,
    is_automatic=False,
)
