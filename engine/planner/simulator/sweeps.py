"""The engine's own orders of a sweep, simulated from the times of a layer's parts.

They are those of `engine.runtime.batch.pipeline.schedules`, work issued in the same order: what a plan is made of comes
from data sheets, this from parts that were timed by themselves, so that a schedule can be held against what overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.planner.simulator.timeline import Timeline

_AHEAD = 2


@dataclass(frozen=True, slots=True)
class SweepParts:
    """Seconds of the parts of one layer in one sweep: of one micro-batch, where not said otherwise.

    Attributes:
        layers, count: of the model, and micro-batches.
        before_s, between_s, after_s: up to attention, from there to the experts, and behind them.
        attention_s: on the CPU, states on their way there and back included.
        card_attention_s: on the card, once keys and values are there.
        cache_s: keys and values to the card.
        experts_s: of one micro-batch, all weights there.
        together_s: of all micro-batches, expert after expert.
        weights_s: a whole layer over the link.
        wanted, hot: parts of a layer's experts that any row wants, and that are brought before that is known.
        outside_s: of a whole sweep, outside its layers.
    """

    layers: int
    count: int
    before_s: float
    between_s: float
    after_s: float
    attention_s: float
    card_attention_s: float
    cache_s: float
    experts_s: float
    together_s: float
    weights_s: float
    wanted: float
    hot: float
    outside_s: float


@dataclass(slots=True)
class _State:
    """Between two sweeps.

    Attributes:
        weights: when the first layer's are on the card; hot: when the hot ones of them are.
    """

    weights: float = 0.0
    hot: float = 0.0


Order = Callable[[Timeline, SweepParts, _State], None]


def predicted_seconds(schedule: str, sweeps: Sequence[SweepParts]) -> float | None:
    """Seconds of sweeps, one after the other, by a schedule; None if that is not simulated.

    Args:
        schedule: a name in `ORDERS`.
    """
    order = ORDERS.get(schedule)
    if order is None:
        return None
    timeline, state = Timeline(record=False), _State()
    if sweeps:  # nothing is there yet
        state.weights = timeline.run("h2d", sweeps[0].weights_s, "weights")
        state.hot = sweeps[0].hot * sweeps[0].weights_s
    for parts in sweeps:
        order(timeline, parts, state)
        timeline.run("gpu", parts.outside_s, "outside")
    return timeline.free_at("gpu")


def _ahead(pages: int | None) -> Order:
    """CGOPipe; with one page the next layer's weights come in one piece."""

    def order(timeline: Timeline, parts: SweepParts, state: _State) -> None:
        count, layers = parts.count, parts.layers
        split = pages or count
        lead = min(_AHEAD, count)
        attended: dict[int, float] = {}
        weights = coming = state.weights

        def bring(page: int) -> None:
            nonlocal coming
            if page < split:
                coming = timeline.run("h2d", parts.weights_s / split, "page", timeline.free_at("gpu"))

        def begin(place: int) -> None:
            if place < layers * count:
                projected = timeline.run("gpu", parts.before_s, "projections")
                attended[place] = timeline.run("cpu_attention", parts.attention_s, "attention", projected)

        for page in range(_AHEAD):
            bring(page)
        for place in range(lead):
            begin(place)
        for place in range(layers * count):
            index, number = divmod(place, count)
            timeline.run("gpu", parts.between_s, "projections", attended.pop(place))
            timeline.run("gpu", parts.experts_s, "experts", weights)
            timeline.run("gpu", parts.after_s, "sums")
            if number < count - 1:
                bring(number + _AHEAD)
            else:
                weights = coming
                if index + 1 < layers:
                    for page in range(_AHEAD):
                        bring(page)
            begin(place + lead)
        state.weights = weights

    return order


