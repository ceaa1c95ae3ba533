"""Recorded expert routing on disk: which experts each token chose in each layer.

A trace is an `.npz` holding `experts` int16 [tokens, layers, k] (ids in the router's order, -1 where a layer did not
run for a token, as in the last layer of a prompt), `weights` float16 of the same shape, `sequence_starts` int64
(token index at which each sequence begins; the last entry is the token count) and `num_experts`.
No pickle is ever loaded.

Replayed through caches of a given policy and size, it has two reference curves: the LRU hit ratio of every size in one
pass, and Belady's optimum.
"""

from __future__ import annotations

import heapq
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile
from engine.common.untrusted import open_untrusted
from engine.experts.cache.policies import Key, Pool, make_policy
from engine.experts.cache.tier import PolicySelector, step_pool

_MOST_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Routing of consecutive tokens.

    Attributes:
        experts: int [tokens, layers, k]; -1 where the layer did not run.
        weights: float [tokens, layers, k].
        sequence_starts: token index where each sequence begins; the last entry is the number of tokens.
        num_experts: experts per layer.
        prefill_tokens: how many tokens at the front were a prompt, processed at once rather than one by one.
    """

    experts: NDArray[np.int16]
    weights: NDArray[np.float16]
    sequence_starts: NDArray[np.int64]
    num_experts: int
    prefill_tokens: int = 0

    @property
    def tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def accesses(self) -> int:
        """Uses of an expert by a token: the denominator of hit rates."""
        return int(np.count_nonzero(self.experts >= 0))

    @property
    def per_token(self) -> int:
        return int(self.experts.shape[2])


def read_trace(path: Path) -> RoutingTrace:
    """The trace in `path`.

    Raises:
        EngineError: `INVALID_REQUEST`, the file is missing, damaged or not a routing trace.
    """
    try:
        # Opened here because numpy leaks the file if it is not an archive.
        with open_untrusted(path) as file, np.load(file, allow_pickle=False) as arrays:
            if sum(part.file_size for part in arrays.zip.infolist()) > _MOST_BYTES:
                raise ValueError(f"it unpacks to more than {_MOST_BYTES // 2**30} GiB")
            experts = np.ascontiguousarray(arrays["experts"])
            weights = arrays["weights"] if "weights" in arrays else np.zeros(experts.shape, np.float16)
            starts = arrays["sequence_starts"] if "sequence_starts" in arrays else np.array([0, len(experts)])
            trace = RoutingTrace(
                experts,
                weights,
                starts.astype(np.int64),
                int(arrays["num_experts"]),
                int(arrays["prefill_tokens"]) if "prefill_tokens" in arrays else 0,
            )
    except FileNotFoundError:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no routing trace at {path}.") from None
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} is not a routing trace ({error}).",
        ) from error
    _check(trace, path)
    return trace


def write_trace(trace: RoutingTrace, path: Path) -> None:
    """Writes `trace` to `path` atomically."""
    with NewFile(path) as new:
        with new.path.open("wb") as file:
            np.savez_compressed(
                file,
                experts=trace.experts.astype(np.int16),
                weights=trace.weights.astype(np.float16),
                sequence_starts=trace.sequence_starts.astype(np.int64),
                num_experts=np.int64(trace.num_experts),
                prefill_tokens=np.int64(trace.prefill_tokens),
            )
        new.take_place()


def _check(trace: RoutingTrace, path: Path) -> None:
    def refuse(why: str) -> EngineError:
        return EngineError(ErrorCode.INVALID_REQUEST, f"{path} is not a usable routing trace: {why}.")

    if trace.experts.ndim != 3 or not np.issubdtype(trace.experts.dtype, np.integer):
        raise refuse("`experts` must be integers of shape [tokens, layers, k]")
    if trace.weights.shape != trace.experts.shape:
        raise refuse("`weights` and `experts` differ in shape")
    if trace.experts.size == 0:
        raise refuse("it holds no tokens")
    if trace.experts.min() < -1 or trace.experts.max() >= trace.num_experts:
        raise refuse(f"an expert id lies outside -1..{trace.num_experts - 1}")
    starts = trace.sequence_starts
    if starts.ndim != 1 or len(starts) < 2 or starts[-1] != trace.tokens or (np.diff(starts) < 0).any():
        raise refuse("`sequence_starts` does not rise from the first token to the token count")


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
