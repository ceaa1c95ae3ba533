"""Who predicts: the predictor that gains most, if any gains."""

from __future__ import annotations

from collections.abc import Sequence

from engine.experts.prediction.score import Score

_EVIDENCE_LAYERS = 200
"""Layers that a predictor must have been compared on before it is believed."""
_LEAST = 0.005
"""Of a step's time: a smaller gain is not worth the change."""
_BETTER = 1.2
"""So many times the gain of the one in use is needed to replace it."""


class Adoption:
    """Keeps the adopted predictor until another one is clearly better, or it loses.

    Args:
        choice: the name of the one to use whatever it gains; None to choose.
    """

    def __init__(self, choice: str | None) -> None:
        self._choice = choice
        self.adopted: Score | None = None

    @property
    def is_free(self) -> bool:
        """Whether what gains is used, not what was asked for."""
        return self._choice is None

    def decide(self, scores: Sequence[Score], step_s: float) -> Score | None:
        """The predictor to use from now on.

        Args:
            scores: evaluated just now.
            step_s: how long a step takes.
        """
        if self._choice is not None:
            self.adopted = next((score for score in scores if score.predictor.name == self._choice), None)
            return self.adopted
        if self.adopted is not None and (self.adopted not in scores or self.adopted.gain_s <= 0):
            self.adopted = None
        known = [score for score in scores if score.layers >= _EVIDENCE_LAYERS]
        best = max(known, key=_gain, default=None)
        if best is None or best is self.adopted or best.gain_s <= _LEAST * step_s:
            return self.adopted
        if self.adopted is None or best.gain_s > _BETTER * self.adopted.gain_s + _LEAST * step_s:
            self.adopted = best
        return self.adopted


def _gain(score: Score) -> float:
    return score.gain_s
