"""How good predictors are on the live routing, in seconds: which is in use, what a prefetch is worth, how far ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.experts.prediction.aging import Aging
from engine.experts.prediction.predictors import Predictor, Ranked
from engine.experts.prediction.target import PrefetchTimes

_PULL = 0.02
"""Weight of one layer in what is followed: how long a layer takes, what a prefetch saves and costs."""
_CONTENTION = 0.25
"""Of its time that a copy takes from others who use the same memory meanwhile: RAM is a few times as fast as a link."""
_FADING = 0.98
_ASSUMED_CALL_S = 10e-6
_REMEMBERED = 1000.0
BUCKETS = 8
"""Probabilities are told apart so finely; what each is worth is measured."""
_MEMORY = 4096.0
"""Layers after which what was counted is halved."""
_DOUBT = 2.0
"""Experts of a bucket that are taken to have been predicted for nothing before any was counted."""
_CORES = os.cpu_count() or 1
_EVIDENCE_LAYERS = 200
"""Layers that a predictor must have been compared on before it is believed."""
_LEAST_GAIN = 0.005
"""Of a step's time: a smaller gain is not worth the change."""
_BETTER = 1.2
"""So many times the gain of the one in use is needed to replace it."""
MOST_AHEAD = 4
"""Layers: what is predicted for later is hardly ever right."""
_PATIENCE = 3
"""Choices that must agree before it changes: what was counted for another distance is worth nothing then."""


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """One predictor, measured on the recent routing whether it was in use or not.

    Attributes:
        name: as in the engine's configuration.
        layers: how often it was compared with what a layer wanted.
        hit_rate: of the experts that were wanted and not there, the share that was predicted.
        precision: of the experts that were predicted and not there, the share that was wanted.
        cost_s: of its own computation, seconds a step, as far as the step waits for it.
        gain_s: seconds a step that its use saves, after its cost, what it brings for nothing and whom that drives out.
    """

    name: str
    layers: int
    hit_rate: float
    precision: float
    cost_s: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class PredictionReport:
    """The prefetcher.

    Attributes:
        adopted: who predicts now, None if nobody does.
        ahead: how many layers ahead.
        steps: decode steps seen.
        prefetched: experts whose bringing was begun; used: those that the layer then wanted; wasted: those it did not.
        predictors: all that could be asked.
        is_training: whether a learnt predictor is being trained now.
        note: what the user should know, as one sentence.
    """

    adopted: str | None
    ahead: int
    steps: int
    prefetched: int
    used: int
    wasted: int
    predictors: tuple[PredictorReport, ...]
    is_training: bool = False
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the worth of a prefetch depends on besides the predictor.

    Attributes:
        saved_s: what the first, second... prefetch for a layer saves if its expert is wanted, as things have been.
        waste_s: what one for nothing costs: urgent copies that it delays, somebody wanted whom it drives out.
        call_s: of asking the target, for each layer.
        placed: share of the prefetches asked for that found a slot.
        layers: of a step.
    """

    saved_s: tuple[float, ...]
    waste_s: float
    call_s: float
    placed: float
    layers: int


class Worth:
    """Follows how prefetches fare.

    Args:
        times: what they take and save if nothing else is on its way.
        places: most prefetches for a layer.
    """

    def __init__(self, times: Callable[[], PrefetchTimes], places: int) -> None:
        self._measure = times
        self.times = times()
        self._saved_s: list[float] | None = None
        self._places = places
        self._call_s = _ASSUMED_CALL_S
        self._asked = self._begun = 1.0

    def look(self, lead_s: float, backlog_bytes: int) -> None:
        """So much is on its way at this moment, `lead_s` before a layer."""
        saved_s = [self.times.saved_s(place, lead_s, backlog_bytes) for place in range(self._places)]
        if self._saved_s is None:
            self._saved_s = saved_s
        self._saved_s = [old + _PULL * (new - old) for old, new in zip(self._saved_s, saved_s, strict=True)]

    def asked(self, asked: int, begun: int) -> None:
        """So many of the prefetches that were asked for have begun."""
        self._asked += asked
        self._begun += begun
        if self._asked > _REMEMBERED:
            self._asked, self._begun = self._asked / 2, self._begun / 2

    def called(self, took_s: float) -> None:
        """What a layer's prefetches took of the step's time."""
        self._call_s += _PULL * (min(took_s, 4 * self._call_s) - self._call_s)

    def doubt(self) -> None:
        """Nobody prefetches: it may be that there are places again."""
        self._asked, self._begun = (1 + _FADING * (count - 1) for count in (self._asked, self._begun))

    def changed(self) -> None:
        """What was seen holds for another distance."""
        self._saved_s = None

    def now(self, missing: float, layer_s: float, layers: int, aging: Aging) -> Circumstances:
        """
        Args:
            missing: experts that a layer wants and that are not there, on average.
            layer_s: of one layer.
            layers: of a step.
            aging: knows who was driven out in error.
        """
        times = self.times = self._measure()
        # An urgent copy that finds a wasted one on the link waits for it: as often as the link has urgent copies.
        busy = min(1.0, missing * times.urgent_share * times.arrival_s / layer_s) if layer_s else 0.0
        return Circumstances(
            saved_s=tuple(self._saved_s or [0.0] * self._places),
            waste_s=max(busy, _CONTENTION) * times.arrival_s + aging.regret * times.miss_s,
            call_s=self._call_s,
            placed=self._begun / self._asked,
            layers=layers,
        )


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
        if best is None or best is self.adopted or best.gain_s <= _LEAST_GAIN * step_s:
            return self.adopted
        if self.adopted is None or best.gain_s > _BETTER * self.adopted.gain_s + _LEAST_GAIN * step_s:
            self.adopted = best
        return self.adopted


def _gain(score: Score) -> float:
    return score.gain_s


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
