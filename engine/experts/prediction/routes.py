"""Which experts the latest decode steps were routed to: what a learnt predictor is trained on."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.experts.replay.trace_file import RoutingTrace


class RecordedRoutes:
    """A ring of the routes of single tokens.  Only expert numbers are kept, nothing of what was said.

    Args:
        layers, experts, per_token: of the model.
        capacity: steps to remember.
    """

    def __init__(self, layers: int, experts: int, per_token: int, capacity: int = 4096) -> None:
        self._experts = experts
        self._ring: NDArray[np.int16] = np.full((capacity, layers, per_token), -1, np.int16)
        self._row: NDArray[np.int16] = np.full((layers, per_token), -1, np.int16)
        self._seen = 0
        self._lock = threading.Lock()
        self.steps = 0

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """A decode step's layer; steps of several tokens are left out, and those that were not seen whole."""
        if layer == 0:
            self._seen = 0
        if layer != self._seen or len(experts) != self._row.shape[1]:
            self._seen = -1  # until the next step begins
            return
        self._row[layer] = experts
        self._seen += 1
        if self._seen == self._row.shape[0]:
            with self._lock:
                self._ring[self.steps % len(self._ring)] = self._row
                self.steps += 1

    def trace(self) -> RoutingTrace | None:
        """The steps that are remembered, oldest first; None if there are none.  From any thread."""
        with self._lock:
            kept = min(self.steps, len(self._ring))
            rows = np.roll(self._ring, -(self.steps % len(self._ring)), axis=0)[len(self._ring) - kept :]
        if not kept:
            return None
        starts = np.array([0, kept], np.int64)
        return RoutingTrace(rows, np.zeros(rows.shape, np.float16), starts, self._experts)
