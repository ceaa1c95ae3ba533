"""Graphics cards to choose for a plan: those shipped with the program, and names typed by the user."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from engine.common.errors import EngineError, ErrorCode
from engine.hardware.assumptions import assumed_link, card_key, known_cards
from engine.hardware.machine import GpuProfile, HardwareProfile, machine_names, read_machine

_GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CardChoice:
    """A card to choose: `NVIDIA GeForce RTX 3060, 12 GB`, and a machine that has it."""

    name: str
    machine: HardwareProfile


@cache
def card_choices() -> tuple[CardChoice, ...]:
    """Every card of the shipped machine profiles, without duplicates, by name."""
    found: dict[str, CardChoice] = {}
    for name in machine_names():
        try:
            machine = read_machine(name)
        except EngineError:  # one broken file must not hide the others
            continue
        if machine.gpu is not None:
            count = f"{machine.gpu.count} × " if machine.gpu.count > 1 else ""
            shown = f"{count}{machine.gpu.name}, {machine.gpu.memory_bytes / _GIB:g} GB"
            found.setdefault(shown, CardChoice(shown, machine))
    return tuple(sorted(found.values(), key=lambda one: (one.machine.vram_bytes, one.name)))


def typed_card(text: str, base: HardwareProfile, vram_bytes: int | None) -> HardwareProfile:
    """The machine with the card typed by the user, such as `rtx 4070 12 gb`.

    Raises:
        EngineError: `INVALID_REQUEST`, the card or its memory size is unknown.
    """
    size = _SIZE.search(text)
    key = card_key(_SIZE.sub(" ", text))
    listed = [one for one in card_choices() if one.machine.gpu is not None and card_key(one.machine.gpu.name) == key]
    if listed and listed[0].machine.gpu is not None:
        machine = listed[0].machine
        return machine.with_memory(vram_bytes=round(float(size[1]) * _GIB)) if size else machine
    known = known_cards().get(key)
    if known is None:
        near = [one.name for one in card_choices() if key and key in card_key(one.name)][:3]
        hint = f" Did you mean {' or '.join(near)}?" if near else " Choose one from the list, or type its full name."
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no known card “{text.strip()}”.{hint}")
    memory = round(float(size[1]) * _GIB) if size else vram_bytes
    if not memory:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"How much memory does the {text.strip()} have? Set VRAM, or type it after the name.",
        )
    return replace(base, gpu=GpuProfile(_SIZE.sub("", text).strip(), memory, *known), link=assumed_link(None))
