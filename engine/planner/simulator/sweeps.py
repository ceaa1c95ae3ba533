"""Simulated sweeps through a model's layers: each part of a schedule takes its seconds on a timeline.

The schedules are the executor's (`engine.planner.schedules`), issued in the same order.  A transfer waits until the
card has finished the work issued before it, because only then is the target buffer free.

Resources that do one thing at a time, and the spans of their work.

Work is issued in program order, as into a device's streams: a span begins once its resource has finished all earlier
work and everything it waits for has ended.  Timelines are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.common.lanes import WORK
from engine.planner.costs import Cards, Costs, most_on_one
from engine.planner.schedules import Schedule

LANES = WORK
"""Lanes of a timeline.  `small_copy` copies small results to the card alongside `h2d`'s weights, on a second stream."""

_RESOURCE = {"cpu_experts": "cpu", "cpu_attention": "cpu"}


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one resource; times in seconds from the start.

    Attributes:
        lane: one of `LANES`.
        ready: when everything it waits for had ended; never after `start`.
        name: kind of work.
        layer, expert, step: indices; -1 where not applicable.
        count: experts computed or read together; rows of a phase.
        nbytes: size of a copy or a read.
        card: whose lane it is, where several have one each.
    """

    lane: str
    start: float
    end: float
    name: str
    layer: int
    expert: int
    step: int
    ready: float
    count: int = 1
    nbytes: int = 0
    card: int = 0


class Timeline:
    """The work issued so far."""

    def __init__(self, *, record: bool = True) -> None:
        self.spans: list[Span] = []
        self.end = 0.0
        self._record = record
        self._free: dict[tuple[str, int], float] = {}
        self._busy: dict[tuple[str, int], float] = {}

    def run(
        self,
        lane: str,
        seconds: float,
        name: str,
        after: float = 0.0,
        *,
        layer: int = -1,
        expert: int = -1,
        step: int = -1,
        count: int = 1,
        nbytes: float = 0.0,
        card: int = 0,
    ) -> float:
        """Issues work that waits for `after`; returns when it ends.

        Args:
            card: whose lane it is, where several have one each.
        """
        if seconds <= 0:
            return after
        resource = _RESOURCE.get(lane, lane), card
        start = max(self._free.get(resource, 0.0), after)
        end = start + seconds
        self._free[resource] = end
        self._busy[lane, card] = self._busy.get((lane, card), 0.0) + seconds
        if end > self.end:
            self.end = end
        if self._record:
            self.spans.append(Span(lane, start, end, name, layer, expert, step, after, count, round(nbytes), card))
        return end

    def mark(self, name: str, start: float, end: float, *, step: int = -1, count: int = 1) -> None:
        """Marks a phase of `count` rows: prefill, or one step of decode."""
        if self._record and end > start:
            self.spans.append(Span("phase", start, end, name, -1, -1, step, start, count))

    def free_at(self, lane: str, card: int = 0) -> float:
        """When the work issued to this lane's resource so far ends."""
        return self._free.get((_RESOURCE.get(lane, lane), card), 0.0)

    def busy_s(self, lane: str) -> float:
        """Seconds of work in a lane so far: of the busiest card."""
        return max((took for (name, _), took in self._busy.items() if name == lane), default=0.0)


