"""A graphics card through torch, whoever made it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.card_stream import CardClock, CardStream, RelayedStream
from engine.devices.device import ROLES, Capture, CopyLog, Device
from engine.devices.failures import is_out_of_memory
from engine.devices.host_memory import HostMemory, aligned
from engine.devices.memory_budget import MemoryBudget, MemoryWatch, Room

_log = logging.getLogger(__name__)

HEADROOM_BYTES = 2**30
"""Bytes left to the driver, torch's workspaces and the desktop."""
_WITHOUT_DISPLAY_BYTES = 3 * 2**28
_DESKTOP_BYTES = 2**31
_WORTH_BYTES = 2**28
"""Less than this in RAM is no sign that the system moved it there."""


@dataclass(frozen=True)
class CardKind:
    """What differs between kinds of cards.

    Attributes:
        name: torch's for devices of the kind, and in `--device`.
        torch: torch's module of the kind, `torch.cuda` or `torch.xpu`, which have the same names for the same things.
        host_memory: memory that a card's copies are fast from.
        identity: of the card with this index, its driver and its link: what measured times depend on.
        captures: starts captures of graphs on a card; None if decode steps are not captured.
        shows_desktop: whether the card of this index drives a display; None if that is not known.
        in_ram: returns a function that counts bytes of this process that belong on the card of this index, or may be
            read by it, and lie in RAM; None if the system cannot move them there, or does not say.
        is_built: whether the installed torch knows the kind.
        variables: of the environment, by which cards are hidden from programs.
        opens: the card of an index with a memory budget, where that is done in another way.
        is_automatic: whether models run on such cards unless told otherwise.
    """

    name: str
    torch: Any
    host_memory: Callable[[torch.device], HostMemory]
    identity: Callable[[int], str]
    captures: Callable[[torch.device], Callable[[], Capture]] | None = None
    shows_desktop: Callable[[int], bool | None] = lambda _index: None
    in_ram: Callable[[int], Callable[[], int | None] | None] = lambda _index: None
    is_built: Callable[[], bool] = lambda: True
    variables: tuple[str, ...] = ()
    opens: Callable[[CardKind, int, int | None], Device] | None = None
    is_automatic: bool = True

    def count(self) -> int:
        """Number of cards that torch can use."""
        try:
            return int(self.torch.device_count()) if self.torch.is_available() else 0
        except RuntimeError as error:  # a driver that breaks when it is asked
            _log.warning("torch cannot count the cards of the kind %s: %s", self.name, error)
            return 0

    def hidden(self) -> str:
        """Why torch sees no card, as a sentence, if a variable of the environment decides that; else empty."""
        if not self.is_built() or self.count():
            return ""
        said = next(((name, os.environ[name]) for name in self.variables if name in os.environ), None)
        if said is None:
            return ""
        return (
            f"The variable {said[0]} is {said[1]!r}, which shows this program no graphics card: remove it to use one."
        )


def reserve_bytes(total: int, free: int, *, shows_desktop: bool | None) -> int:
    """Bytes of a card to leave to its driver, torch's workspaces and the desktop.

    A desktop that holds much at the start will want more: a quarter of it, up to half a gibibyte, comes on top.

    Args:
        total, free: bytes of the card before anything is allocated.
        shows_desktop: whether it drives a display; None is taken for yes.
    """
    if shows_desktop is False:
        return min(_WITHOUT_DISPLAY_BYTES, total // 8)
    return HEADROOM_BYTES + min(max(0, total - free), _DESKTOP_BYTES) // 4


def hard_fraction(budget: int, total: int, reserve: int = HEADROOM_BYTES) -> float:
    """The part of a card's memory beyond which torch refuses to allocate, so that nothing spills into RAM: the budget,
    and half of what is left to others, for torch's own workspaces."""
    return min(1.0, (budget + reserve // 2) / max(total, 1))


def open_card(kind: CardKind, index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens a card.

    Args:
        vram_bytes: memory budget; None: all free memory except `reserve_bytes`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if there is no such card, or it does not respond.
    """
    cards = kind.torch
    if index >= (count := kind.count()):
        what = f"no graphics card number {index}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            kind.hidden() or f"This machine has {what}: use cpu, or run `switchyard doctor`.",
        )
    if kind.opens is not None:
        return kind.opens(kind, index, vram_bytes)
    name = f"{kind.name}:{index}"
    place = torch.device(kind.name, index)
    try:
        cards.empty_cache()  # what torch still holds of a model that is gone is free
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
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"Graphics card {name} does not respond ({text}): restart the computer or use --device cpu."
        if is_out_of_memory(error):
            why = f"Graphics card {name} has no memory left: close other programs that use it, or use --device cpu."
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, why) from error
    reserve = reserve_bytes(total, free, shows_desktop=kind.shows_desktop(index))
    usable = max(0, free - reserve)
    budget = usable if vram_bytes is None else min(usable, vram_bytes)

    def enforce(nbytes: int) -> None:
        cards.set_per_process_memory_fraction(hard_fraction(nbytes, total, reserve), place)

    enforce(budget)
    log = CopyLog()
    kinds = (CardStream, RelayedStream, CardStream, CardStream)
    streams = tuple(
        made(f"{name} {role}", queue, cards, clock, log) for made, role, queue in zip(kinds, ROLES, queues, strict=True)
    )
    host = kind.host_memory(place)

    def allocate(nbytes: int) -> torch.Tensor:
        memory = aligned(nbytes, place)
        # torch may return memory that its current stream still uses, while other streams will write to it.
        cards.current_stream(place).synchronize()
        return memory

    count_in_ram = kind.in_ram(index)
    at_start = (count_in_ram() or 0) if count_in_ram is not None else 0

    def room() -> Room:
        in_ram = None if count_in_ram is None else count_in_ram()
        # Pinned memory counts as the card's, but is meant to be in RAM.
        spilled = 0 if in_ram is None else in_ram - at_start - host.pinned_bytes
        spilled = spilled if spilled > _WORTH_BYTES else 0
        free, _ = cards.mem_get_info(place)
        if spilled or free < reserve // 4:  # what torch keeps for later is of use to others now
            cards.empty_cache()
            free, _ = cards.mem_get_info(place)
        return Room(int(free), spilled)

    def close() -> None:
        for stream in streams:
            stream.close()
        host.close()

    memory = MemoryBudget(name, budget, allocate)
    return Device(
        name=name,
        torch_device=place,
        memory=memory,
        host_memory=host,
        streams=streams,
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        new_capture=new_capture,
        watch=MemoryWatch(memory, room, reserve, enforce),
        identity=kind.identity(index),
    )
