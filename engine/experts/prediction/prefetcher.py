"""Prefetches experts with the predictor that gains most time, or not at all if none gains any.

DuoServe uses one trained predictor; here all predictors that a model supports are measured on its own routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from engine.common.clock import read
from engine.experts.prediction.mlp import Learning
from engine.experts.prediction.predictors import Correlation, Gate, NextGate, Predictor, PreviousToken, Ranked
from engine.experts.prediction.score import Distance, PredictionReport, Score, Worth, adopt, bucket_of
from engine.experts.prediction.target import Aging, PrefetchTarget, PrefetchTimes

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