@dataclass(frozen=True, slots=True)
class CopyCost:
    """A copy over the link.

    Attributes:
        seconds: duration; nbytes: size.
        disk_s: duration of reading it from disk first, into a window of layers in RAM that slides ahead: this waits for
            nothing.
    """

    seconds: float = 0.0
    nbytes: float = 0.0
    disk_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of the parts of one layer, modelled or measured, each for one micro-batch unless stated otherwise.

    Attributes:
        count: micro-batches.
        before_s, between_s, after_s: up to attention, from there to the experts, and after them; on the card.
        attention_s: on the CPU, by the thread of all CPU attention.
        card_attention_s: on the card, once keys and values are there.
        experts_s: on the card, with all weights there.
        expert_s: one expert, for all micro-batches at once.
        host_experts_s: on the CPU.
        queries, attended: transfer of states to CPU attention, and of its output back.
        hidden, outputs: transfer of states to experts on the CPU, and of what each of them makes of each row back.
        cache, new_cache: keys and values to the card, and new ones back to RAM.
        dense: the layer's weights other than experts, if they do not stay on the card.
        expert: one expert, without the part that stays on the card.
        host_disk_s: reading the experts that the CPU computes from disk.
        experts, wanted, hot: experts of the layer, those that any row uses, and those that are fetched before that is
            known, all of which are used.
    """

    count: int
    before_s: float
    experts_s: float
    expert_s: float
    expert: CopyCost
    experts: int
    wanted: int
    hot: int
    between_s: float = 0.0
    after_s: float = 0.0
    attention_s: float = 0.0
    card_attention_s: float = 0.0
    host_experts_s: float = 0.0
    host_disk_s: float = 0.0
    queries: CopyCost = CopyCost()
    attended: CopyCost = CopyCost()
    hidden: CopyCost = CopyCost()
    outputs: CopyCost = CopyCost()
    cache: CopyCost = CopyCost()
    new_cache: CopyCost = CopyCost()
    dense: CopyCost = CopyCost()


@dataclass(frozen=True, slots=True)
class SweepParts:
    """A sweep with timed parts.

    Attributes:
        layers: number of layers.
        times: of each layer.
        outside_s: time of the whole sweep spent outside the layers.
    """

    layers: int
    times: LayerTimes
    outside_s: float = 0.0


@dataclass(slots=True)
class _Half:
    """Buffer for one layer's weights on the card.

    Attributes:
        dense: when the weights other than experts arrive; None if not requested yet.
        experts: when each expert arrives, in order of transfer.
    """

    dense: float | None = None
    experts: list[float] = field(default_factory=list)

    @property
    def there(self) -> float:
        return max([self.dense or 0.0, *self.experts[-1:]])


class SimulatedCard:
    """State of a card between sweeps.

    Attributes:
        ends: when the last micro-batch left each layer so far.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.ends: list[float] = []
        self._halves: dict[int, _Half] = {}

    def half(self, index: int) -> _Half:
        """The buffer of a layer, until `leave`."""
        return self._halves.setdefault(index, _Half())

    def put(self, index: int, times: LayerTimes) -> None:
        self._halves[index] = _Half(0.0, [0.0] * times.experts)

    def leave(self, index: int, *, keep: bool) -> None:
        """Frees the buffer for another layer."""
        if not keep:
            self._halves.pop(index, None)

    def sweep(self, schedule: Schedule, times: LayerTimes, layers: int) -> None:
        """Simulates one more sweep, with equal times for all layers.

        Raises:
            ValueError: the schedule defines no order of layers.
        """
        if schedule.order is None:
            raise ValueError(f"{schedule.name} defines no order of layers to simulate")
        states = [0.0] * times.count
        works = [_SimulatedLayer(self, schedule, times, index, layers, states) for index in range(layers)]
        for _ in schedule.order(works):
            pass


class _SimulatedLayer:
    """See `LayerWork`.

    Args:
        states: when each micro-batch's hidden states are ready, carried from layer to layer.
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
        self._copy(number, "small_copy", times.outputs, "hidden")
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
        """Issues a step that depends on the micro-batch's states."""
        begin = max(self._states[number], after)
        self._states[number] = self._timeline.run(lane, seconds, name, begin, layer=self._index)

    def _copy(self, number: int, lane: str, copy: CopyCost, name: str) -> None:
        self._states[number] = self._timeline.run(
            lane, copy.seconds, name, self._states[number], layer=self._index, nbytes=copy.nbytes
        )

    def _bring_dense(self, index: int) -> None:
        half = self._card.half(index)
        if half.dense is None:
            half.dense = self._bring(self._times.dense, "weights", index)

    def _bring_experts(self, index: int, reached: int, *, together: bool = True) -> None:
        """Issues transfers up to `reached` experts of a layer: in one piece, or one by one."""
        arrived = self._card.half(index).experts
        while len(arrived) < reached:
            count = reached - len(arrived) if together else 1
            arrived += [self._bring(self._times.expert, "experts", index, len(arrived), count)] * count

    def _bring(self, copy: CopyCost, name: str, layer: int, expert: int = -1, count: int = 1) -> float:
        """Issues a transfer of weights, or of keys and values, to the card; returns when it ends."""
        issued, nbytes = self._timeline.free_at("gpu"), copy.nbytes * count
        if copy.disk_s:
            read = self._timeline.run("disk", copy.disk_s * count, name, layer=layer, count=count, nbytes=nbytes)
            issued = max(issued, read)
        return self._timeline.run(
            "h2d", copy.seconds * count, name, issued, layer=layer, expert=expert, count=count, nbytes=nbytes
        )


def predicted_seconds(schedule: Schedule, sweeps: Sequence[SweepParts]) -> float | None:
    """Seconds of consecutive sweeps on an initially empty card; None if the schedule cannot be simulated."""
    if schedule.order is None:
        return None
    card = SimulatedCard(Timeline(record=False))
    for sweep in sweeps:
        card.sweep(schedule, sweep.times, sweep.layers)
        card.timeline.run("gpu", sweep.outside_s, "outside")
    return card.timeline.free_at("gpu")


