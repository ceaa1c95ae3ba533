"""The coming layer's own router, asked early: from layer to layer, what enters the experts changes little."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.experts.prediction.predictor import Gate, Ranked


class NextGate:
    """Puts the hidden states of this layer through the router of a coming one.

    Args:
        gates: of each layer; None where there is none that can be asked by itself.
        limit: experts to predict.
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
        """See `Predictor`."""
        self._layer, self._hidden = layer, hidden

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`.  Probabilities say by how much an expert is above or below those that are just chosen."""
        if self._hidden is None or layer <= self._layer or (gate := self._gates[layer]) is None:
            return []
        logits, index = gate(self._hidden)
        width = index.shape[-1]
        limit = min(self._limit, logits.shape[-1])
        if logits.shape[0] > 1:
            logits = logits.amax(0, keepdim=True)  # wanted if any of the tokens wants it
        values, order = logits.reshape(-1).topk(limit)
        chosen = set(index.reshape(-1).tolist())
        score = dict(zip(order.tolist(), values.tolist(), strict=True))
        highest = next(iter(score.values()))
        levels = list(score.values())
        edge = (levels[width - 1] + levels[width]) / 2 if width < limit else levels[-1]
        scale = max(highest - edge, 1e-6) / 4
        # A router may choose otherwise than by its logits (groups, a bias): then what it chose comes first.
        ranked = {expert: (1.0 + _sigmoid((score.get(expert, edge) - edge) / scale)) / 2 for expert in chosen}
        for expert, level in score.items():
            if expert not in chosen:
                ranked[expert] = _sigmoid((level - edge) / scale) / 2
        return sorted(ranked.items(), key=_by_probability)[: self._limit]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -50 else 0.0


def _by_probability(item: tuple[int, float]) -> float:
    return -item[1]
