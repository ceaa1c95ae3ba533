"""Which experts follow which: Klotski's expert correlation table (section 6.2), path length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.experts.prediction.predictor import Ranked
from engine.experts.replay.trace_file import RoutingTrace

_LEAST = 1e-6
_LARGEST = 1e30
"""Counts are scaled down before fp32 runs out of range."""


class Correlation:
    """Counts P(expert j in layer l + d | expert i in layer l) while running, for one distance d at a time.

    As in Klotski the counts start from a recorded run, if there is one, follow what is served now, and are not saved.
    The tendencies of all experts that were chosen are averaged.

    Args:
        layers, experts: of the model (the most experts of any layer).
        limit: experts to predict.
        half_life: steps after which a count is worth half.
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
        """Of the table."""
        return self._pairs.nbytes

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        """See `Predictor`."""
        if layer <= self._last:
            self._end_step()
        self._last = layer
        self._chosen[layer] = experts

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`."""
        if layer <= self._last:
            return []  # the next token's: no path leads there
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
        """Another distance is another table."""
        self._distance = distance
        self._gain = 1.0
        self._pairs: NDArray[np.float32] = np.zeros((self._layers, self._experts, self._experts), np.float32)
        # One use more than was counted: who was seen once is not certain.
        self._uses: NDArray[np.float32] = np.ones((self._layers, self._experts), np.float32)
        if self._trace is not None and self._trace.layers == self._layers:
            for token in self._trace.experts:
                self._count([[expert for expert in chosen if 0 <= expert < self._experts] for chosen in token.tolist()])

    def _end_step(self) -> None:
        """Counts what the step has shown, at once: layer by layer it would take some times as long."""
        self._count(self._chosen)
        self._chosen = [()] * self._layers
        self._last = -1
        # New counts grow rather than that old ones fade: nothing has to be gone through.
        self._gain *= self._growth
        if self._gain > _LARGEST:
            self._pairs /= self._gain
            self._uses = self._uses / self._gain + _LEAST
            self._gain = 1.0

    def _count(self, chosen: Sequence[Sequence[int]]) -> None:
        """One step's experts of each layer; none where it did not come to."""
        distance, by_width = self._distance, dict[tuple[int, int], list[int]]()
        for source in range(self._layers - distance):
            widths = len(chosen[source]), len(chosen[source + distance])
            if widths[0] and widths[1]:
                by_width.setdefault(widths, []).append(source)
        for sources in by_width.values():
            layer = np.array(sources)[:, None]
            before = np.array([chosen[source] for source in sources])
            after = np.array([chosen[source + distance] for source in sources])
            # Experts of a step are distinct, so no pair occurs twice and += counts each.
            self._pairs[layer[:, :, None], before[:, :, None], after[:, None, :]] += self._gain
            self._uses[layer, before] += self._gain