def _s3(timeline: Timeline, parts: SweepParts, state: _State) -> None:
    weights = state.weights
    for _ in range(parts.layers):
        coming = timeline.run("h2d", parts.weights_s, "weights", timeline.free_at("gpu"))
        for _number in range(parts.count):
            projected = timeline.run("gpu", parts.before_s, "projections")
            attended = timeline.run("cpu_attention", parts.attention_s, "attention", projected)
            # What was attended comes back behind the weights.
            timeline.run("gpu", parts.between_s, "projections", max(attended, timeline.free_at("h2d")))
            timeline.run("gpu", parts.experts_s, "experts", weights)
            timeline.run("gpu", parts.after_s, "sums")
        weights = coming
    state.weights = weights


def _s4(timeline: Timeline, parts: SweepParts, state: _State) -> None:
    weights = state.weights
    for _ in range(parts.layers):
        weights_next = timeline.run("h2d", parts.weights_s, "weights", timeline.free_at("gpu"))
        coming = timeline.run("h2d", parts.cache_s, "kv", timeline.free_at("gpu"))
        for number in range(parts.count):
            cache = coming
            if number + 1 < parts.count:
                coming = timeline.run("h2d", parts.cache_s, "kv", timeline.free_at("gpu"))
            timeline.run("gpu", parts.before_s, "projections")
            timeline.run("gpu", parts.card_attention_s, "attention", cache)
            timeline.run("gpu", parts.between_s, "projections")
            timeline.run("gpu", parts.experts_s, "experts", weights)
            timeline.run("gpu", parts.after_s, "sums")
        weights = weights_next
    state.weights = weights


def _hot(*, reordered: bool) -> Order:
    """Klotski, and the step before it."""

    def order(timeline: Timeline, parts: SweepParts, state: _State) -> None:
        hot = state.hot
        cold_s, hot_s = max(0.0, parts.wanted - parts.hot) * parts.weights_s, parts.hot * parts.weights_s
        for _ in range(parts.layers):
            attended: list[float] = []

            def begin(attended: list[float] = attended) -> None:
                if len(attended) < parts.count:
                    projected = timeline.run("gpu", parts.before_s, "projections")
                    attended.append(timeline.run("cpu_attention", parts.attention_s, "attention", projected))

            begin()
            begin()
            for number in range(parts.count):
                timeline.run("gpu", parts.between_s, "gates", attended[number])
                begin()
            gates = timeline.free_at("gpu")
            link_begun = max(gates, timeline.free_at("h2d"))
            arrived = timeline.run("h2d", cold_s, "cold experts", gates)
            coming = timeline.run("h2d", hot_s, "hot experts", gates)
            if reordered:
                _compute_as_they_arrive(timeline, parts, hot, link_begun)
            else:
                for _number in range(parts.count):
                    timeline.run("gpu", parts.experts_s, "experts", max(hot, arrived))
            for _number in range(parts.count):
                timeline.run("gpu", parts.after_s, "sums")
            hot = coming
        state.hot = hot

    return order


def _compute_as_they_arrive(timeline: Timeline, parts: SweepParts, hot: float, link_begun: float) -> None:
    """Hot experts first, then the others, each as soon as it is there; in 16 pieces."""
    pieces, early = 16, min(1.0, parts.hot / max(parts.wanted, 1e-9))
    timeline.run("gpu", parts.together_s * early, "experts", hot)
    cold_s = max(0.0, parts.wanted - parts.hot) * parts.weights_s
    for piece in range(1, pieces + 1):
        there = link_begun + cold_s * piece / pieces
        timeline.run("gpu", parts.together_s * (1 - early) / pieces, "experts", there)


ORDERS: Mapping[str, Order] = {
    "cgopipe": _ahead(None),
    "multi-batch": _ahead(1),
    "s3": _s3,
    "s4": _s4,
    "hot-only": _hot(reordered=False),
    "klotski": _hot(reordered=True),
}
"""By the names of `engine.runtime.batch.pipeline.schedules.Schedule`."""
