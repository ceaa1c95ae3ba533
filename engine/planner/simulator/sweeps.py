"""Sweeps through a model's layers, simulated: a schedule's work takes its seconds on a timeline.

The schedules are those that the executor runs (`engine.planner.schedules`), issued in the same order.  What is issued
waits until the card has done what was issued to it before: then a buffer that is to be filled is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.planner.schedules import Schedule
from engine.planner.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy over the link.

    Attributes:
        seconds: that it takes; nbytes: that it moves.
        disk_s: that reading it takes before, from a window of layers in RAM that slides ahead: it waits for nothing.
    """

    seconds: float = 0.0
    nbytes: float = 0.0
    disk_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What the parts of one layer take, all of one micro-batch where not said otherwise; modelled, or timed.

    Attributes:
        count: micro-batches.
        before_s, between_s, after_s: up to attention, from there to the experts, and behind them; on the card.
        attention_s: on the CPU, on one thread with other attention.
        card_attention_s: on the card, once keys and values are there.
        experts_s: on the card, all weights there.
        expert_s: of one expert, for all micro-batches at once.
        host_experts_s: on the CPU.
        queries, attended: states on their way to CPU attention, and back.
        hidden: states on their way to experts on the CPU, and back again.
        cache, new_cache: keys and values to the card, and new ones back to RAM.
        dense: the layer's weights beside its experts, if they do not stay on the card.
        expert: one expert, as far as it does not stay there.
        host_disk_s: reading the experts that the CPU computes.
        experts, wanted, hot: of the layer, those of them that any row wants, and those that are brought before that is
            known, all of which are wanted.
    """

    count: int
    before_s: float
    experts_s: float
    expert_s: float
    expert: Copy
    experts: int
    wanted: int
    hot: int
    between_s: float = 0.0
    after_s: float = 0.0
    attention_s: float = 0.0
    card_attention_s: float = 0.0
    host_experts_s: float = 0.0
    host_disk_s: float = 0.0
    queries: Copy = Copy()
    attended: Copy = Copy()
    hidden: Copy = Copy()
    cache: Copy = Copy()
    new_cache: Copy = Copy()
    dense: Copy = Copy()


@dataclass(frozen=True, slots=True)
class SweepParts:
    """A sweep of which the parts were timed.

    Attributes:
        layers: of the model.
        times: of each of them.
        outside_s: of the whole sweep, outside its layers.
    """

    layers: int
    times: LayerTimes
    outside_s: float = 0.0


@dataclass(slots=True)
class _Half:
    """Weights of a layer on the card.

    Attributes:
        dense: when those beside its experts are there; None if nobody has asked for them.
        experts: when each of its experts is, in the order in which they were brought.
    """

    dense: float | None = None
    experts: list[float] = field(default_factory=list)

    @property
    def there(self) -> float:
        return max([self.dense or 0.0, *self.experts[-1:]])


class SimulatedCard:
    """What is on a card from sweep to sweep.

    Attributes:
        ends: when each layer so far was left by its last micro-batch.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.ends: list[float] = []
        self._halves: dict[int, _Half] = {}

    def half(self, index: int) -> _Half:
        """A layer's, until it is left."""
        return self._halves.setdefault(index, _Half())

    def put(self, index: int, times: LayerTimes) -> None:
        """A layer's weights, there from the beginning."""
        self._halves[index] = _Half(0.0, [0.0] * times.experts)

    def leave(self, index: int, *, keep: bool) -> None:
        """The buffer is free for another layer."""
        if not keep:
            self._halves.pop(index, None)

    def sweep(self, schedule: Schedule, times: LayerTimes, layers: int) -> None:
        """One more sweep, all of whose layers take the same.

        Raises:
            ValueError: the schedule has no order of its own.
        """
        if schedule.order is None:
            raise ValueError(f"{schedule.name} is not simulated by layers")
        states = [0.0] * times.count
        works = [_SimulatedLayer(self, schedule, times, index, layers, states) for index in range(layers)]
        for _ in schedule.order(works):
            pass


