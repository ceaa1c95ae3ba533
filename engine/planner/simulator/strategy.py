"""How one request's experts are stored and how misses are served: one description per published schedule.

Which experts each token uses is synthetic: skewed, and correlated in time like published measurements. An expert's
popularity within its layer is log-normal; experts of the previous token are more likely to be drawn.  The defaults
reproduce the measurements on Mixtral 8x7B of Fiddler (appendix C: standard deviation 0.11 of the mean) and CPU-GPU
Collaborative (section II-B: in 40-60% of the cases the next token reuses at least one of two experts).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from engine.planner.plan_parts import indexes


class Residency(StrEnum):
    """Which experts are on the card initially."""

    NONE = "none"
    STATIC = "static"  # the most popular ones, permanently (Fiddler)
    LAYERS = "layers"  # all of the first layers with their attention; the other layers on the CPU (llama.cpp)
    CACHE = "cache"  # N indexes x M ways, LRU, post-fetched (CPU-GPU Collaborative)


class Miss(StrEnum):
    """Where an expert that is not on the card is computed."""

    CPU = "cpu"
    FETCH = "fetch"  # on the card, once it has arrived
    CHEAPER = "cheaper"  # wherever this expert alone finishes first (Fiddler's Algorithm 1)
    MIXED = "mixed"  # CPU and link at once, split so that both finish together


class Prefetch(StrEnum):
    """What is fetched before its router has run."""

    NONE = "none"
    PREDICTED = "predicted"  # the next layer's experts as predicted (DuoServe)
    IDEAL = "ideal"  # exactly the next layer's experts
    LAYER = "layer"  # all of the next layer's experts


@dataclass(frozen=True, slots=True)
class Strategy:
    """A schedule of single requests.

    Attributes:
        name: of the policy.
        residency, miss, prefetch: see these enumerations.
        pinned: whether weights are in pinned memory.
        overlapped: whether copying one expert may overlap computing another one within a layer.
        prefetch_accuracy: share of the predicted experts that are right.
        prefill_fetches: prefill fetches every miss to the card, whatever `miss` says.
        grouped: one kernel call per layer computes the experts on the card.
        host_only: the CPU computes everything; the card is unused.
        waits_for_arrival: an expert in transfer counts as cached and is waited for; else it is a miss.
    """

    name: str
    residency: Residency = Residency.NONE
    miss: Miss = Miss.FETCH
    prefetch: Prefetch = Prefetch.NONE
    pinned: bool = True
    overlapped: bool = True
    prefetch_accuracy: float = 1.0
    prefill_fetches: bool = False
    grouped: bool = False
    host_only: bool = False
    waits_for_arrival: bool = False


ON_DEMAND = Strategy("on-demand", overlapped=False, pinned=False)
WHOLE_LAYER = Strategy("whole-layer prefetch", prefetch=Prefetch.LAYER)
IDEAL_PREFETCH = Strategy("ideal prefetch", prefetch=Prefetch.IDEAL)
"""An upper bound rather than a schedule: a layer's experts are unknown until its router has run."""
CPU_ONLY = Strategy("CPU experts", miss=Miss.CPU)
HOST_ONLY = Strategy("CPU only", Residency.LAYERS, Miss.CPU, host_only=True)
STATIC_SPLIT = Strategy("static layer split", Residency.LAYERS, Miss.CPU)
FIDDLER = Strategy("Fiddler", Residency.STATIC, Miss.CHEAPER)
COLLABORATIVE = Strategy("CPU-GPU collaborative", Residency.CACHE, Miss.CPU, waits_for_arrival=True)
DUOSERVE = Strategy("DuoServe-MoE", prefetch=Prefetch.PREDICTED, prefetch_accuracy=0.78, prefill_fetches=True)
SWITCHYARD = Strategy("Switchyard mixed", Residency.CACHE, Miss.MIXED, grouped=True)
SWITCHYARD_CPU = Strategy("Switchyard, misses on the CPU", Residency.CACHE, Miss.CPU, grouped=True)
SWITCHYARD_STATIC = Strategy("Switchyard mixed, static", Residency.STATIC, Miss.MIXED, grouped=True)
SWITCHYARD_PREFETCH = Strategy(
    "Switchyard mixed, predicted",
    Residency.STATIC,
    Miss.MIXED,
    Prefetch.PREDICTED,
    prefetch_accuracy=0.85,
    prefill_fetches=True,
    grouped=True,
)

PUBLISHED = (
    ON_DEMAND,
    WHOLE_LAYER,
    HOST_ONLY,
    CPU_ONLY,
    STATIC_SPLIT,
    FIDDLER,
    COLLABORATIVE,
    DUOSERVE,
)
"""Published strategies."""
OWN = (SWITCHYARD, SWITCHYARD_CPU, SWITCHYARD_STATIC, SWITCHYARD_PREFETCH)
"""Switchyard's own strategies."""


