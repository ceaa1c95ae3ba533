"""Which experts follow which: Klotski's expert correlation table (section 6.2), path length 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.experts.prediction.predictor import Ranked
from engine.experts.replay.trace_file import RoutingTrace

_LARGEST = 1e30
"""Counts are scaled down before fp32 runs out of range."""


class Correlation:
    """Counts P(expert j in layer l + d | expert i in layer l) while running, for one distance d at a time.

    As in Klotski the counts start from a recorded run, if there is one, follow what is served now, and are not saved.
    The tendencies of all experts that were chosen are averaged.

    Args:
        layers, experts: of the model (the most experts of any layer).
        limit: experts to foretell.
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
        self._chosen: list[NDArray[np.intp] | None] = [None] * layers
        self._last = -1
        self._begin(1)

    @property
    def nbytes(self) -> int:
        """Of the table."""
        return sum(table.nbytes for table in self._pairs if table is not None)

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        """See `Predictor`."""
        if layer <= self._last:
            self._begin_step()
        self._last = layer
        chosen = np.array(experts, np.intp)
        self._chosen[layer] = chosen
        source = layer - self._distance
        if source >= 0 and (before := self._chosen[source]) is not None:
            pairs, uses = self._table(source)
            # Experts of a step are distinct, so no pair occurs twice and += counts each.
            pairs[before[:, None], chosen] += self._gain
            uses[before] += self._gain

    def predict(self, layer: int) -> Ranked:
        """See `Predictor`."""
        source = layer - self._distance
        if source != self._last:
            if layer <= self._last:
                return []  # the next token's: no path leads there
            self._begin(layer - self._last)
            source = self._last
        before = self._chosen[source]
        if before is None or not len(before):
            return []
        pairs, uses = self._table(source)
        tendency: NDArray[np.float32] = np.reciprocal(uses[before] * np.float32(len(before))) @ pairs[before]
        best = np.argpartition(tendency, self._experts - self._limit)[self._experts - self._limit :]
        values = tendency[best]
        ranked = sorted(zip(values.tolist(), best.tolist(), strict=True), reverse=True)
        return [(expert, probability) for probability, expert in ranked if probability > 0]

    def _begin(self, distance: int) -> None:
        """Another distance is another table."""
        self._distance = distance
        self._gain = 1.0
        self._pairs: list[NDArray[np.float32] | None] = [None] * self._layers
        self._uses: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * self._layers
        if self._trace is not None and self._trace.layers == self._layers:
            self._count_trace(self._trace)

    def _table(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        pairs = self._pairs[layer]
        if pairs is None:
            pairs = self._pairs[layer] = np.zeros((self._experts, self._experts), np.float32)
            # One use more than was counted: who was seen once is not certain.
            self._uses[layer] = np.ones(self._experts, np.float32)
        return pairs, self._uses[layer]

    def _begin_step(self) -> None:
        self._last = -1
        for layer in range(self._layers):
            self._chosen[layer] = None
        # New counts grow rather than that old ones fade: nothing has to be gone through.
        self._gain *= self._growth
        if self._gain > _LARGEST:
            for pairs, uses in zip(self._pairs, self._uses, strict=True):
                if pairs is not None:
                    pairs /= self._gain
                    uses /= self._gain
                    uses += 1e-6
            self._gain = 1.0

    def _count_trace(self, trace: RoutingTrace) -> None:
        for source in range(self._layers - self._distance):
            pairs, uses = self._table(source)
            for before, after in zip(trace.experts[:, source], trace.experts[:, source + self._distance], strict=True):
                before, after = before[before >= 0], after[after >= 0]
                if len(after) and max(before.max(initial=-1), after.max()) < self._experts:
                    pairs[before[:, None], after] += 1.0
                    uses[before] += 1.0
