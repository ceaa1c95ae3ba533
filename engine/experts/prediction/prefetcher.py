"""Prefetches experts with the predictor that gains most time, or not at all if none gains any: predictors are scored on
the live routing, in seconds.

DuoServe uses one trained predictor; here all predictors that a model supports are measured on its own routing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from engine.common.choice import clearly_least
from engine.common.clock import read
from engine.common.model_info import PredictorRate
from engine.experts.prediction.mlp import Learning
from engine.experts.prediction.predictors import Correlation, Gate, NextGate, Predictor, PreviousToken, Ranked
from engine.experts.prediction.target import Aging, PrefetchTarget, PrefetchTimes

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


_EVALUATED_STEPS = 16
_WIDEST = 8
"""Steps that use the experts of more tokens are ignored: like prompts, they need nearly all experts."""
_FIRST_STEPS = 32
"""Initially all predictors are compared in every step; later as often as `_WATCH_BUDGET_S` allows."""
_WATCH_BUDGET_S = 1e-6
"""Average cost allowed per layer, step and predictor that is not in use."""
_RAREST = 512
_LEARNING = 8
"""Predictors that learn online observe this many times more steps than they are compared in."""


class Prefetcher:
    """Prefetches for one target.  All methods but `report` must be called from the decoding thread.

    Args:
        predictors: to choose from.
        times: returns the current estimate of what a prefetch takes and saves.
        layers: of the target.
        experts: that have records, of each layer, or of all alike; no prediction is taken of any other.
        per_token: experts that a token is routed to.
        choice: name of the predictor to use; `auto` for the one that gains most.
        learning: of the trained predictor, if used; `close` closes it.
        pools: for each layer, the index of its pool of slots; None if all layers share one.
    """

    def __init__(
        self,
        target: PrefetchTarget,
        predictors: Sequence[Predictor],
        times: Callable[[], PrefetchTimes],
        *,
        layers: int,
        experts: int | Sequence[int],
        per_token: int,
        choice: str = "auto",
        learning: Learning | None = None,
        pools: Sequence[int] | None = None,
        clock: Callable[[], float] = read,
    ) -> None:
        self._target, self._clock = target, clock
        self._layers, self._per_token = layers, per_token
        self._experts = [experts] * layers if isinstance(experts, int) else list(experts)
        self._scores = [Score(predictor, per_token) for predictor in predictors]
        self._choice = None if choice == "auto" else choice
        self._adopted: Score | None = None
        self._aging = Aging(pools if pools is not None else [0] * layers, max(self._experts, default=0))
        self._distance = Distance(layers)
        self._steps = 0
        self._last_layer, self._last_s = layers, 0.0
        self._worth = Worth(times, per_token)
        self._prefetched = self._used = 0
        self._watched: list[Score] = []
        self._observing: list[Score] = []
        # By later layer: absent experts and the prediction of each watched predictor; predicted; prefetched experts.
        self._claims: dict[int, tuple[frozenset[int], list[tuple[Score, Ranked]]]] = {}
        self._predicted: dict[int, set[int]] = {}
        self._brought: dict[int, list[int]] = {}
        self._observing_s: dict[Score, float] = {}
        self._learning = learning
        if learning is not None and (trained := learning.load()) is not None:
            self.replace(trained)
        self._adopt()

    @property
    def adopted(self) -> str | None:
        """Name of the predictor in use."""
        return self._adopted.predictor.name if self._adopted is not None else None

    @property
    def ahead(self) -> int:
        """How many layers ahead experts are prefetched."""
        return self._distance.layers

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """A layer of a decode step has been routed and its work submitted: learns, and prefetches for a later layer.

        Args:
            experts: distinct, all that the step's tokens were routed to.
            hidden: [T, H], input of the experts, on any device; it may be overwritten after this call.
        """
        if len(experts) > _WIDEST * self._per_token:
            return
        now_s = self._clock()
        if layer <= self._last_layer:
            self._begin_step()
        elif layer == self._last_layer + 1:
            self._distance.observe(now_s - self._last_s)
        self._last_layer, self._last_s = layer, now_s
        if self._learning is not None:
            self._learning.routes.note(layer, experts)
        self._settle(layer, experts)
        self._learn(layer, experts, hidden)
        adopted = self._adopted
        if adopted is not None:
            self._aging.use(layer, experts, self._steps)
        coming = layer + self._distance.layers
        if coming >= self._layers:
            coming -= self._layers
            if coming >= layer:
                return  # fewer layers than the distance, so this would predict the current layer
        if self._watched:
            self._watch(coming, adopted)
        elif adopted is not None:
            self._bring(coming, self._predicted_by(adopted, coming), adopted)

    def replace(self, predictor: Predictor) -> None:
        """Adds a predictor, replacing the one with the same name; it starts without a score."""
        name = predictor.name
        self._scores = [score for score in self._scores if score.predictor.name != name]
        self._scores.append(Score(predictor, self._per_token))
        self._adopt()

    def learn_while_idle(self) -> bool:
        """Starts training in the background if there is new data; whether it was started.

        Not to be called within a step.  The new predictor is picked up in a later step; steps may run meanwhile.
        """
        return self._learning is not None and self._learning.begin(self.ahead)

    def close(self) -> None:
        """Ends threads and training.  Idempotent."""
        if self._learning is not None:
            self._learning.close()

    def report(self) -> PredictionReport:
        """Statistics so far."""
        pending = sum(len(experts) for experts in list(self._brought.values()))
        return PredictionReport(
            adopted=self.adopted,
            ahead=self.ahead,
            steps=self._steps,
            prefetched=self._prefetched,
            used=self._used,
            wasted=max(0, self._prefetched - self._used - pending),
            predictors=tuple(score.report(self._layers) for score in self._scores),
            is_training=self._learning is not None and self._learning.is_training,
            note=self._learning.note if self._learning is not None else None,
        )

    def _begin_step(self) -> None:
        self._steps += 1
        # Drop predictions for layers that never ran because the previous step was cut short.
        first_of_next = self.ahead
        for claims in (self._claims, self._predicted, self._brought):
            for layer in [layer for layer in claims if layer >= first_of_next]:
                del claims[layer]
        if self._steps % _EVALUATED_STEPS == 0:
            self._evaluate()
            if self._learning is not None and (trained := self._learning.finished()) is not None:
                self.replace(trained)
        step, adopted = self._steps, self._adopted
        early = step <= _FIRST_STEPS
        self._watched = [score for score in self._scores if early or step % score.interval == 0]
        self._observing = [
            score
            for score in self._scores
            if early
            or score is adopted
            or step % score.interval == 0
            or (score.predictor.learns and step % max(1, score.interval // _LEARNING) == 0)
        ]

    def _settle(self, layer: int, experts: Sequence[int]) -> None:
        """Compares the predictions for this layer with the experts it uses."""
        brought = self._brought.pop(layer, None)
        if brought is not None:
            wasted = [expert for expert in brought if expert not in experts]
            self._used += len(brought) - len(wasted)
            self._aging.wasted(layer, wasted, self._steps)
        self._predicted.pop(layer, None)
        claims = self._claims.pop(layer, None)
        if claims is None:
            return
        absent, said = claims
        wanted = absent.intersection(experts)
        for score, ranked in said:
            score.count(ranked, absent, wanted)

    def _learn(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        if not self._watched:
            for score in self._observing:
                score.predictor.observe(layer, experts, hidden)
            return
        for score in self._observing:
            begun_s = self._clock()
            score.predictor.observe(layer, experts, hidden)
            self._observing_s[score] = self._clock() - begun_s

    def _watch(self, coming: int, adopted: Score | None) -> None:
        """Asks all watched predictors, and prefetches what the adopted one predicts."""
        clock = self._clock
        begun_s = clock()
        absent = frozenset(self._target.absent(coming, range(self._experts[coming])))
        looked_s = clock() - begun_s
        self._worth.look(self._distance.lead_s, self._target.backlog_bytes)
        said: list[tuple[Score, Ranked]] = []
        for score in self._watched if adopted is None or adopted in self._watched else [*self._watched, adopted]:
            begun_s = clock()
            ranked = self._predicted_by(score, coming)
            score.time(self._observing_s.get(score, 0.0), clock() - begun_s)
            score.interval = _interval(score.cost_s + looked_s)
            said.append((score, ranked))
        self._claims[coming] = absent, said
        if adopted is not None:
            self._bring(coming, next((ranked for score, ranked in said if score is adopted), ()), adopted)

    def _predicted_by(self, score: Score, layer: int) -> Ranked:
        """What a predictor says of a layer, of the experts that there are: tables are as wide as the widest layer."""
        count = self._experts[layer]
        return [claim for claim in score.predictor.predict(layer) if claim[0] < count]

    def _bring(self, layer: int, ranked: Ranked, adopted: Score) -> None:
        """Prefetches the predicted experts that are worth it, as many as can arrive in time."""
        if not ranked:
            return
        begun_s = self._clock()
        self._predicted[layer] = {expert for expert, _ in ranked}
        accepts = adopted.accepts
        worthy = [expert for expert, probability in ranked if accepts[bucket_of(probability)]]
        if not worthy and self._choice is not None:
            worthy = [expert for expert, _ in ranked[: self._per_token]]
        if worthy and (absent := self._target.absent(layer, worthy)):
            self._prefetch(layer, absent[: self._room()])
        self._worth.called(self._clock() - begun_s)

    def _room(self) -> int:
        """How many prefetches started now would still save time."""
        room = self._worth.times.room(self._distance.lead_s, self._target.backlog_bytes)
        return room if self._choice is None else max(room, 1)

    def _prefetch(self, layer: int, experts: list[int]) -> None:
        if not experts:
            return
        aging, step = self._aging, self._steps
        dead = aging.dead(layer, len(experts), step, self._predicted, self._target)
        begun = self._target.prefetch(layer, experts, aging.evicting(dead, step))
        self._worth.asked(len(experts), begun)
        if begun:
            self._prefetched += begun
            self._brought[layer] = experts[:begun]
            aging.prefetched(layer, experts[:begun], step)

    def _evaluate(self) -> None:
        missing = max((score.missing for score in self._scores), default=0.0)
        self._worth.evaluate(missing, self._distance.layer_s, self._aging)
        for score in self._scores:
            score.evaluate(self._worth, self._layers)
        self._adopt()
        if self._distance.choose(self._worth.times, missing):
            for claims in (self._claims, self._predicted, self._brought):
                claims.clear()
            self._worth.saved_s = []
            for score in self._scores:
                score.forget()

    def _adopt(self) -> None:
        if self._choice is None:
            self._adopted = adopt(self._scores, self._adopted, self._distance.layer_s * self._layers)
        else:
            self._adopted = next((one for one in self._scores if one.predictor.name == self._choice), None)
        if self._adopted is None:  # without prefetching, recency is not tracked
            self._aging.clear()
            self._aging.decay()
            self._worth.decay()


def _interval(cost_s: float) -> int:
    """The smallest power of two of steps that keeps the cost within budget."""
    return int(min(_RAREST, 2 ** max(0, math.ceil(math.log2(max(cost_s, 1e-9) / _WATCH_BUDGET_S)))))


def make_prefetcher(
    target: PrefetchTarget,
    times: Callable[[], PrefetchTimes],
    *,
    layers: int,
    experts: int | Sequence[int],
    per_token: int,
    choice: str = "auto",
    gates: Sequence[Gate | None] = (),
    learning: Learning | None = None,
    pools: Sequence[int] | None = None,
) -> Prefetcher | None:
    """See `Prefetcher`; None if `choice` is `off`, there is nothing to predict, or no predictor is available.

    Args:
        layers: of the target; `gates` and `learning` use the same numbers.
        choice: as in the engine's configuration.
        gates: of each layer.
        learning: of the trained predictor; the prefetcher closes it.
    """
    most = experts if isinstance(experts, int) else max(experts, default=0)
    limit = min(2 * per_token, most)
    makers: dict[str, Callable[[], Predictor]] = {
        "previous": lambda: PreviousToken(layers),
        "correlation": lambda: Correlation(layers, most, limit),
    }
    if any(gate is not None for gate in gates):
        makers["gate"] = lambda: NextGate(gates, limit)
    wanted = [name for name in makers if choice in ("auto", name)]
    learns = learning is not None and choice in ("auto", "mlp")
    if layers < 2 or not (wanted or learns):
        if learning is not None:
            learning.close()
        return None
    if learning is not None and not learns:
        learning.close()
    return Prefetcher(
        target,
        [makers[name]() for name in wanted],
        times,
        layers=layers,
        experts=experts,
        per_token=per_token,
        choice=choice,
        learning=learning if learns else None,
        pools=pools,
    )
