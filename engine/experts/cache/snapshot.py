"""One moment of a cache of experts, for whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.experts.cache.policies import Key


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Who is where, and who decides.

    Attributes:
        residents, arriving: keys.
        slots: places for experts.
        policy: that decides now; is_adaptive: chosen while running.
        shadows: what each candidate would have hit recently; empty unless adaptive.
    """

    residents: list[Key]
    arriving: list[Key]
    slots: int
    policy: str
    is_adaptive: bool
    shadows: Mapping[str, float]
