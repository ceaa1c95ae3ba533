"""How good a predictor is: counted on the live routing, and turned into seconds."""

from __future__ import annotations

import os
from collections.abc import Collection

from engine.experts.prediction.predictor import Predictor, Ranked
from engine.experts.prediction.report import PredictorReport
from engine.experts.prediction.worth import Circumstances

BUCKETS = 8
"""Probabilities are told apart so finely; what each is worth is measured."""
_MEMORY = 4096.0
"""Layers after which what was counted is halved."""
_DOUBT = 2.0
"""Experts of a bucket that are taken to have been predicted for nothing before any was counted."""

_CORES = os.cpu_count() or 1


class Score:
    """Of one predictor.

    What a prediction is worth is judged on the experts that were not there when it was made: the others need none.

    Attributes:
        accepts: for each bucket, whether a prefetch of an expert predicted with such a probability pays.
        gain_s: seconds a step.
        cost_s: of a layer's prediction: what the step waits for, and a core's share of what is computed beside it.
        interval: it is compared with what happens in every so many steps; a power of two.
    """

    def __init__(self, predictor: Predictor, width: int) -> None:
        self.predictor = predictor
        self.accepts = [False] * BUCKETS
        self.gain_s = 0.0
        self.cost_s = 0.0
        self.interval = 1
        self._width = width
        self.forget()

    def forget(self) -> None:
        """Starts to count again, because something has changed."""
        self.layers = self._recent = 0.0
        self._wanted = self._found = self._told = 0.0
        self._offered, self._used = [0.0] * BUCKETS, [0.0] * BUCKETS

    @property
    def missing(self) -> float:
        """Experts that a layer wanted and that were not there, on average."""
        return self._wanted / self._recent if self._recent else 0.0

    def count(self, ranked: Ranked, absent: Collection[int], wanted: Collection[int]) -> None:
        """Compares a prediction with what came.

        Args:
            absent: all experts of the layer that were not there when it was made.
            wanted: those of them that the layer wanted.
        """
        self.layers += 1
        self._recent += 1
        self._wanted += len(wanted)
        for rank, (expert, probability) in enumerate(ranked):
            if expert not in absent:
                continue
            bucket = bucket_of(probability)
            hit = expert in wanted
            self._offered[bucket] += 1
            self._used[bucket] += hit
            if rank < self._width:
                self._told += 1
                self._found += hit
        if self._recent >= _MEMORY:
            self._recent /= 2
            self._wanted, self._found, self._told = self._wanted / 2, self._found / 2, self._told / 2
            self._offered = [count / 2 for count in self._offered]
            self._used = [count / 2 for count in self._used]

    def time(self, observing_s: float, predicting_s: float) -> None:
        """A layer took so long of the step's time."""
        took_s = observing_s + predicting_s + self.predictor.beside_s / _CORES
        if self.cost_s == 0:
            self.cost_s = took_s
        # Once in a while the system gives the core to somebody else: that is not its cost.
        self.cost_s += 0.05 * (min(took_s, 4 * self.cost_s) - self.cost_s)

    def evaluate(self, now: Circumstances) -> None:
        """Says what would pay, and what that gains."""
        if not self._recent:
            return
        rates = [offered / self._recent for offered in self._offered]
        precisions = [used / (offered + _DOUBT) for used, offered in zip(self._used, self._offered, strict=True)]
        self.accepts = [p * now.saved_s[0] > (1 - p) * now.waste_s for p in precisions]
        count = sum(rate for rate, accepted in zip(rates, self.accepts, strict=True) if accepted)
        # Those that come after others arrive later, and save less or nothing.
        places = now.saved_s[: max(1, round(count))]
        saved_s = sum(places) / len(places)
        gain_s = sum(
            rate * now.placed * (p * saved_s - (1 - p) * now.waste_s)
            for rate, p, accepted in zip(rates, precisions, self.accepts, strict=True)
            if accepted
        )
        self.gain_s = now.layers * (gain_s - self.cost_s - now.call_s)

    def report(self, layers: int) -> PredictorReport:
        """For steps of so many layers."""
        return PredictorReport(
            name=self.predictor.name,
            layers=int(self.layers),
            hit_rate=self._found / self._wanted if self._wanted else 0.0,
            precision=self._found / self._told if self._told else 0.0,
            cost_s=self.cost_s * layers,
            gain_s=self.gain_s,
        )


def bucket_of(probability: float) -> int:
    """Which of the `BUCKETS` a probability falls into."""
    return min(int(probability * BUCKETS), BUCKETS - 1)
