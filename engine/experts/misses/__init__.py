"""Ways to meet a miss: a way is one file here and its line in `WAYS`."""

from __future__ import annotations

from engine.experts.misses.fetched import Fetched
from engine.experts.misses.on_cpu import OnCpu
from engine.experts.misses.way import ExpertLayer, Way

WAYS: list[type[Way]] = [OnCpu, Fetched]
"""All that there are.  The first is always possible, and meets what no other can."""

MIXED = "mixed"
"""Each miss in the way that ends the layer first, as the latencies say that were measured."""
CACHE_OFF = "off"
"""As mixed, but everything is a miss, and nothing is kept."""


def modes() -> list[str]:
    """How misses may be met.  All but `MIXED` are for measurements and tests: one way alone, or no cache."""
    return [MIXED, *(way.name for way in WAYS), CACHE_OFF]


def ways_of(mode: str, layer: ExpertLayer) -> tuple[Way, list[Way]]:
    """The way that is always possible, and those that a layer's misses are met in.

    Raises:
        ValueError: for an unknown mode.
    """
    if mode not in modes():
        raise ValueError(f"misses cannot be met by {mode!r}; there are {', '.join(modes())}")
    made = [way(layer) for way in WAYS]
    return made[0], [way for way in made if mode in (MIXED, CACHE_OFF, way.name)]
