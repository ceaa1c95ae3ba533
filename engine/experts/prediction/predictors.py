"""Interface of predictors of the experts that later layers will need, and the predictors that need no training.

These are the layer's experts of the previous token; the later layer's own router, applied early, since hidden states
change little from layer to layer; and Klotski's expert correlation table (section 6.2), path length 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.experts.replay import RoutingTrace

Ranked = Sequence[tuple[int, float]]
"""(expert, probability that it will be needed), most probable first."""

Gate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's router: hidden states [T, H] -> (logits [T, E] of the routed experts, chosen experts [T, k]), where ids
from E on are of experts of other kinds, which have no records."""

_LEAST = 1e-6
_LARGEST = 1e30
"""Counts are rescaled above this, before fp32 overflows."""
_DECAY = 0.99
"""Decay of the counts per sweep."""


class Predictor(Protocol):
    """Predicts the experts of later layers from those of the layers so far.  Not thread-safe."""

    @property
    def name(self) -> str:
        """As in the engine's configuration."""
        ...

    @property
    def learns(self) -> bool:
        """Whether it learns from `observe`, and so should observe more steps than it predicts in."""
        ...

    @property
    def beside_s(self) -> float:
        """Seconds that one prediction takes on threads other than the caller's."""
        ...

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """A layer of a decode step has been routed.  Layers come in ascending order; a lower one starts the next step.

        Whole steps may be skipped, but not layers within an observed step.

        Args:
            experts: distinct, all that the step's tokens were routed to.
            hidden: [T, H], input of the experts; valid until after the next `predict`.
        """
        ...

    def predict(self, layer: int) -> Ranked:
        """Predicts the experts of the next occurrence of this layer.  Empty if it cannot."""
        ...


