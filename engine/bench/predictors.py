"""Two papers' predictors of experts on routing that was recorded: Klotski's correlation table, DuoServe-MoE's network.

The routing is that of another model than theirs: 17 answers of gpt-oss-20b, which uses 4 of 32 experts where Mixtral
uses 2 of 8 (`resources/routing`).  Tables and networks learn from some answers and are asked about the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from engine.common.paths import resources_dir
from engine.experts.prediction.mlp import WIDTHS, TrainedMlp, paths, train
from engine.experts.prediction.predictors import BatchCorrelation, Correlation
from engine.experts.replay import RoutingTrace, read_trace
from engine.planner.papers import REPLAYED, PublishedCell, duoserve, klotski

_WARM_UP_ANSWERS = 8
"""Klotski counts its table over a batch of eight sequences first (section 8)."""
_SWEEP_TOKENS = 64
"""Its largest batch."""
_ALONE_TOKENS = 400
_OTHER_MODEL = "recorded routing of gpt-oss-20b, 4 of 32 experts; published: Mixtral's, 2 of 8"


def recorded_trace() -> RoutingTrace:
    """The routing that is packaged."""
    return read_trace(resources_dir() / "routing" / "gpt-oss-20b.npz")


def answers(trace: RoutingTrace, first: int, last: int | None = None) -> RoutingTrace:
    starts = trace.sequence_starts[first : None if last is None else last + 1]
    part = slice(int(starts[0]), int(starts[-1]))
    return RoutingTrace(trace.experts[part], trace.weights[part], starts - starts[0], trace.num_experts)


def table_rows(trace: RoutingTrace) -> Iterator[PublishedCell]:
    """What Klotski's table of path length 1, counted in a warm-up and then on, reaches; and what its paper says."""
    known, asked = answers(trace, 0, _WARM_UP_ANSWERS), answers(trace, _WARM_UP_ANSWERS)
    table = BatchCorrelation(trace.layers, trace.num_experts)
    for sweep in _sweeps(known):
        for layer in range(trace.layers):
            table.observe(layer, sweep[:, layer])
    right, used = [], []
    for sweep in _sweeps(asked):
        for layer in range(trace.layers):
            hot = table.hot(layer, trace.per_token)
            counts = np.bincount(sweep[:, layer].ravel(), minlength=trace.num_experts)
            hottest = np.argsort(-counts, kind="stable")[: trace.per_token]
            right.append(len(set(hot) & set(hottest.tolist())) / trace.per_token)
            used.append(sum(counts[expert] > 0 for expert in hot) / trace.per_token)
            table.observe(layer, sweep[:, layer])
    for cell, published, shares in (
        ("used", klotski.USED, used),
        ("hot ones right", klotski.HOT_RIGHT, right),
        ("right for one sequence alone", klotski.ALONE_RIGHT, _alone(known, asked)),
    ):
        of, mean = (klotski.PAPER, "fig. 13: prefetched experts", cell), 100 * statistics.fmean(shares)
        yield PublishedCell(*of, published, mean, "%", REPLAYED, note=_OTHER_MODEL)


def _sweeps(trace: RoutingTrace) -> Iterator[NDArray[np.int64]]:
    """Tokens of all answers together, [tokens, layers, k], their first ones first."""
    place = np.concatenate([np.arange(end - start) for start, end in pairwise(trace.sequence_starts)])
    order = np.argsort(place, kind="stable")
    for first in range(0, max(1, len(order) - _SWEEP_TOKENS + 1), _SWEEP_TOKENS):
        yield trace.experts[order[first : first + _SWEEP_TOKENS]].astype(np.int64)


def _alone(known: RoutingTrace, asked: RoutingTrace) -> list[float]:
    """Of the experts predicted for one token, how many it chose."""
    table = Correlation(asked.layers, asked.num_experts, asked.per_token, trace=known)
    right = []
    for token in asked.experts[:_ALONE_TOKENS].tolist():
        for layer, chosen in enumerate(token):
            if layer:
                predicted = {expert for expert, _ in table.predict(layer)}
                right.append(len(predicted & set(chosen)) / asked.per_token)
            table.observe(layer, chosen, None)
    return right


def network_rows(trace: RoutingTrace, *, widths: Sequence[int] = WIDTHS, epochs: int = 5) -> Iterator[PublishedCell]:
    """What DuoServe-MoE's network reaches: popularity, affinity and the path so far in, the next layer's experts out
    (eqs. 2 to 6); and what its paper says.  Training takes a minute or more.
    """
    trained = train(answers(trace, 0, _WARM_UP_ANSWERS), distance=1, widths=widths, epochs=epochs)
    right = rights(trained, answers(trace, _WARM_UP_ANSWERS).experts[:_ALONE_TOKENS])
    every = float((right == trace.per_token).float().mean())
    why = "all four of 32 have to be right, not both of 8: by chance one in 35,960, not one in 28"
    for cell, published, share, because in (
        ("all right", duoserve.ALL_RIGHT, every, why),
        ("at least one right", duoserve.ONE_RIGHT, float((right > 0).float().mean()), ""),
    ):
        of = duoserve.PAPER, "3: predictor, replayed", cell
        yield PublishedCell(*of, published, 100 * share, "%", REPLAYED, note=_OTHER_MODEL, why=because)


@torch.no_grad()
def rights(trained: TrainedMlp, tokens: NDArray[np.int16]) -> torch.Tensor:
    """Predicts as many experts as a token chooses; how many are right, in each layer after the first: [(L - 1) * T]."""
    chosen, experts = torch.from_numpy(tokens.astype(np.int64)), trained.statistics.experts
    found = []
    for layer in range(chosen.shape[1] - 1):
        last = torch.full((len(chosen),), layer)
        state = trained.statistics.surroundings(last, chosen[:, layer])
        best = trained.model(paths(chosen, last, experts), state).topk(chosen.shape[2]).indices
        found.append((best[:, :, None] == chosen[:, layer + 1, None, :]).any(2).sum(1))
    return torch.cat(found)
