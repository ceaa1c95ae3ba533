"""Scores predictors on the live routing, in seconds: which one to use, what a prefetch is worth, how far ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.common.choice import clearly_least
from engine.common.model_info import PredictorRate
from engine.experts.prediction.predictors import Predictor, Ranked
from engine.experts.prediction.target import Aging, PrefetchTimes

_EWMA_WEIGHT = 0.02
"""Weight of one layer in the moving averages of layer times and of what a prefetch saves and costs."""
_CONTENTION = 0.25
"""Share of a copy's time lost by other users of RAM, which is a few times as fast as a link."""
_DECAY = 0.98
_ASSUMED_CALL_S = 10e-6
_REMEMBERED = 1000.0
BUCKETS = 8
"""Predictions are grouped by probability into this many buckets, whose precision is measured."""
_MEMORY = 4096.0
"""Layers after which the counts are halved."""
_PRIOR_WRONG = 2.0
"""Prior count of wrong predictions in each bucket."""
_CORES = os.cpu_count() or 1
_EVIDENCE_LAYERS = 200
"""Layers that a predictor must have been compared on before it can be adopted."""
_LEAST_GAIN = 0.005
"""Share of a step's time: a smaller gain is not worth a change."""
_BETTER = 1.2
"""Factor by which a predictor's gain must exceed that of the one in use to replace it."""
MOST_AHEAD = 4
"""Layers: predictions further ahead are hardly ever right."""
_PATIENCE = 3
"""Consecutive choices that must differ before the distance changes, because a change discards all counts."""


@dataclass(frozen=True, slots=True)
class PredictionReport:
    """State of the prefetcher.

    Attributes:
        adopted: name of the predictor in use, None if none is.
        ahead: prefetch distance in layers.
        steps: decode steps observed.
        prefetched: prefetches started; used: those whose expert the layer then needed; wasted: those it did not.
        predictors: all available ones.
        is_training: whether a predictor is being trained now.
        note: a sentence for the user, if there is a problem.
    """

    adopted: str | None
    ahead: int
    steps: int
    prefetched: int
    used: int
    wasted: int
    predictors: tuple[PredictorRate, ...]
    is_training: bool = False
    note: str | None = None


class Worth:
    """Tracks what prefetches save and cost.

    Args:
        measure: returns what they take and save with an empty backlog.
        places: maximum prefetches per layer.

    Attributes:
        saved_s: recent average of what the first, second... prefetch for a layer saves if its expert is needed.
        waste_s: cost of a wasted prefetch: urgent copies that it delays, and a later miss on the expert it evicts.
        call_s: time to call the target, per layer.
    """

    def __init__(self, measure: Callable[[], PrefetchTimes], places: int) -> None:
        self._measure, self.times, self._places = measure, measure(), places
        self.saved_s: list[float] = []
        self.waste_s, self.call_s = 0.0, _ASSUMED_CALL_S
        self._asked = self._begun = 1.0

    @property
    def placed(self) -> float:
        """Share of the requested prefetches that got a slot."""
        return self._begun / self._asked

    def look(self, lead_s: float, backlog_bytes: int) -> None:
        """Records the backlog `lead_s` before a layer."""
        saved_s = [self.times.saved_s(place, lead_s, backlog_bytes) for place in range(self._places)]
        before_s = self.saved_s or saved_s
        self.saved_s = [old + _EWMA_WEIGHT * (new - old) for old, new in zip(before_s, saved_s, strict=True)]

    def asked(self, asked: int, begun: int) -> None:
        """Records how many of the requested prefetches were started."""
        self._asked += asked
        self._begun += begun
        if self._asked > _REMEMBERED:
            self._asked, self._begun = self._asked / 2, self._begun / 2

    def called(self, took_s: float) -> None:
        """Records the time that a layer's prefetches took on the decoding thread."""
        self.call_s += _EWMA_WEIGHT * (min(took_s, 4 * self.call_s) - self.call_s)

    def decay(self) -> None:
        """Decays the share of placed prefetches while there are none, because slots may be free again."""
        self._asked, self._begun = (1 + _DECAY * (count - 1) for count in (self._asked, self._begun))

    def evaluate(self, missing: float, layer_s: float, aging: Aging) -> None:
        """Updates `times` and `waste_s`.

        Args:
            missing: average number of experts per layer that are needed and absent.
            layer_s: time of one layer.
            aging: gives the cost of evictions.
        """
        times = self.times = self._measure()
        # An urgent copy waits for a wasted one on the link, with the probability that the link has urgent copies.
        busy = min(1.0, missing * times.urgent_share * times.arrival_s / layer_s) if layer_s else 0.0
        self.waste_s = max(busy, _CONTENTION) * times.arrival_s + aging.regret * times.miss_s


