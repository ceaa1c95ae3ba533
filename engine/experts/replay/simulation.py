"""Runs a recorded trace through caches of a given policy and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.experts.cache.policies import Key, make_policy
from engine.experts.cache.pool import Pool
from engine.experts.cache.selection import PolicySelector, step_pool
from engine.experts.replay.trace_file import RoutingTrace

ADOPTED = "adopted"
"""Name of the cache that adopts policies as the shadow simulators suggest."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of one cache on one trace.

    Attributes:
        policy, slots: of the cache; `slots` per layer if `per_layer`, else in total.
        hits, accesses: int64 [layers].
    """

    policy: str
    slots: int
    per_layer: bool
    hits: NDArray[np.int64]
    accesses: NDArray[np.int64]

    @property
    def hit_rate(self) -> float:
        return float(self.hits.sum() / max(int(self.accesses.sum()), 1))


def popularity_of(trace: RoutingTrace) -> dict[Key, float]:
    """How often each (layer, expert) is used in a trace: the calibration that static placement needs."""
    offsets = np.arange(trace.layers)[None, :, None] * trace.num_experts
    keys, counts = np.unique((trace.experts + offsets)[trace.experts >= 0], return_counts=True)
    return {int(key): float(count) for key, count in zip(keys, counts, strict=True)}


def replay(
    trace: RoutingTrace,
    policy: str,
    slots: int,
    *,
    per_layer: bool,
    popularity: Mapping[Key, float] | None = None,
    seed: int = 0,
) -> ReplayResult:
    """Runs the trace through one cache per layer, or one for all, assuming that every post-fetch arrives in time.

    Args:
        policy: a policy's name, or `ADOPTED`.
        slots: of each layer's cache if `per_layer`, else of the one cache.

    Raises:
        ValueError: unknown policy, or `static` without popularity.
    """
    pools: list[Pool] = []
    selectors: list[PolicySelector] = []
    for index in range(trace.layers if per_layer else 1):
        first = PolicySelector(slots).adopted if policy == ADOPTED else policy
        pools.append(Pool(range(slots), make_policy(first, slots, popularity, seed + index)))
        if policy == ADOPTED:
            selectors.append(PolicySelector(slots, popularity=popularity))
    hits = np.zeros(trace.layers, np.int64)
    accesses = np.zeros(trace.layers, np.int64)
    keys_of_step = trace.experts.astype(np.int64) + np.arange(trace.layers)[None, :, None] * trace.num_experts
    keys_of_step[trace.experts < 0] = -1
    for token in keys_of_step.tolist():
        for layer, step in enumerate(token):
            keys = [key for key in step if key >= 0]
            which = layer if per_layer else 0
            hits[layer] += step_pool(pools[which], keys)[0]
            accesses[layer] += len(keys)
            if selectors:
                better = selectors[which].observe(keys)
                if better is not None:
                    pools[which].adopt(better)
    return ReplayResult(policy, slots, per_layer, hits, accesses)
