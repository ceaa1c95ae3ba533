"""Choosing the policy while running: every candidate is simulated on the live routing, and the best is adopted.

No single policy is right for all models: popularity that is static for one is useless for another.  A shadow is a
pool without bytes.  Adoption has hysteresis, because a change costs the residents that the new policy would not keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.experts.cache.policies import Key, Policy, make_policy
from engine.experts.cache.pool import Pool

CANDIDATES = ("lru", "lfru", "lfu", "fifo", "random")
"""Tried in this order when they are level: the first adapts fastest."""


@dataclass(slots=True)
class _Shadow:
    name: str
    pool: Pool
    hits: float = 0.0


def step_pool(pool: Pool, keys: Sequence[Key]) -> int:
    """One step of an idealised cache: look all keys up, then post-fetch the misses; returns the hits.

    A key used in this step is never evicted in it.
    """
    pinned: list[Key] = []
    missed: list[Key] = []
    for key in keys:
        if pool.use(key) is None:
            missed.append(key)
        else:
            pool.pin(key)
            pinned.append(key)
    hits = len(pinned)
    for key in missed:
        if pool.reserve(key) is not None:
            pool.arrived(key)
            pool.pin(key)
            pinned.append(key)
    for key in pinned:
        pool.unpin(key)
    return hits


class PolicySelector:
    """Shadow pools of every candidate policy for one real pool, and the verdict which to adopt.

    Args:
        capacity: slots of the real pool.
        candidates: names of the policies to simulate; the first is adopted at the start.
        popularity: of a calibration, which adds `static` to the candidates.
        half_life: accesses after which a hit counts half in the verdict.
        margin: how much better in hit rate a candidate must be to take over.
    """

    def __init__(
        self,
        capacity: int,
        candidates: Iterable[str] = CANDIDATES,
        popularity: Mapping[Key, float] | None = None,
        half_life: float | None = None,
        margin: float = 0.01,
    ) -> None:
        names = [*candidates, *(["static"] if popularity is not None else [])]
        self._shadows = [
            _Shadow(name, Pool(range(capacity), make_policy(name, capacity, popularity))) for name in names
        ]
        self._margin = margin
        self._decay = 2.0 ** (-1.0 / (half_life or max(64.0 * capacity, 2000.0)))
        self._accesses = 0.0
        self._patience = 4.0 * capacity
        self.adopted = names[0]

    def observe(self, keys: Sequence[Key]) -> Policy | None:
        """Feeds one step's experts to all shadows.

        Returns:
            The policy to adopt from now on, if that changes, else None.
        """
        fade = self._decay ** len(keys)
        self._accesses = self._accesses * fade + len(keys)
        for shadow in self._shadows:
            shadow.hits = shadow.hits * fade + step_pool(shadow.pool, keys)
        if self._accesses < self._patience:
            return None
        best = max(self._shadows, key=lambda shadow: shadow.hits)
        if best.name == self.adopted:
            return None
        mine = next(shadow for shadow in self._shadows if shadow.name == self.adopted)
        if best.hits - mine.hits < self._margin * self._accesses:
            return None
        self.adopted = best.name
        return best.pool.policy.heir()

    def hit_rates(self) -> dict[str, float]:
        """Recent hit rate of every candidate, had it decided alone."""
        return {shadow.name: shadow.hits / self._accesses if self._accesses else 0.0 for shadow in self._shadows}
