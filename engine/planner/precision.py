"""The rule of `auto` precision: the best quality that is not much slower than a lower one.

Callers that know speeds, predicted or measured, use `worthwhile`.  Before a model is loaded no speeds are known; then
the slowest memory that a token may wait for stands in for speed (`best_in_reach`), because it matters more than any
precision does.  Checkpoints are in bf16; int8 costs little of a model's quality (perplexity of the starter: no
measurable change on WikiText-2, 0.1% on chats, 0.8% on code) and int4 costs more.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from engine.formats import FORMATS, LADDER, STORED


class Reach(IntEnum):
    """The slowest memory that a token may have to wait for, the fastest first."""

    DEVICE = 0
    """Dense weights are on a device, experts there or in RAM."""
    RAM = 1
    """The CPU computes everything, from RAM."""
    DISK = 2
    """Experts are read from disk when needed."""


def worthwhile(speeds: Mapping[str, float]) -> str | None:
    """The precision to run in, given the speed of each: the best quality that is not much slower than a lower one.

    Args:
        speeds: by precision, of those that fit.
    """
    taken: str | None = None
    for precision in (STORED, *LADDER):
        worth = FORMATS[precision].worth
        if precision in speeds and (taken is None or speeds[precision] > worth * speeds[taken]):
            taken = precision
    return taken


def best_in_reach(reach: Mapping[str, Reach]) -> str | None:
    """The same without known speeds: the best quality among those that wait for the fastest memory.

    If all of them wait for the disk, the one with the fewest bytes.

    Args:
        reach: by precision, of those that fit.
    """
    nearest = min(reach.values(), default=Reach.DISK)
    if nearest is Reach.DISK:
        return next((precision for precision in reversed((STORED, *LADDER)) if precision in reach), None)
    return worthwhile({precision: 1.0 for precision, found in reach.items() if found is nearest})
