"""A graphics card through torch, whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.card_stream import CardClock, CardStream
from engine.devices.device import Capture, CopyLog, Device
from engine.devices.host_memory import HostMemory, aligned
from engine.devices.memory_budget import MemoryBudget
from engine.devices.relayed_stream import RelayedStream

HEADROOM_BYTES = 2**30
"""Bytes left to the driver, torch's workspaces and the desktop."""


@dataclass(frozen=True)
class CardKind:
    """What differs between kinds of cards.

    Attributes:
        name: torch's for devices of the kind, and in `--device`.
        torch: torch's module of the kind, `torch.cuda` or `torch.xpu`, which have the same names for the same things.
        host_memory: memory that a card's copies are fast from.
        identity: of the card with this index, its driver and its link: what measured times depend on.
        captures: starts captures of graphs on a card; None if decode steps are not captured.
    """

    name: str
    torch: Any
    host_memory: Callable[[torch.device], HostMemory]
    identity: Callable[[int], str]
    captures: Callable[[torch.device], Callable[[], Capture]] | None = None

    def count(self) -> int:
        """Number of cards that torch can use."""
        return int(self.torch.device_count()) if self.torch.is_available() else 0


def hard_fraction(budget: int, total: int) -> float:
    """The part of a card's memory beyond which torch refuses to allocate, so that nothing spills into RAM.

    Args:
        budget: bytes that are planned with.
        total: bytes of the card.
    """
    return min(1.0, (budget + HEADROOM_BYTES // 2) / max(total, 1))


def open_card(kind: CardKind, index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens a card.

    Args:
        vram_bytes: memory budget; None: all free memory except `HEADROOM_BYTES`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if there is no such card, or it does not respond.
    """
    cards = kind.torch
    if index >= (count := kind.count()):
        what = f"no graphics card number {index}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"This machine has {what}: use cpu, or run `switchyard doctor`."
        )
    name = f"{kind.name}:{index}"
    place = torch.device(kind.name, index)
    try:
        free, total = cards.mem_get_info(place)
        clock = CardClock(cards, place)
        # Weight copies may take long; activations need a stream of higher priority.
        queues = (
            cards.current_stream(place),
            cards.Stream(place, priority=0),
            cards.Stream(place, priority=0),
            cards.Stream(place, priority=-1),
        )
        new_capture = None if kind.captures is None else kind.captures(place)
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"Graphics card {name} does not respond ({text}): restart the computer or use --device cpu.",
        ) from error
    usable = max(0, free - HEADROOM_BYTES)
    budget = usable if vram_bytes is None else min(usable, vram_bytes)
    cards.set_per_process_memory_fraction(hard_fraction(budget, total), place)
    log = CopyLog()
    roles = ("compute", "h2d", "d2h", "small copies")
    kinds = (CardStream, RelayedStream, CardStream, CardStream)
    compute, h2d, d2h, small = (
        made(f"{name} {role}", queue, cards, clock, log) for made, role, queue in zip(kinds, roles, queues, strict=True)
    )
    host = kind.host_memory(place)

    def allocate(nbytes: int) -> torch.Tensor:
        memory = aligned(nbytes, place)
        # torch may return memory that its current stream still uses, while other streams will write to it.
        cards.current_stream(place).synchronize()
        return memory

    def left() -> int:
        free, _ = cards.mem_get_info(place)
        if free < HEADROOM_BYTES // 4:  # what torch keeps for later is of use to others now
            cards.empty_cache()
            free, _ = cards.mem_get_info(place)
        return int(free)

    def close() -> None:
        for stream in (compute, h2d, d2h, small):
            stream.close()
        host.close()

    return Device(
        name=name,
        torch_device=place,
        memory=MemoryBudget(name, budget, allocate, left, HEADROOM_BYTES),
        host_memory=host,
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        new_capture=new_capture,
        identity=kind.identity(index),
    )