_ROUTED_BYTES = 8
"""Of a row's choice of an expert: its number and its share."""


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """MoE-Lightning's policy (table 1), which also fixes Klotski's n.

    Attributes:
        sequences: N, sequences of one batch.
        micro_batch: mu, sequences of one kernel launch.
        resident: r_w, share of each layer's weights that stays on the card.
        cpu_attention: A_g = 0.
        cpu_experts: F_g = 0.
        cached: r_c, share of the keys and values that stays on the card.
    """

    sequences: int
    micro_batch: int
    resident: float = 0.0
    cpu_attention: bool = True
    cpu_experts: bool = False
    cached: float = 0.0

    @property
    def micro_batches(self) -> int:
        return -(-self.sequences // self.micro_batch)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """One pass of a batch over one layer.

    Attributes:
        costs: costs of single operations.
        rows: tokens of one micro-batch: its sequences in decode, sequences x prompt in prefill.
        sequences: sequences of one micro-batch.
        context: context tokens of each row.
        prefill: whether rows are prompt tokens.
        disk_share: share of the weights that is read from disk in every pass.
        expanded_attention: CPU attention repeats keys and values for every query head (`Costs.cpu_attention`).
        pinned: weights are in pinned memory.
        page_tokens: of a page of keys and values, which moves as a whole.
        dense_stays: all weights but the experts stay on the card.
    """

    costs: Costs
    rows: float
    sequences: float
    context: float
    prefill: bool
    disk_share: float = 0.0
    expanded_attention: bool = False
    pinned: bool = True
    page_tokens: int = 1
    dense_stays: bool = False

    def times(self, policy: OffloadPolicy) -> LayerTimes:
        costs, model, count = self.costs, self.costs.model, policy.micro_batches
        used = costs.used_experts(self.rows)
        wanted = max(1, round(costs.used_experts(self.rows * count)))
        brought = wanted
        if costs.cards is Cards.EXPERTS:  # as if all cards had as many as the busiest one
            cards = costs.expert_cards
            brought = min(model.experts, round(cards * most_on_one(wanted, cards, model.experts)))
        visits = self.rows * model.experts_per_token
        projections = costs.gpu_layer(self.rows, 0, cached=False)
        states = model.attention.heads * model.attention.head_dim + model.attention.kv_elements
        moved, page = self.context, self.page_tokens
        if page > 1:  # the token's own is new
            moved = math.ceil((moved - 1) / page) * page
        cached = 0.0 if self.prefill else costs.kv_read_bytes(self.sequences, moved)
        leaving, away = costs.kv_read_bytes(self.rows, 1) * (1 - policy.cached), 1 - policy.resident
        hidden, attended = 2.0 * model.hidden, 2.0 * model.attention.heads * model.attention.head_dim
        on_host = visits * away
        # Cards that share experts share heads of keys and values, too.
        is_cut = costs.cards is Cards.EXPERTS and not model.attention.latent
        heads = min(costs.expert_cards, model.attention.kv_heads) if is_cut else 1
        return LayerTimes(
            count,
            before_s=projections,
            attention_s=costs.cpu_attention(self.sequences, self.context, expanded=self.expanded_attention),
            card_attention_s=self._attention() / heads + costs.together(self.rows, heads),
            experts_s=costs.gpu_experts(visits, used),
            expert_s=self._one_of(costs.gpu_experts(visits * count / wanted)),
            host_experts_s=costs.cpu_experts(on_host, used * away),
            host_disk_s=costs.disk(used * costs.expert_bytes * self.disk_share) if self.disk_share else 0.0,
            queries=_to_ram(costs, 2.0 * self.rows * states),
            attended=_to_card(costs, self.rows * attended),
            hidden=_to_ram(costs, self.rows * hidden + visits * _ROUTED_BYTES),
            outputs=_to_card(costs, on_host * hidden),
            cache=_to_card(costs, cached * (1 - policy.cached) / heads),
            new_cache=_to_ram(costs, leaving / heads),
            dense=CopyCost() if self.dense_stays else self._weights(costs.card_layer_bytes * away),
            expert=self._weights(costs.expert_bytes * away, costs.h2d_of_experts),
            experts=model.experts,
            wanted=brought,
            hot=min(model.experts_per_token, brought),
        )

    def _attention(self) -> float:
        if self.prefill:
            # Causal: on average a row attends to half of the prompt.
            return self.costs.card_attention(self.rows, self.context / 2, prompts=self.sequences)
        return self.costs.card_attention(self.rows, self.context)

    def _one_of(self, seconds: float) -> float:
        """Of one expert after another, where each card computes its own."""
        return seconds / self.costs.expert_cards if self.costs.cards is Cards.EXPERTS else seconds

    def _weights(self, nbytes: float, copied: Callable[..., float] | None = None) -> CopyCost:
        disk_s = self.costs.disk(nbytes * self.disk_share) if self.disk_share else 0.0
        copied = copied or self.costs.h2d
        return CopyCost(copied(nbytes, pinned=self.pinned), nbytes, disk_s) if nbytes else CopyCost()


def _to_card(costs: Costs, nbytes: float) -> CopyCost:
    return CopyCost(costs.h2d(nbytes), nbytes) if nbytes else CopyCost()


def _to_ram(costs: Costs, nbytes: float) -> CopyCost:
    return CopyCost(costs.d2h(nbytes), nbytes) if nbytes else CopyCost()
