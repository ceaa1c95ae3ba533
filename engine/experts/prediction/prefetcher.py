"""Brings experts before they are wanted, as the predictor says that gains most; none if none gains.

DuoServe predicts with one trained predictor; here all that a model allows are measured on its own routing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from engine.experts.prediction.aging import Aging
from engine.experts.prediction.learning import Learning
from engine.experts.prediction.predictors import Correlation, Gate, NextGate, Predictor, PreviousToken, Ranked
from engine.experts.prediction.score import Adoption, Distance, PredictionReport, Score, Worth, bucket_of
from engine.experts.prediction.target import PrefetchTarget, PrefetchTimes
from engine.experts.replay.trace_file import RoutingTrace

_EVALUATED_STEPS = 16
_WIDEST = 8
"""Tokens' experts at most: a step of more is as good as a prompt, which wants nearly all of them."""
_FIRST_STEPS = 32
"""At the start all predictors are watched in every step; later as often as `_WATCH_BUDGET_S` allows."""
_WATCH_BUDGET_S = 1e-6
"""For each layer of each step and each predictor that is not in use, on average."""
_RAREST = 512
_LEARNING = 8
"""Predictors that learn by counting see so many times more steps than they are compared in."""


class Prefetcher:
    """For one target.  All but `report` are called from the thread that decodes.

    Args:
        predictors: to choose from.
        times: what a prefetch takes and saves, as it is known now.
        layers: of the target.
        experts: the most of any layer.
        per_token: experts that a token is routed to.
        choice: the name of the predictor to use; `auto` for the one that gains most.
        learning: of the trained predictor, if there is to be one; closed with this.
        pools: of each layer, which pool of slots its experts come into; None if all share one.
    """

    def __init__(
        self,
        target: PrefetchTarget,
        predictors: Sequence[Predictor],
        times: Callable[[], PrefetchTimes],
        *,
        layers: int,
        experts: int,
        per_token: int,
        choice: str = "auto",
        learning: Learning | None = None,
        pools: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target, self._clock = target, clock
        self._layers, self._per_token = layers, per_token
        self._all_experts = range(experts)
        self._scores = [Score(predictor, per_token) for predictor in predictors]
        self._adoption = Adoption(None if choice == "auto" else choice)
        self._aging = Aging(pools if pools is not None else [0] * layers, experts)
        self._distance = Distance(layers)
        self._steps = 0
        self._last_layer, self._last_s = layers, 0.0
        self._worth = Worth(times, per_token)
        self._prefetched = self._used = 0
        self._watched: list[Score] = []
        self._observing: list[Score] = []
        # Of coming layers: what each watched predictor said and who was absent; who was predicted; who was brought.
        self._claims: dict[int, tuple[frozenset[int], list[tuple[Score, Ranked]]]] = {}
        self._foretold: dict[int, set[int]] = {}
        self._brought: dict[int, list[int]] = {}
        self._observing_s: dict[Score, float] = {}
        self._learning = learning
        if learning is not None and (learnt := learning.load()) is not None:
            self.replace(learnt)
        self._adopt()

    @property
    def adopted(self) -> str | None:
        """Name of the predictor in use."""
        adopted = self._adoption.adopted
        return adopted.predictor.name if adopted is not None else None

    @property
    def ahead(self) -> int:
        """How many layers ahead experts are brought."""
        return self._distance.layers

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """A decode step's layer has been routed and its work handed out: learns, and begins what will be wanted.

        Args:
            experts: distinct, all that the step's tokens were routed to.
            hidden: [T, H], what enters the experts, on any device; it may be written to after this call.
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
        adopted = self._adoption.adopted
        if adopted is not None:
            self._aging.use(layer, experts, self._steps)
        coming = layer + self._distance.layers
        if coming >= self._layers:
            coming -= self._layers
            if coming >= layer:
                return  # fewer layers than the distance: it would predict this one
        if self._watched:
            self._watch(coming, adopted)
        elif adopted is not None:
            self._bring(coming, adopted.predictor.predict(coming), adopted)

    def replace(self, predictor: Predictor) -> None:
        """Takes a predictor in, in place of the one of that name if there is one; it has yet to prove itself."""
        name = predictor.name
        self._scores = [score for score in self._scores if score.predictor.name != name]
        self._scores.append(Score(predictor, self._per_token))
        self._adopt()

    def learn_while_idle(self) -> bool:
        """Begins to train in the background, if there is anything new to learn; whether it has begun.

        Not from inside a step.  The predictor is taken over in a later step, and a step may come at any time.
        """
        return self._learning is not None and self._learning.begin(self.ahead)

    def close(self) -> None:
        """Ends threads and training.  Harmless if repeated."""
        if self._learning is not None:
            self._learning.close()

    def report(self) -> PredictionReport:
        """What has been done so far."""
        brought = sum(len(experts) for experts in list(self._brought.values()))
        return PredictionReport(
            adopted=self.adopted,
            ahead=self.ahead,
            steps=self._steps,
            prefetched=self._prefetched,
            used=self._used,
            wasted=max(0, self._prefetched - self._used - brought),
            predictors=tuple(score.report(self._layers) for score in self._scores),
            is_training=self._learning is not None and self._learning.is_training,
            note=self._learning.note if self._learning is not None else None,
        )

    def _begin_step(self) -> None:
        self._steps += 1
        # What was said of layers that never came, because the step before was cut short.
        first_of_next = self.ahead
        for claims in (self._claims, self._foretold, self._brought):
            for layer in [layer for layer in claims if layer >= first_of_next]:
                del claims[layer]
        if self._steps % _EVALUATED_STEPS == 0:
            self._evaluate()
            if self._learning is not None and (learnt := self._learning.finished()) is not None:
                self.replace(learnt)
        step, adopted = self._steps, self._adoption.adopted
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
        """What was predicted of this layer is compared with what it wants."""
        brought = self._brought.pop(layer, None)
        if brought is not None:
            in_vain = [expert for expert in brought if expert not in experts]
            self._used += len(brought) - len(in_vain)
            self._aging.in_vain(layer, in_vain, self._steps)
        self._foretold.pop(layer, None)
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
        """All watched predictors say what they would bring, and the adopted one brings it."""
        clock = self._clock
        begun_s = clock()
        absent = frozenset(self._target.absent(coming, self._all_experts))
        looked_s = clock() - begun_s
        self._worth.look(self._distance.lead_s, self._target.backlog_bytes)
        said: list[tuple[Score, Ranked]] = []
        for score in self._watched if adopted is None or adopted in self._watched else [*self._watched, adopted]:
            begun_s = clock()
            ranked = score.predictor.predict(coming)
            score.time(self._observing_s.get(score, 0.0), clock() - begun_s)
            score.interval = _interval(score.cost_s + looked_s)
            said.append((score, ranked))
        self._claims[coming] = absent, said
        if adopted is not None:
            self._bring(coming, next((ranked for score, ranked in said if score is adopted), ()), adopted)

    def _bring(self, layer: int, ranked: Ranked, adopted: Score) -> None:
        """Begins to bring those predicted whose bringing pays, as many as arrive in time."""
        if not ranked:
            return
        begun_s = self._clock()
        self._foretold[layer] = {expert for expert, _ in ranked}
        accepts = adopted.accepts
        worthy = [expert for expert, probability in ranked if accepts[bucket_of(probability)]]
        if not (worthy or self._adoption.is_free):
            worthy = [expert for expert, _ in ranked[: self._per_token]]
        if worthy and (absent := self._target.absent(layer, worthy)):
            self._prefetch(layer, absent[: self._room()])
        self._worth.called(self._clock() - begun_s)

    def _room(self) -> int:
        """How many prefetches that begin now save anything."""
        room = self._worth.times.room(self._distance.lead_s, self._target.backlog_bytes)
        return room if self._adoption.is_free else max(room, 1)

    def _prefetch(self, layer: int, experts: list[int]) -> None:
        if not experts:
            return
        aging, step = self._aging, self._steps
        dead = aging.dead(layer, len(experts), step, self._foretold, self._target)
        begun = self._target.prefetch(layer, experts, aging.leaving(dead, step))
        self._worth.asked(len(experts), begun)
        if begun:
            self._prefetched += begun
            self._brought[layer] = experts[:begun]
            aging.brought(layer, experts[:begun], step)

    def _evaluate(self) -> None:
        missing = max((score.missing for score in self._scores), default=0.0)
        now = self._worth.now(missing, self._distance.layer_s, self._layers, self._aging)
        for score in self._scores:
            score.evaluate(now)
        self._adopt()
        if self._distance.choose(self._worth.times, missing):
            for claims in (self._claims, self._foretold, self._brought):
                claims.clear()
            self._worth.changed()
            for score in self._scores:
                score.forget()

    def _adopt(self) -> None:
        adopted = self._adoption.decide(self._scores, self._distance.layer_s * self._layers)
        if adopted is None:  # then who is there is not followed
            self._aging.clear()
            self._aging.fade()
            self._worth.doubt()


def _interval(cost_s: float) -> int:
    """The least power of two of steps that keeps the cost within its budget."""
    return int(min(_RAREST, 2 ** max(0, math.ceil(math.log2(max(cost_s, 1e-9) / _WATCH_BUDGET_S)))))


def make_prefetcher(
    target: PrefetchTarget,
    times: Callable[[], PrefetchTimes],
    *,
    layers: int,
    experts: int,
    per_token: int,
    choice: str = "auto",
    gates: Sequence[Gate | None] = (),
    learning: Learning | None = None,
    trace: RoutingTrace | None = None,
    pools: Sequence[int] | None = None,
) -> Prefetcher | None:
    """See `Prefetcher`; None if `choice` is `off`, or there is nothing to predict or nobody who could.

    Args:
        layers: of the target; its numbers are those of `gates`, `trace` and `learning` too.
        choice: as in the engine's configuration.
        gates: of each layer.
        learning: of the trained predictor; the prefetcher closes it.
        trace: that the correlation table starts from.
    """
    limit = min(2 * per_token, experts)
    makers: dict[str, Callable[[], Predictor]] = {
        "previous": lambda: PreviousToken(layers),
        "correlation": lambda: Correlation(layers, experts, limit, trace=trace),
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
