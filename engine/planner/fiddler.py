"""Fiddler's decisions: where to compute one expert, and how often a static placement hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.planner.costs import Costs


def runs_on_cpu(costs: Costs, rows: int, *, pinned: bool = True) -> bool:
    """Algorithm 1 for an expert that is not on the card: cpu_lat(s) <= gpu_lat(s) + transfer_lat."""
    return costs.cpu_experts(rows) <= costs.gpu_experts(rows) + costs.transfer_expert(pinned=pinned)


def break_even_rows(costs: Costs, *, at_most: int = 1 << 16) -> int:
    """The most rows for which the CPU is still faster; 0 if it never is."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if runs_on_cpu(costs, middle) else (low, middle - 1)
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
