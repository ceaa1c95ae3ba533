"""Fiddler's decisions: where to compute one expert, and how often a static placement hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.planner.costs import Costs


def break_even_rows(costs: Costs, *, at_most: int = 1 << 16) -> int:
    """The most rows for which the CPU is still faster; 0 if it never is."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if costs.prefers_cpu(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class HitRateBounds:
    """Hit rates of static placements of equal size: the most popular experts, the least popular, random ones."""

    best: float
    worst: float
    random: float


def hit_rate_bounds(popularity: Sequence[float], slots: int) -> HitRateBounds:
    """Bounds of a static placement of `slots` experts (appendix C)."""
    ranked = sorted(popularity)
    total = sum(ranked)
    slots = min(slots, len(ranked))
    return HitRateBounds(
        best=sum(ranked[len(ranked) - slots :]) / total,
        worst=sum(ranked[:slots]) / total,
        random=slots / len(ranked),
    )