class Score:
    """Score of one predictor.

    Predictions are judged only on experts that were absent when they were made: the others need no prefetch.

    Attributes:
        accepts: for each bucket, whether prefetching an expert with a probability in it pays off.
        gain_s: seconds per step.
        cost_s: per layer: the time that the step waits, plus background time divided by the number of cores.
        interval: the predictor is compared in one of so many steps; a power of two.
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
        """Resets the counts, because conditions have changed."""
        self.layers = self._recent = 0.0
        self._wanted = self._found = self._predicted = 0.0
        self._offered, self._used = [0.0] * BUCKETS, [0.0] * BUCKETS

    @property
    def missing(self) -> float:
        """Average number of experts per layer that were needed and absent."""
        return self._wanted / self._recent if self._recent else 0.0

    def count(self, ranked: Ranked, absent: Collection[int], wanted: Collection[int]) -> None:
        """Compares a prediction with the actual routing.

        Args:
            absent: all experts of the layer that were absent when it was made.
            wanted: those of them that the layer used.
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
                self._predicted += 1
                self._found += hit
        if self._recent >= _MEMORY:
            self._recent /= 2
            self._wanted, self._found, self._predicted = self._wanted / 2, self._found / 2, self._predicted / 2
            self._offered = [count / 2 for count in self._offered]
            self._used = [count / 2 for count in self._used]

    def time(self, observing_s: float, predicting_s: float) -> None:
        """Records the time taken for one layer."""
        took_s = observing_s + predicting_s + self.predictor.beside_s / _CORES
        if self.cost_s == 0:
            self.cost_s = took_s
        # Clamped, because preemption is not the predictor's cost.
        self.cost_s += 0.05 * (min(took_s, 4 * self.cost_s) - self.cost_s)

    def evaluate(self, worth: Worth, layers: int) -> None:
        """Updates `accepts` and `gain_s`, for steps of so many layers."""
        if not self._recent:
            return
        rates = [offered / self._recent for offered in self._offered]
        precisions = [used / (offered + _PRIOR_WRONG) for used, offered in zip(self._used, self._offered, strict=True)]
        first_s, waste_s = (worth.saved_s or [0.0])[0], worth.waste_s
        self.accepts = [p * first_s > (1 - p) * waste_s for p in precisions]
        count = sum(rate for rate, accepted in zip(rates, self.accepts, strict=True) if accepted)
        # Prefetches queued behind others arrive later, and save less or nothing.
        places = worth.saved_s[: max(1, round(count))]
        saved_s = sum(places) / len(places) if places else 0.0
        gain_s = sum(
            rate * worth.placed * (p * saved_s - (1 - p) * waste_s)
            for rate, p, accepted in zip(rates, precisions, self.accepts, strict=True)
            if accepted
        )
        self.gain_s = layers * (gain_s - self.cost_s - worth.call_s)

    def report(self, layers: int) -> PredictorRate:
        """The report, for steps of so many layers."""
        return PredictorRate(
            name=self.predictor.name,
            layers=int(self.layers),
            hit_rate=self._found / self._wanted if self._wanted else 0.0,
            precision=self._found / self._predicted if self._predicted else 0.0,
            cost_s=self.cost_s * layers,
            gain_s=self.gain_s,
        )


def bucket_of(probability: float) -> int:
    """Index of the bucket that a probability falls into."""
    return min(int(probability * BUCKETS), BUCKETS - 1)


def adopt(scores: Sequence[Score], adopted: Score | None, step_s: float) -> Score | None:
    """The predictor to use from now on: the adopted one until another is clearly better, or it no longer gains.

    Args:
        scores: evaluated just now.
        step_s: how long a step takes.
    """
    if adopted is not None and (adopted not in scores or adopted.gain_s <= 0):
        adopted = None
    known = [score for score in scores if score.layers >= _EVIDENCE_LAYERS or score is adopted]
    costs: dict[Score | None, float] = {score: -score.gain_s for score in known}
    if adopted is None:
        costs[None] = 0.0
    return clearly_least(costs, adopted, 1 - _BETTER, _LEAST_GAIN * step_s)


class Distance:
    """Measures how long a layer takes, and derives the prefetch distance.

    Attributes:
        layers: prefetch distance.
        layer_s: time of one layer; 0 before the first.
    """

    def __init__(self, layers: int) -> None:
        self.layers = 1
        self.layer_s = 0.0
        self._most = max(1, min(MOST_AHEAD, layers - 1))
        self._votes = 0

    @property
    def lead_s(self) -> float:
        """Time from a prediction to the computation of its layer."""
        return self.layers * self.layer_s

    def observe(self, took_s: float) -> None:
        """Records the time from one layer to the next, clamped to ignore pauses (another request, suspend)."""
        if self.layer_s == 0:
            self.layer_s = took_s
        self.layer_s += _EWMA_WEIGHT * (min(took_s, 4 * self.layer_s) - self.layer_s)

    def choose(self, times: PrefetchTimes, missing: float) -> bool:
        """Updates `layers`; whether it has changed.

        Args:
            missing: average number of experts per layer that are needed and absent.
        """
        if not self.layer_s:
            return False
        wanted = max(1, min(math.ceil(times.arrival_s * max(1.0, missing) / self.layer_s), self._most))
        self._votes = self._votes + 1 if wanted != self.layers else 0
        if self._votes < _PATIENCE:
            return False
        self.layers, self._votes = wanted, 0
        return True
