"""How far ahead experts are brought: as far as they need to arrive in time, and no farther."""

from __future__ import annotations

import math

from engine.experts.prediction.target import PrefetchTimes

MOST_AHEAD = 4
"""Layers: what is predicted for later is hardly ever right."""
_PATIENCE = 3
"""Choices that must agree before it changes: what was counted for another distance is worth nothing then."""
_PULL = 0.02
"""Weight of one layer in the time that a layer takes."""


class Distance:
    """Measures how long a layer takes, and from that how many layers ahead to be.

    Attributes:
        layers: ahead.
        layer_s: of one layer; 0 while none was seen.
    """

    def __init__(self, layers: int) -> None:
        self.layers = 1
        self.layer_s = 0.0
        self._most = max(1, min(MOST_AHEAD, layers - 1))
        self._votes = 0

    @property
    def lead_s(self) -> float:
        """From a prediction to the moment that its layer is computed."""
        return self.layers * self.layer_s

    def observe(self, took_s: float) -> None:
        """From one layer to the next.  A pause (another request, a suspended machine) is no layer's time."""
        if self.layer_s == 0:
            self.layer_s = took_s
        self.layer_s += _PULL * (min(took_s, 4 * self.layer_s) - self.layer_s)

    def choose(self, times: PrefetchTimes, missing: float) -> bool:
        """Whether `layers` has changed.

        Args:
            missing: experts that a layer wants and that are not there, on average.
        """
        if not self.layer_s:
            return False
        wanted = max(1, min(math.ceil(times.arrival_s * max(1.0, missing) / self.layer_s), self._most))
        self._votes = self._votes + 1 if wanted != self.layers else 0
        if self._votes < _PATIENCE:
            return False
        self.layers, self._votes = wanted, 0
        return True
