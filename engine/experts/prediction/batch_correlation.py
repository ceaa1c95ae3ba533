"""Klotski's expert correlation table (section 6.2) for sweeps of many tokens: which experts will have the most."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FADING = 0.99
"""What a count is worth a sweep later."""


class BatchCorrelation:
    """Counts P(expert j in one layer | expert i in the layer before), token by token, while sweeps go on.

    Args:
        layers, experts: of the model (the most experts of any layer); after the last layer comes the first again.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._layers, self._experts = layers, experts
        self._pairs = np.zeros((layers, experts, experts), np.float32)
        self._tokens: NDArray[np.float32] | None = None
        """[T, experts], 1 where a token of this sweep has chosen an expert of the layer `_last`."""
        self._last = -1

    def observe(self, layer: int, index: NDArray[np.int64]) -> None:
        """The experts [T, k] of a layer that this sweep's tokens have chosen; ids beyond the experts are none."""
        chosen = np.zeros((len(index), self._experts + 1), np.float32)
        np.put_along_axis(chosen, index.clip(max=self._experts), 1, axis=1)
        chosen = chosen[:, : self._experts]
        if self._tokens is not None and layer == self._last + 1 and len(self._tokens) == len(chosen):
            self._pairs[layer] *= _FADING
            self._pairs[layer] += self._tokens.T @ chosen
        self._tokens, self._last = chosen, layer

    def hot(self, layer: int, count: int) -> list[int]:
        """So many experts of a layer, those first that are expected to have the most tokens."""
        pairs = self._pairs[layer]
        if self._tokens is not None and layer == self._last + 1:
            tendency = self._tokens.sum(0) / np.maximum(pairs.sum(1), 1e-6) @ pairs
        else:
            tendency = pairs.sum(0)
        return [int(expert) for expert in np.argsort(-tendency, kind="stable")[:count]]
