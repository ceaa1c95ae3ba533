"""The experts of the token before, in the same layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.experts.prediction.predictor import Ranked


class PreviousToken:
    """Predicts that a layer wants again what it wanted last, most of all those it has wanted several times running."""

    name = "previous"
    learns = True
    beside_s = 0.0

    def __init__(self, layers: int) -> None:
        self._runs: list[dict[int, int]] = [{} for _ in range(layers)]

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        """See `Predictor`."""
        before = self._runs[layer].get
        self._runs[layer] = {expert: before(expert, 0) + 1 for expert in experts}

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`.  The probability is a rank's, not a measured one: 1/2, 3/4, 7/8..."""
        runs = sorted(self._runs[layer].items(), key=_by_run)
        return [(expert, 1 - 0.5**run) for expert, run in runs]


def _by_run(item: tuple[int, int]) -> int:
    return -item[1]
