"""Reference curves: the LRU hit ratio of every cache size in one pass, and Belady's optimum."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from engine.experts.replay.trace_file import RoutingTrace


def stack_distances(trace: RoutingTrace, *, per_layer: bool) -> NDArray[np.int64]:
    """How many accesses found their expert at each LRU stack distance (Mattson et al. 1970).

    An LRU cache of c slots hits exactly the accesses of distance < c, so the cumulative sum is the hit count of
    every size at once.  The experts of one token and layer are looked up together, before any of them moves up.

    Args:
        per_layer: distances within each layer's own stack (N x M caches of equal ways); else one global stack.

    Returns:
        int64 [d + 1]: counts for distances 0..d-1, then the accesses never seen before (cold), where d is the
        number of experts that one stack can hold.
    """
    tokens, layers, k = trace.experts.shape
    universe = trace.num_experts * (1 if per_layer else layers)
    counts = np.zeros(universe + 1, np.int64)
    stacks = layers if per_layer else 1
    last_use = np.zeros((stacks, universe), np.int64)
    clock = 0
    order = np.arange(k, 0, -1)
    for token in range(tokens):
        for layer in range(layers):
            ids = trace.experts[token, layer].astype(np.int64)
            ids = ids[ids >= 0]
            if not per_layer:
                ids = ids + layer * trace.num_experts
            uses = last_use[layer if per_layer else 0]
            mine = uses[ids]
            distances = np.count_nonzero(uses[None, :] > mine[:, None], axis=1)
            np.add.at(counts, np.where(mine == 0, universe, distances), 1)
            # The router's first choice was used last: it stays on top of the stack.
            uses[ids] = clock + order[: len(ids)]
            clock += k
    return counts


def hit_ratio_curve(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Hit ratio of LRU caches of 0, 1, 2, ... slots from `stack_distances`."""
    hits = np.concatenate(([0], np.cumsum(counts[:-1])))
    return np.asarray(hits / counts.sum())


def belady_hits(trace: RoutingTrace, slots: int, *, per_layer: bool) -> NDArray[np.int64]:
    """Maximum hits of any cache, per layer: evicts the expert with the farthest next use, or does not insert.

    Args:
        slots: size of each layer's own cache, or of the one global cache.

    Returns:
        int64 [layers].
    """
    hits = np.zeros(trace.layers, np.int64)
    if slots <= 0:
        return hits
    if per_layer:
        for layer in range(trace.layers):
            hits[layer] = _belady(trace.experts[:, layer : layer + 1], trace.num_experts, slots).sum()
        return hits
    return _belady(trace.experts, trace.num_experts, slots)


def _belady(experts: NDArray[np.int16], num_experts: int, slots: int) -> NDArray[np.int64]:
    tokens, layers, _ = experts.shape
    keys = experts.astype(np.int64) + np.arange(layers)[None, :, None] * num_experts
    keys[experts < 0] = -1
    steps = [[key for key in step if key >= 0] for step in keys.reshape(tokens * layers, -1).tolist()]
    never = len(steps)
    next_use: list[list[int]] = [[]] * len(steps)
    upcoming: dict[int, int] = {}
    for step in range(len(steps) - 1, -1, -1):
        next_use[step] = [upcoming.get(key, never) for key in steps[step]]
        for key in steps[step]:
            upcoming[key] = step
    hits = np.zeros(layers, np.int64)
    resident: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    for step in range(len(steps)):
        for key, following in zip(steps[step], next_use[step], strict=True):
            hits[step % layers] += key in resident
            resident[key] = following
            heapq.heappush(farthest, (-following, key))
        while len(resident) > slots:
            negated, key = heapq.heappop(farthest)
            if resident.get(key) == -negated:
                del resident[key]
    return hits