class PreviousToken:
    """Predicts the experts that the layer used last, those used in the most consecutive steps first."""

    name = "previous"
    learns = True
    beside_s = 0.0

    def __init__(self, layers: int) -> None:
        self._runs: list[dict[int, int]] = [{} for _ in range(layers)]

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        before = self._runs[layer].get
        self._runs[layer] = {expert: before(expert, 0) + 1 for expert in experts}

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`.  Probabilities only express the rank, and are not measured: 1/2, 3/4, 7/8..."""
        runs = sorted(self._runs[layer].items(), key=itemgetter(1), reverse=True)
        return [(expert, 1 - 0.5**run) for expert, run in runs]


class NextGate:
    """Applies the router of a later layer to the hidden states of this one.

    Args:
        gates: of each layer; None where the router cannot be called separately.
        limit: experts to predict for a token; for a step of several, which tries guessed tokens or serves rows, as many
            more as they choose more than one token does.
    """

    name = "gate"
    learns = False
    beside_s = 0.0

    def __init__(self, gates: Sequence[Gate | None], limit: int) -> None:
        self._gates = gates
        self._limit = limit
        self._layer = -1
        self._hidden: torch.Tensor | None = None

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        self._layer, self._hidden = layer, hidden

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`.  Probabilities express how far an expert is above or below the cut-off of the router."""
        if self._hidden is None or layer <= self._layer or (gate := self._gates[layer]) is None:
            return []
        logits, index = gate(self._hidden)
        chosen = {expert for expert in index.reshape(-1).tolist() if expert < logits.shape[-1]}
        limit = min(self._limit + max(0, len(chosen) - index.shape[-1]), logits.shape[-1])
        if logits.shape[0] > 1:
            logits = logits.amax(0, keepdim=True)  # needed if any of the tokens needs it
        values, order = logits.reshape(-1).topk(limit)
        width = min(len(chosen), limit)
        score = dict(zip(order.tolist(), values.tolist(), strict=True))
        highest = next(iter(score.values()))
        levels = list(score.values())
        edge = (levels[max(width, 1) - 1] + levels[width]) / 2 if width < limit else levels[-1]
        scale = max(highest - edge, 1e-6) / 4
        # A router may not choose by its logits alone (groups, a bias), so the experts it chose come first.
        ranked = {expert: (1.0 + _sigmoid((score.get(expert, edge) - edge) / scale)) / 2 for expert in chosen}
        for expert, level in score.items():
            if expert not in chosen:
                ranked[expert] = _sigmoid((level - edge) / scale) / 2
        return sorted(ranked.items(), key=itemgetter(1), reverse=True)[:limit]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -50 else 0.0


class Correlation:
    """Counts P(expert j in layer l + d | expert i in layer l) while running, for one distance d at a time.

    As in Klotski the counts start from a recorded run, if there is one, then follow the live routing, and are never
    saved.  The predictions from all chosen experts are averaged.

    Args:
        layers, experts: of the model (the most experts of any layer).
        limit: experts to predict.
        half_life: steps after which a count is halved.
        trace: counted before the first step.
    """

    name = "correlation"
    learns = True
    beside_s = 0.0

    def __init__(
        self,
        layers: int,
        experts: int,
        limit: int,
        half_life: float = 512.0,
        trace: RoutingTrace | None = None,
    ) -> None:
        self._layers, self._experts, self._limit = layers, experts, min(limit, experts)
        self._growth = 2.0 ** (1.0 / half_life)
        self._trace = trace
        self._last = -1
        self._chosen: list[Sequence[int]] = [()] * layers
        self._begin(1)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._pairs.nbytes

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        if layer <= self._last:
            self._end_step()
        self._last = layer
        self._chosen[layer] = experts

    def predict(self, layer: int) -> Ranked:
        if layer <= self._last:
            return []  # belongs to the next token, which the table does not cover
        if layer - self._last != self._distance:
            self._begin(layer - self._last)
        source = self._last
        if source < 0 or not self._chosen[source]:
            return []
        before = np.array(self._chosen[source], np.intp)
        shares = np.reciprocal(self._uses[source].take(before) * np.float32(len(before)))
        tendency: NDArray[np.float32] = shares @ self._pairs[source].take(before, 0)
        best = tendency.argpartition(-self._limit)[-self._limit :]
        values = tendency.take(best)
        order = values.argsort()[::-1]
        return list(zip(best.take(order).tolist(), values.take(order).tolist(), strict=True))

    def _begin(self, distance: int) -> None:
        """Starts a new table for this distance."""
        self._distance = distance
        self._gain = 1.0
        self._pairs: NDArray[np.float32] = np.zeros((self._layers, self._experts, self._experts), np.float32)
        # Starts at one, so that a pair seen once does not get probability 1.
        self._uses: NDArray[np.float32] = np.ones((self._layers, self._experts), np.float32)
        if self._trace is not None and self._trace.layers == self._layers:
            for token in self._trace.experts:
                self._count([[expert for expert in chosen if 0 <= expert < self._experts] for chosen in token.tolist()])

    def _end_step(self) -> None:
        """Counts the whole step at once, which is several times faster than layer by layer."""
        self._count(self._chosen)
        self._chosen = [()] * self._layers
        self._last = -1
        # Growing the gain of new counts is equivalent to decaying the old ones, without touching the table.
        self._gain *= self._growth
        if self._gain > _LARGEST:
            self._pairs /= self._gain
            self._uses = self._uses / self._gain + _LEAST
            self._gain = 1.0

    def _count(self, chosen: Sequence[Sequence[int]]) -> None:
        """Counts one step; `chosen` has the experts of each layer, empty where the layer did not run."""
        distance, by_width = self._distance, dict[tuple[int, int], list[int]]()
        for source in range(self._layers - distance):
            widths = len(chosen[source]), len(chosen[source + distance])
            if widths[0] and widths[1]:
                by_width.setdefault(widths, []).append(source)
        for sources in by_width.values():
            layer = np.array(sources)[:, None]
            before = np.array([chosen[source] for source in sources])
            after = np.array([chosen[source + distance] for source in sources])
            # Experts of a layer are distinct, so no pair occurs twice and += counts each one.
            self._pairs[layer[:, :, None], before[:, :, None], after[:, None, :]] += self._gain
            self._uses[layer, before] += self._gain


class BatchCorrelation:
    """Counts P(expert j in one layer | expert i in the previous layer), per token, during sweeps.

    Args:
        layers, experts: of the model (the most experts of any layer); the first layer follows the last.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._experts = layers, experts
        self._pairs = np.zeros((layers, experts, experts), np.float32)
        self._tokens: NDArray[np.float32] | None = None
        """[T, experts], 1 where a token of this sweep chose an expert in layer `_last`."""
        self._last = -1

    def observe(self, layer: int, index: NDArray[np.int64]) -> None:
        """Counts the experts [T, k] that this sweep's tokens chose in a layer; ids beyond the experts are ignored."""
        chosen = np.zeros((len(index), self._experts + 1), np.float32)
        np.put_along_axis(chosen, index.clip(max=self._experts), 1, axis=1)
        chosen = chosen[:, : self._experts]
        if self._tokens is not None and layer == self._last + 1 and len(self._tokens) == len(chosen):
            self._pairs[layer] *= _DECAY
            self._pairs[layer] += self._tokens.T @ chosen
        self._tokens, self._last = chosen, layer

    def hot(self, layer: int, count: int) -> list[int]:
        """The `count` experts of a layer that are expected to have the most tokens, most first."""
        pairs = self._pairs[layer]
        if self._tokens is not None and layer == self._last + 1:
            tendency = self._tokens.sum(0) / np.maximum(pairs.sum(1), 1e-6) @ pairs
        else:
            tendency = pairs.sum(0)
        return [int(expert) for expert in np.argsort(-tendency, kind="stable")[:count]]