class _SimulatedLayer:
    """See `LayerWork`.

    Args:
        states: when each micro-batch's hidden states are ready, from layer to layer.
    """

    def __init__(
        self,
        card: SimulatedCard,
        schedule: Schedule,
        times: LayerTimes,
        index: int,
        layers: int,
        states: list[float],
    ) -> None:
        self._card, self._schedule, self._times = card, schedule, times
        self._timeline, self._index, self._next = card.timeline, index, (index + 1) % layers
        self._states = states
        self._caches: dict[int, float] = {}
        self._computed: set[int] = set()
        self._left = 0

    @property
    def count(self) -> int:
        return self._times.count

    def begin(self, number: int) -> None:
        after = max(self._states[number], self._card.half(self._index).dense or 0.0)
        self._run(number, "gpu", self._times.before_s, "projections", after)

    def attend_in_ram(self, number: int, *, behind_weights: bool = False) -> None:
        times = self._times
        self._copy(number, "d2h", times.queries, "qkv")
        self._run(number, "cpu_attention", times.attention_s, "attention")
        if behind_weights:
            self._states[number] = max(self._states[number], self._timeline.free_at("h2d"))
        self._copy(number, "h2d" if behind_weights else "small_copy", times.attended, "hidden")

    def take_attended(self, number: int) -> None:
        self._run(number, "gpu", self._times.between_s, "gates")

    def fetch_cache(self, number: int) -> None:
        self._caches[number] = self._bring(self._times.cache, "kv", self._index)

    def attend_on_device(self, number: int) -> None:
        times = self._times
        self._run(number, "gpu", times.card_attention_s, "attention", self._caches.pop(number))
        new = times.new_cache
        self._timeline.run(
            "d2h", new.seconds, "kv", self._states[number], layer=self._index, expert=-1, nbytes=new.nbytes
        )
        self._run(number, "gpu", times.between_s, "gates")

    def bring_page(self, page: int, pages: int) -> None:
        self._bring_experts(self._index, self._times.experts)
        if self._next != self._index:
            if page == 0:
                self._bring_dense(self._next)
            self._bring_experts(self._next, (page + 1) * self._times.experts // pages)

    def bring_layer(self) -> None:
        self._bring_dense(self._index)
        self._bring_experts(self._index, self._times.experts)

    def bring_hot(self, *, of_next: bool = False) -> None:
        index = self._next if of_next else self._index
        self._bring_dense(index)
        self._bring_experts(index, self._times.hot, together=False)

    def bring_wanted(self) -> None:
        self._bring_experts(self._index, self._times.wanted, together=False)

    def compute_together(self, numbers: Sequence[int]) -> None:
        times, arrived = self._times, self._card.half(self._index).experts
        done = max(self._states[number] for number in numbers)
        seconds = times.expert_s if len(numbers) == self.count else times.experts_s * len(numbers) / times.wanted
        for expert in range(times.wanted):
            there = max(done, arrived[expert] if expert < len(arrived) else 0.0)
            done = self._timeline.run("gpu", seconds, "expert", there, layer=self._index, expert=expert)
        for number in numbers:
            self._states[number] = done
        self._computed.update(numbers)

    def compute_in_ram(self, number: int) -> None:
        times = self._times
        self._copy(number, "d2h", times.hidden, "hidden")
        self._run(number, "disk", times.host_disk_s, "experts")
        self._run(number, "cpu_experts", times.host_experts_s, "experts")
        self._copy(number, "small_copy", times.hidden, "hidden")
        self._computed.add(number)

    def finish(self, number: int) -> None:
        times = self._times
        if number not in self._computed:
            if self._schedule.whole_layers:
                self._bring_experts(self._index, times.experts)
            self._run(number, "gpu", times.experts_s, "experts", self._card.half(self._index).there)
        self._run(number, "gpu", times.after_s, "sums")
        self._left += 1
        if self._left == self.count:
            self._card.ends.append(max(self._states))
            self._card.leave(self._index, keep=self._next == self._index)

    def _run(self, number: int, lane: str, seconds: float, name: str, after: float = 0.0) -> None:
        """Something that a micro-batch goes through."""
        begin = max(self._states[number], after)
        self._states[number] = self._timeline.run(lane, seconds, name, begin, layer=self._index)

    def _copy(self, number: int, lane: str, copy: Copy, name: str) -> None:
        self._states[number] = self._timeline.run(
            lane, copy.seconds, name, self._states[number], layer=self._index, nbytes=copy.nbytes
        )

    def _bring_dense(self, index: int) -> None:
        half = self._card.half(index)
        if half.dense is None:
            half.dense = self._bring(self._times.dense, "weights", index)

    def _bring_experts(self, index: int, reached: int, *, together: bool = True) -> None:
        """Until so many of a layer's are on their way: in one piece, or one by one."""
        arrived = self._card.half(index).experts
        while len(arrived) < reached:
            count = reached - len(arrived) if together else 1
            arrived += [self._bring(self._times.expert, "experts", index, len(arrived), count)] * count

    def _bring(self, copy: Copy, name: str, layer: int, expert: int = -1, count: int = 1) -> float:
        """Weights, or keys and values, on their way to the card."""
        issued, nbytes = self._timeline.free_at("gpu"), copy.nbytes * count
        if copy.disk_s:
            read = self._timeline.run("disk", copy.disk_s * count, name, layer=layer, count=count, nbytes=nbytes)
            issued = max(issued, read)
        return self._timeline.run(
            "h2d", copy.seconds * count, name, issued, layer=layer, expert=expert, count=count, nbytes=nbytes
        )


def predicted_seconds(schedule: Schedule, sweeps: Sequence[SweepParts]) -> float | None:
    """Seconds of sweeps, one after the other, on a card that has nothing yet; None if that is not simulated."""
    if schedule.order is None:
        return None
    card = SimulatedCard(Timeline(record=False))
    for sweep in sweeps:
        card.sweep(schedule, sweep.times, sweep.layers)
        card.timeline.run("gpu", sweep.outside_s, "outside")
    return card.timeline.free_at("gpu")