class SimulatedResidents:
    """State of the card's expert slots.

    Each layer has its own set, least recently used first, with each expert's arrival time.

    Args:
        shares: popularity, [layers, experts].
        slots: experts that fit on the card.
        ways: ways of each index of a cache.
    """

    def __init__(self, residency: Residency, shares: NDArray[np.float64], slots: int, ways: int) -> None:
        layers, experts = shares.shape
        self.capacity = [0] * layers
        self.changes = residency is Residency.CACHE
        chosen: list[list[int]] = [[] for _ in range(layers)]
        if residency is Residency.LAYERS:
            for layer in range(min(slots // experts, layers)):
                chosen[layer] = list(range(experts))
        elif residency is Residency.STATIC:
            order = np.argsort(-shares, axis=None, kind="stable")[:slots]
            for index in order:
                chosen[int(index) // experts].append(int(index) % experts)
        elif residency is Residency.CACHE:
            for layer in range(indexes(slots, ways, layers)):
                chosen[layer] = [int(expert) for expert in np.argsort(shares[layer], kind="stable")[-ways:]]
        self.arrivals: list[OrderedDict[int, float]] = [OrderedDict.fromkeys(ids, 0.0) for ids in chosen]
        self.capacity = [len(ids) for ids in chosen]

    def arrival(self, layer: int, expert: int) -> float | None:
        """When it arrived or will arrive; None if it is neither on the card nor in transfer."""
        return self.arrivals[layer].get(expert)

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        """Marks these experts as just used."""
        held = self.arrivals[layer]
        for expert in experts:
            if expert in held:
                held.move_to_end(expert)

    def can_admit(self, layer: int, in_use: Container[int], now: float) -> bool:
        """Whether the layer has an expert that can be evicted: neither in use nor in transfer."""
        if not self.changes or not self.capacity[layer]:
            return False
        return any(expert not in in_use and there <= now for expert, there in self.arrivals[layer].items())

    def admit(self, layer: int, expert: int, arrival: float, in_use: Container[int], now: float) -> None:
        """Replaces the least recently used expert that is neither in use nor in transfer."""
        held = self.arrivals[layer]
        leaving = next(other for other, there in held.items() if other not in in_use and there <= now)
        del held[leaving]
        held[expert] = arrival


@dataclass(frozen=True, slots=True)
class RoutingSkew:
    """How skewed and how persistent routing is.

    Attributes:
        skew: standard deviation of the logarithm of an expert's popularity.
        stickiness: factor by which an expert of the previous token is more likely.
        seed: seed of the random numbers; the same seed gives the same routing on every machine.
    """

    skew: float = 0.11
    stickiness: float = 1.6
    seed: int = 1


PUBLISHED_STATISTICS = RoutingSkew()
"""Matches the published statistics of Mixtral 8x7B."""
FINE_STATISTICS = RoutingSkew(skew=1.0, stickiness=3.0)
"""Of models with many small experts, between the published ones and the strongest: with slots for a quarter of 128
experts, a least-recently-used cache then hits 54% (of 32 experts 55%)."""
STRONGEST_STATISTICS = RoutingSkew(skew=1.5, stickiness=5.0)
"""About as in recorded answers of gpt-oss-20b and Qwen3-30B-A3B, where the same cache hit 65% and 78%."""
_FEW_EXPERTS = 16


def expected_statistics(experts: int) -> RoutingSkew:
    """What to expect of a model whose routing nobody has recorded, by the experts of a layer."""
    return PUBLISHED_STATISTICS if experts <= _FEW_EXPERTS else FINE_STATISTICS


@functools.lru_cache(maxsize=64)
def popularity(layers: int, experts: int, statistics: RoutingSkew) -> NDArray[np.float64]:
    """Share of each expert in its layer's uses, [layers, experts]; rows sum to 1."""
    random = np.random.default_rng(statistics.seed)
    weights = np.exp(statistics.skew * random.standard_normal((layers, experts)))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@functools.lru_cache(maxsize=16)
def routing(
    layers: int, experts: int, per_token: int, tokens: int, statistics: RoutingSkew, *, streams: int = 1
) -> NDArray[np.int16]:
    """Experts of each token, int16 [tokens, layers, streams, per_token]; each stream is a separate sequence."""
    logarithms = np.log(popularity(layers, experts, statistics))[:, None, :]
    random = np.random.default_rng([statistics.seed, 1])
    chosen = np.empty((tokens, layers, streams, per_token), np.int16)
    bonus = np.zeros((layers, streams, experts))
    for token in range(tokens):
        # Gumbel's trick: the k largest of log p + noise are k draws without replacement.
        scores = logarithms + bonus + random.gumbel(size=(layers, streams, experts))
        best = np.argpartition(-scores, per_token - 1, axis=2)[:, :, :per_token]
        chosen[token] = best
        bonus[:] = 0.0
        np.put_along_axis(bonus, best, np.log(statistics.stickiness), axis=2)
    return chosen


def expected_counts(shares: NDArray[np.float64], tokens: int, per_token: int) -> list[tuple[int, int]]:
    """(expert, rows) of a layer for many tokens at once, most used first; about tokens x per_token rows."""
    counts = np.maximum(np.rint(shares * tokens * per_token), 0).astype(int)
    order = np.argsort(-counts, kind="stable")
    return [(int(expert), int(counts[expert])) for expert in order if counts[expert] > 0]
