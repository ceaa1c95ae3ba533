"""Ways to serve a miss: each is one file here and an entry in `WAYS`."""

from __future__ import annotations

from engine.experts.misses.fetched import Fetched
from engine.experts.misses.on_cpu import OnCpu
from engine.experts.misses.way import ExpertLayer, Way

WAYS: list[type[Way]] = [OnCpu, Fetched]
"""All ways.  The first is always possible, and is the fallback for the others."""

MIXED = "mixed"
"""Each miss in the way that finishes the layer soonest, by measured latencies."""
CACHE_OFF = "off"
"""As mixed, but every lookup is a miss, and nothing is cached."""


def modes() -> list[str]:
    """Modes of serving misses.  All but `MIXED` are for measurements and tests: a single way, or no cache."""
    return [MIXED, *(way.name for way in WAYS), CACHE_OFF]


def ways_of(mode: str, layer: ExpertLayer) -> tuple[Way, list[Way]]:
    """The way that is always possible, and the ways that `mode` uses.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in modes():
        raise ValueError(f"unknown way to serve misses {mode!r}; choose one of {', '.join(modes())}")
    made = [way(layer) for way in WAYS]
    return made[0], [way for way in made if mode in (MIXED, CACHE_OFF, way.name)]
