"""Synthetic routing: which experts each token uses, skewed and correlated in time like published measurements.

An expert's popularity within its layer is log-normal; experts of the previous token are more likely to be drawn.  The
defaults reproduce the measurements on Mixtral 8x7B of Fiddler (appendix C: standard deviation 0.11 of the mean) and
CPU-GPU Collaborative (section II-B: in 40-60% of the cases the next token reuses at least one of two experts).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
