"""Graphics cards to choose for a plan: those whose figures come with the program, found by a few letters."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from engine.common.errors import EngineError, ErrorCode
from engine.common.profile_file import best_match, near_names
from engine.hardware.assumptions import assumed_link, data_sheets
from engine.hardware.machine import HardwareProfile, machine_names, read_machine

_GIB = 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb|gib|g)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CardChoice:
    """A card to choose: `NVIDIA GeForce RTX 3060, 12 GB`, and a machine that has it."""

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
            shown = f"{count}{machine.gpu.name}, {machine.gpu.memory_bytes / _GIB:g} GB"
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
