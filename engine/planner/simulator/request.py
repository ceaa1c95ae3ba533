"""One request at a time (or a few beams): prefill, then decode step by step, expert by expert."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.common.footprint import LAYERS_AT_ONCE
from engine.planner.costs import Cards, Costs
from engine.planner.simulator.strategy import Miss, Prefetch, Residency, SimulatedResidents, Strategy
from engine.planner.simulator.sweeps import LANES, OffloadPolicy, Span, Timeline
from engine.planner.step_time import StepTime, costs_of_step, ways_of_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """A workload under one policy.

    Attributes:
        policy: its name.
        seconds: from reading the first prompt token to delivering the last token.
        ttft_s: time to first token.
        tpot_s: seconds per decode step.
        tokens_out: tokens delivered.
        vram_bytes, ram_bytes: peak memory.
        hit_rate: share of expert uses that hit the card's cache; None where not applicable.
        utilisation: share of the simulated time that each lane was busy.
        slots, ways: of the expert cache.
        batch: the policy if sequences run together.
        cards: how several cards share the model.
        spans: of the part that was simulated span by span; repeated layers and steps appear once.
    """

    policy: str
    seconds: float
    ttft_s: float
    tpot_s: float
    tokens_out: int
    vram_bytes: float
    ram_bytes: float
    hit_rate: float | None = None
    utilisation: dict[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    slots: int = 0
    ways: int = 0
    batch: OffloadPolicy | None = None
    cards: Cards = Cards.LAYERS

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens over the whole time, prefill included."""
        return self.tokens_out / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Decode steps per second: the speed at which text appears."""
        return 1 / self.tpot_s if self.tpot_s > 0 else 0.0

    @property
    def busiest(self) -> str:
        """The lane that is busy for most of the time."""
        return max(self.utilisation, key=lambda lane: self.utilisation[lane], default="")


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Share of the simulated time that each lane was busy."""
    return {lane: timeline.busy_s(lane) / timeline.end for lane in LANES if lane != "phase" and timeline.end > 0}


_NEWEST = 0.1
"""Weight of the newest step in an average."""
_NEARLY_ALL = 0.9
"""Share of a layer's experts from which a prompt is taken to need those of the next one, as the engine takes it."""

Load = Sequence[tuple[int, int]]
"""(expert, rows) of one layer in one pass, most rows first."""
There = list[tuple[float, int, int]]
"""(arrival, expert, rows) of experts that are on a card, or on their way."""


