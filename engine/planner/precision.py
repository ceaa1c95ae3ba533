"""The rule of `auto` precision: the best quality that is not much slower than less.

Whoever knows speeds, predicted or timed, goes by them (`worthwhile`).  Before a model is loaded none are known; then
the memory that a token has to wait for stands for its speed (`best_in_reach`), for that makes more of a difference
than any precision does.  bf16 is what checkpoints are in; int8 costs little of a model's quality (perplexity of the
starter: none that could be measured on WikiText-2, 0.1% on chats, 0.8% on code) and int4 more of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from engine.formats import FORMATS, LADDER


class Reach(IntEnum):
    """The farthest memory that a token may have to wait for, the nearest first."""

    DEVICE = 0
    """Dense weights are on a device, experts there or in RAM."""
    RAM = 1
    """The CPU computes everything, from RAM."""
    DISK = 2
    """Experts are read from disk as they are needed."""


def worthwhile(speeds: Mapping[str, float]) -> str | None:
    """The precision to run in, given how fast each would be: the best quality that is not much slower than less.

    Args:
        speeds: by precision, of those that are possible.
    """
    taken: str | None = None
    for precision in LADDER:
        worth = FORMATS[precision].worth
        if precision in speeds and (taken is None or speeds[precision] > worth * speeds[taken]):
            taken = precision
    return taken


def best_in_reach(reach: Mapping[str, Reach]) -> str | None:
    """The same where no speeds are known: the best quality of those that wait for the nearest memory.

    Where all of them wait for the disk, the one with the fewest bytes.

    Args:
        reach: by precision, of those that are possible.
    """
    nearest = min(reach.values(), default=Reach.DISK)
    if nearest is Reach.DISK:
        return next((precision for precision in reversed(LADDER) if precision in reach), None)
    return worthwhile({precision: 1.0 for precision, found in reach.items() if found is nearest})