class RequestSimulation:
    """Issues passes through a model under a strategy.

    Args:
        residents: experts on the card; updated during the simulation.
        disk_share: share of the expert bytes that is on disk and has to be read first.
        staging: slots of each card that experts pass through, and those of a prompt's next layer wait in.
    """

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        strategy: Strategy,
        residents: SimulatedResidents,
        *,
        disk_share: float,
        seed: int,
        staging: int = 0,
    ) -> None:
        self._timeline, self._costs, self._strategy, self._residents = timeline, costs, strategy, residents
        self._disk_share = disk_share
        self._of_prompts = costs
        self._ahead = staging if strategy.grouped and not disk_share else 0
        self._staging = max(staging if strategy.grouped else 0, 2 if strategy.overlapped else 1)
        shares_experts = costs.cards is Cards.EXPERTS and costs.model.experts >= costs.expert_cards
        self._cards = costs.expert_cards if shares_experts else 1
        # Each over a link of its own, as far as RAM can be read by all at once.
        copied_s = costs.h2d_of_experts(costs.expert_bytes, pinned=strategy.pinned)
        self._transfer_s = self._cards * copied_s
        self._random = np.random.default_rng(seed)
        self._underway: dict[int, dict[int, float]] = {}
        self._slower = 1.0
        self._end_of_layer = [0.0, 0.0]
        self._layer_begun = 0.0
        self._begun = [0.0]
        self.uses = 0
        self.hits = 0
        held = sum(residents.capacity) / max(1, len(residents.capacity) * costs.model.experts)
        self._miss_ratio = 1 - held  # of steps lately
        self.moe_s = 0.0
        """Seconds of the last pass from its first MoE layer to its last."""

    def run_pass(
        self,
        loads: Sequence[Load],
        following: Load,
        *,
        rows: int,
        context: float,
        after: float,
        step: int,
        prompts: int = 0,
    ) -> float:
        """Simulates all layers once; returns when the last one has ended.

        Args:
            loads: each MoE layer's load.
            following: load of the first layer in the next pass, for prefetching across passes.
            rows: tokens of the pass.
            context: context tokens of each row, of the last row for a prompt.
            prompts: number of prompts that the rows belong to; 0 in a decode step.
        """
        prefill = prompts > 0
        self._costs = self._of_prompts if prefill else self._of_step(rows, context)
        costs, model = self._costs, self._costs.model
        seen = context / 2 if prefill else context
        uses, hits = self.uses, self.hits
        at = self._timeline.run("disk", costs.look_up(rows), "rows", after, step=step)
        for _ in range(model.dense_layers):
            at = self._dense_layer(rows, seen, prompts, self._streamed(at, step), step)
        begun = at
        for layer, load in enumerate(loads):
            coming = loads[layer + 1] if layer + 1 < len(loads) else following
            self._prefetch_at_start((layer + 1) % len(loads), coming, at, step)
            at = self._streamed(at, step)
            if self._on_cpu(layer):
                at = self._cpu_layer(layer, load, rows, seen, prompts, at, step)
                continue
            seconds = costs.gpu_layer(rows, seen, prompts=prompts)
            attended = self._timeline.run("gpu", seconds, "attention", at, layer=layer, step=step)
            at = self._experts(layer, load, rows, attended, step, prefill, coming, len(loads))
            self._end_of_layer = [self._end_of_layer[1], at]
        self.moe_s = at - begun
        if not prefill and self.uses > uses:
            missed = 1 - (self.hits - hits) / (self.uses - uses)
            self._miss_ratio += _NEWEST * (missed - self._miss_ratio)
        at = self._timeline.run("small_copy", costs.pass_on(rows), "cards", at, step=step)
        wanted = prompts or rows
        if self._strategy.host_only:
            return self._timeline.run("cpu_experts", costs.cpu_head(wanted), "head", at, step=step)
        return self._timeline.run("gpu", costs.gpu_head(wanted), "head", at, step=step)

    def _of_step(self, rows: int, context: float) -> Costs:
        """Costs of a decode step: published schedules launch what published programs do, and the engine chooses the way
        that is sooner at the share of misses lately."""
        strategy, costs = self._strategy, self._of_prompts
        if not strategy.grouped:
            return costs
        is_guessing = strategy.prefetch is not Prefetch.NONE or strategy.residency is Residency.NONE
        misses = "" if is_guessing else strategy.miss.value
        has_all = all(held >= costs.model.experts for held in self._residents.capacity)
        if has_all:
            return costs_of_step(costs, misses, rows=rows, has_all=True)
        ways = ways_of_step(costs, misses, rows=rows, disk_share=self._disk_share)
        if len(ways) == 1:
            return ways[0]
        return min(ways, key=lambda way: StepTime(way, context=int(context)).seconds(self._miss_ratio))

    def _dense_layer(self, rows: int, context: float, prompts: int, at: float, step: int) -> float:
        on_host, costs = self._strategy.host_only, self._costs
        layer = costs.cpu_layer if on_host else costs.gpu_layer
        seconds = layer(rows, context, dense=True, prompts=prompts)
        return self._timeline.run("cpu_attention" if on_host else "gpu", seconds, "dense layer", at, step=step)

    def _streamed(self, at: float, step: int) -> float:
        """When a layer's dense weights are there, those that come from disk spread over all: read while the layers
        before are computed, as many as there is room for."""
        costs = self._costs
        nbytes = costs.streamed_bytes / costs.model.layers
        if not nbytes or not self._strategy.host_only:
            return at
        self._begun = [*self._begun[1 - LAYERS_AT_ONCE :], at]
        there = self._timeline.run("disk", costs.disk(nbytes), "layer", self._begun[0], step=step, nbytes=nbytes)
        return max(at, there)

    def _on_cpu(self, layer: int) -> bool:
        return self._strategy.residency is Residency.LAYERS and not self._residents.capacity[layer]

    def _cpu_layer(
        self, layer: int, load: Load, rows: int, context: float, prompts: int, at: float, step: int
    ) -> float:
        run, costs = self._timeline.run, self._costs
        seconds = costs.cpu_layer(rows, context, prompts=prompts)
        # A prompt that uses most of a layer's experts reads them while the previous layer is computed.
        foreseen = prompts and 3 * len(load) >= 2 * costs.model.experts and self._strategy.host_only
        begun, self._layer_begun = self._layer_begun, at
        at = run("cpu_attention", seconds, "attention", at, layer=layer, step=step)
        self.uses += len(load)
        seconds = costs.cpu_experts(sum(rows for _, rows in load), len(load))
        return self._host_experts(load, seconds, at, layer, step, reads_from=begun if foreseen else at)

    def _host_experts(
        self, load: Load, seconds: float, at: float, layer: int, step: int, *, reads_from: float
    ) -> float:
        """Experts in RAM are computed while the others are read, and those as they arrive."""
        run, count = self._timeline.run, len(load)
        if not self._disk_share:
            return run("cpu_experts", seconds, "experts", at, layer=layer, step=step, count=count)
        read = self._from_disk(count, reads_from, layer, step)
        late = seconds * self._disk_share
        arriving = max(1, round(count * self._disk_share))
        there = seconds - late
        at = run("cpu_experts", there, "experts", at, layer=layer, step=step, count=count - arriving)
        last = max(at, read + late / arriving - late)
        return run("cpu_experts", late, "experts", last, layer=layer, step=step, count=arriving)

    def _from_disk(self, experts: int, at: float, layer: int, step: int) -> float:
        if not self._disk_share or not experts:
            return at
        nbytes = experts * self._costs.expert_bytes * self._disk_share
        return self._timeline.run(
            "disk", self._costs.disk(nbytes), "experts", at, layer=layer, step=step, count=experts, nbytes=nbytes
        )

    def _copy(self, layer: int, expert: int, after: float, step: int, name: str = "expert") -> float:
        there = self._from_disk(1, after, layer, step)
        nbytes = self._costs.expert_bytes
        return self._timeline.run(
            "h2d",
            self._transfer_s,
            name,
            there,
            layer=layer,
            expert=expert,
            step=step,
            nbytes=nbytes,
            card=self._card(expert),
        )

    def _card(self, expert: int) -> int:
        return expert * self._cards // self._costs.model.experts

    # Before the router has run

    def _prefetch_at_start(self, layer: int, coming: Load, at: float, step: int) -> None:
        kind = self._strategy.prefetch
        # Two buffers: the one of the previous layer is free now.
        if kind is Prefetch.LAYER:
            experts = self._costs.model.experts
            there = self._from_disk(experts, at, layer, step)
            nbytes = experts * self._costs.expert_bytes / self._cards
            seconds = self._costs.h2d(nbytes, pinned=self._strategy.pinned)
            arrivals = [
                self._timeline.run(
                    "h2d", seconds, "weights", there, layer=layer, step=step, count=experts, nbytes=nbytes, card=card
                )
                for card in range(self._cards)
            ]
            self._underway[layer] = {expert: arrivals[self._card(expert)] for expert in range(experts)}
        elif kind is Prefetch.IDEAL:
            wanted = [expert for expert, _ in coming]
            self._underway[layer] = {expert: self._copy(layer, expert, at, step, "prefetch") for expert in wanted}

    def _predict(self, layer: int, coming: Load, after: float, step: int) -> None:
        experts = self._costs.model.experts
        arriving: dict[int, float] = {}
        for expert, _ in coming:
            right = self._random.random() < self._strategy.prefetch_accuracy
            guess = expert if right else (expert + 1) % experts
            if guess not in arriving:
                arriving[guess] = self._copy(layer, guess, after, step, "prefetch")
        self._underway[layer] = arriving

    # A layer's experts

    def _experts(
        self, layer: int, load: Load, tokens: int, ready: float, step: int, prefill: bool, coming: Load, layers: int
    ) -> float:
        costs = self._costs
        underway = self._underway.pop(layer, {})
        if costs.dispatch.layer_s and self._is_shared(layer):
            ready = self._timeline.run("small_copy", costs.dispatch.layer_s, "routing", ready, layer=layer, step=step)
        there: list[There] = [[] for _ in range(self._cards)]
        misses: list[list[tuple[int, int]]] = [[] for _ in range(self._cards)]
        ids = [expert for expert, _ in load]
        for expert, rows in load:
            arrival = self._residents.arrival(layer, expert)
            if arrival is not None and arrival > ready and not self._strategy.waits_for_arrival:
                arrival = None
            if arrival is not None:
                self.hits += 1
            elif expert in underway:
                arrival = underway[expert]
            if arrival is None:
                misses[self._card(expert)].append((expert, rows))
            else:
                there[self._card(expert)].append((arrival, expert, rows))
        self.uses += len(load)
        self._residents.touch(layer, ids)
        predicts = self._strategy.prefetch is Prefetch.PREDICTED
        done, promised, handed, in_use = ready, 0.0, ready, frozenset(ids)
        computed: list[tuple[int, list[tuple[int, int]], float]] = []
        # Others before the first, which computes while their sums travel.
        ends = [ready] * self._cards
        for card in [*range(1, self._cards), 0]:
            if not (there[card] or misses[card]):
                continue
            begin = handed
            if card:
                carried = costs.between_cards(tokens)
                begin = self._timeline.run("small_copy", carried, "hidden", handed, layer=layer, step=step, card=card)
            ended = begin
            alone = not prefill and self._is_shared(layer) and self._cpu_is_sooner(there[card], misses[card])
            if alone:
                misses[card] += [(expert, rows) for _, expert, rows in there[card]]
                there[card] = []
            self._slower = costs.side_by_side if there[card] and misses[card] else 1.0
            if self._strategy.grouped:
                there[card] = self._group(there[card], layer, card, begin, step)
                ended = max(ended, self._timeline.free_at("gpu", card))
            for index, (arrival, expert, rows) in enumerate(sorted(there[card])):
                ended = max(ended, self._compute(layer, expert, rows, max(begin, arrival), step))
                if predicts and not prefill and index == 0:
                    self._predict((layer + 1) % layers, coming, ended, step)
                    predicts = False
            fetched, here = ([], misses[card]) if alone else self._divide(misses[card], card, begin, promised, prefill)
            promised += costs.host_share(sum(rows for _, rows in here), len(here))
            # The host lets one expert be fetched, and hands over to one card, after the other.
            handed += len(fetched) * costs.dispatch.fetch_s
            if self._cards == 1:  # the disk reads the CPU's experts first
                ended = max(ended, self._on_host(layer, here, card, handed, step))
            handed += costs.dispatch.card_s / self._cards
            ends[card] = max(ended, self._fetch(layer, fetched, in_use, begin, step, prefill))
            computed.append((card, here, begin))
        for card, here, begin in computed:
            if self._cards > 1:  # once all have been given what they can do
                begin = handed
                ends[card] = max(ends[card], self._on_host(layer, here, card, begin, step))
            self._post_fetch(layer, here, in_use, card, begin, step, prefill)
        if self._cards > 1 and any(here for _, here, _ in computed):  # the host lets sums come once it has computed
            handed = max(handed, self._timeline.free_at("cpu_experts"))
        for card, ended in enumerate(ends):
            if card and ended > ready:
                passing = costs.between_cards(2.0 * tokens)  # sums are in 32 bits
                ended = self._timeline.run("small_copy", passing, "sums", max(ended, handed), layer=layer, step=step)
                handed += costs.dispatch.sum_s
            done = max(done, ended)
        if self._cards > 1:
            done = max(done, handed)
        if predicts:
            first = coming[: self._costs.model.experts_per_token if not prefill else 1]
            if prefill:
                self._underway[(layer + 1) % layers] = {e: self._copy(layer, e, done, step) for e, _ in first}
            else:
                self._predict((layer + 1) % layers, coming, done, step)
        elif prefill and self._ahead and layer + 1 < layers and len(load) >= _NEARLY_ALL * costs.model.experts:
            self._bring_ahead(layer + 1, ready, step)
        return done

    def _bring_ahead(self, layer: int, after: float, step: int) -> None:
        """A prompt's next layer: as many of its experts as have room come once those of this one are on their way."""
        if self._strategy.miss is Miss.CPU:
            return
        left = [self._ahead] * self._cards
        self._underway[layer] = {}
        for expert in range(self._costs.model.experts):
            card = self._card(expert)
            if left[card] and self._residents.arrival(layer, expert) is None:
                left[card] -= 1
                self._underway[layer][expert] = self._copy(layer, expert, after, step, "prefetch")

    def _group(self, there: There, layer: int, card: int, ready: float, step: int) -> There:
        """Computes all experts that have arrived in one call; returns the others."""
        present = [entry for entry in there if entry[0] <= ready]
        if present:
            rows, costs = sum(count for _, _, count in present), self._costs
            shared = self._is_shared(layer)
            seconds = self._slower * costs.one_card_experts(rows, len(present), grouped=True, shared=shared)
            seconds += costs.dispatch.card_s if shared and self._cards == 1 else 0.0
            count = len(present)
            self._timeline.run("gpu", seconds, "experts", ready, layer=layer, step=step, count=count, card=card)
        return [entry for entry in there if entry[0] > ready]

    def _compute(self, layer: int, expert: int, rows: int, after: float, step: int) -> float:
        seconds, card = self._costs.gpu_experts(rows), self._card(expert)
        return self._timeline.run("gpu", seconds, "expert", after, layer=layer, expert=expert, step=step, card=card)

    def _fetch(
        self,
        layer: int,
        fetched: list[tuple[int, int]],
        in_use: Container[int],
        ready: float,
        step: int,
        prefill: bool,
    ) -> float:
        ends = deque([ready] * self._staging, maxlen=self._staging)
        for expert, rows in fetched:  # each copy waits for the slot that was used the longest ago
            copied = self._copy(layer, expert, ends[0], step)
            ends.append(self._compute(layer, expert, rows, copied, step))
            if not prefill:
                self._keep(layer, expert, copied, in_use, ready)
        return ends[-1]

    def _post_fetch(
        self,
        layer: int,
        computed: list[tuple[int, int]],
        in_use: Container[int],
        card: int,
        ready: float,
        step: int,
        prefill: bool,
    ) -> None:
        for expert, _ in computed:
            if prefill or not self._residents.can_admit(layer, in_use, ready):
                break
            if self._residents.arrival(layer, expert) is not None:
                continue
            if self._strategy.waits_for_arrival or self._timeline.free_at("h2d", card) <= ready:
                self._keep(layer, expert, self._copy(layer, expert, ready, step, "post-fetch"), in_use, ready)

    def _keep(self, layer: int, expert: int, arrival: float, in_use: Container[int], now: float) -> None:
        if self._residents.can_admit(layer, in_use, now):
            self._residents.admit(layer, expert, arrival, in_use, now)

    def _on_host(self, layer: int, computed: list[tuple[int, int]], card: int, ready: float, step: int) -> float:
        run, costs = self._timeline.run, self._costs
        if not computed:
            return ready
        rows, at = sum(count for _, count in computed), ready
        if 2.0 * rows * costs.model.hidden > costs.model.experts_per_token * costs.dispatch.bundled_bytes:
            at = run("d2h", costs.activations(rows), "activations", ready, layer=layer, step=step, card=card)
        seconds = costs.dispatch.host_s + self._slower * costs.host_share(rows, len(computed))
        at = self._host_experts(computed, seconds, at, layer, step, reads_from=at)
        return run("small_copy", costs.activations(rows), "results", at, layer=layer, step=step, card=card)

    def _is_shared(self, layer: int) -> bool:
        """Whether the host looks experts up: some may be missing, or are on other cards."""
        return self._cards > 1 or self._residents.capacity[layer] < self._costs.model.experts

    def _cpu_is_sooner(self, there: There, misses: list[tuple[int, int]]) -> bool:
        """Whether the engine, by times of single experts, leaves the card idle although it holds some of them."""
        costs, strategy = self._costs, self._strategy
        chooses = strategy.grouped and strategy.miss is Miss.MIXED and not costs.dispatch.by_flags
        if not (there and chooses) or self._disk_share:
            return False
        here, held = sum(rows for _, rows in misses), sum(rows for _, _, rows in there)
        held_s = costs.one_card_experts(held, len(there), grouped=True) + len(there) * costs.dispatch.seen_card_expert_s
        both_s = max(costs.host_share(here, len(misses)), held_s)
        if self._cards == 1:  # what handing over takes is learnt from steps, but not of one of several cards
            both_s += costs.dispatch.card_s
        return costs.host_share(here + held, len(misses) + len(there)) < both_s

    def _divide(
        self, misses: list[tuple[int, int]], card: int, ready: float, promised: float, prefill: bool
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(fetched, computed on the CPU), the CPU being promised to other cards for some seconds."""
        strategy, costs = self._strategy, self._costs
        if strategy.miss is Miss.FETCH or (prefill and strategy.prefill_fetches):
            return misses, []
        if strategy.miss is Miss.CPU or costs.dispatch.by_flags:
            return [], misses
        if strategy.miss is Miss.CHEAPER:
            computed = [miss for miss in misses if costs.prefers_cpu(miss[1], pinned=strategy.pinned)]
            return [miss for miss in misses if miss not in computed], computed
        return self._split(misses, card, ready, promised)

    def _split(
        self, misses: list[tuple[int, int]], card: int, ready: float, promised: float
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Mixed: the link takes experts with many rows, the CPU those with few, so that both finish together.

        The disk reads the CPU's experts first, then the link's.
        """
        costs, count = self._costs, len(misses)
        link = max(self._timeline.free_at("h2d", card) - ready, 0.0)
        busy = self._timeline.free_at("gpu", card) - ready
        copy = self._transfer_s
        read = costs.disk(costs.expert_bytes) * self._disk_share
        disk = max(self._timeline.free_at("disk") - ready, 0.0) if read else 0.0

        def on_host(rows: int, experts: int) -> float:
            if not experts:
                return 0.0
            seconds = costs.host_share(rows, experts)
            read_s = disk + experts * read + seconds / experts if read else 0.0
            return promised + max(seconds, read_s) + 2 * costs.activations(rows)

        rest = sum(rows for _, rows in misses)
        best = (on_host(rest, count), 0)
        arrived = disk + count * read + copy if read else 0.0
        for fetched, (_, rows) in enumerate(misses, start=1):
            rest -= rows
            there = max(link + fetched * copy, arrived, busy) + costs.gpu_experts(rows)
            here = fetched * costs.dispatch.fetch_s + on_host(rest, count - fetched)
            best = min(best, (max(here, there), fetched))
            if there > best[0]:
                break
        return misses[: best[1]], misses[best[1] :]


def loads_of(chosen: NDArray[np.int16]) -> list[Load]:
    """Load of each layer from the experts of its rows, int [layers, rows, k]."""
    loads: list[Load] = []
    for layer in chosen:
        experts, rows = np.unique(layer, return_counts=True)
        order = np.argsort(-rows, kind="stable")
        loads.append([(int(experts[i]), int(rows[i])) for i in order])
    return loads
