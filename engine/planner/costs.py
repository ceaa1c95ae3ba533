"""Seconds of single operations on a machine: rooflines with a launch cost (MoE-Lightning, eqs. 4-8, 14).

The engine's own kernels have the same factors as published systems, measured instead of fitted (`engine_costs`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property, partial
from math import factorial, inf, sqrt

from engine.checkpoint.model_shape import ModelShape
from engine.common.costs import Cost, CostModel, Source, prefers_cpu
from engine.formats import as_stored, careful, format_of
from engine.hardware.machine import CallProfile, GpuProfile, HardwareProfile, Origin


@dataclass(frozen=True, slots=True)
class Launches:
    """Operators that a card starts one after the other; by default those of an eager pass of a published program.

    Attributes:
        layer: of an attention block and its router.
        experts: of a call that computes experts: three products, an activation, a weighted sum.
        token: beside the layers.
    """

    layer: int = 12
    experts: int = 5
    token: int = 0


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How far a machine stays below its data sheet: the only fitted numbers of the model.

    The same values apply to every machine, model, schedule and paper.

    Attributes:
        arithmetic: share of the peak 16-bit rate that matrix products reach, on cards and CPUs.
        card_memory: share of a card's memory bandwidth at which weights are read.
        host_memory: share of the RAM's theoretical bandwidth at which weights and cached keys and values are read,
            if the machine's profile has no measured value.
        operator_s: seconds to launch one operator.
    """

    arithmetic: float = 0.16
    card_memory: float = 0.55
    host_memory: float = 0.5
    operator_s: float = 20e-6


EFFICIENCY = Efficiency()
"""The factors in use."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A fitted number that holds for all machines, models and programs."""

    name: str
    value: float
    meaning: str


MEANINGS = {
    "arithmetic": "share of the peak 16-bit rate that matrix products reach",
    "card_memory": "share of a card's memory bandwidth at which weights are read",
    "host_memory": "share of the RAM's theoretical bandwidth at which weights and KV are read, where not measured",
    "operator_s": "seconds to launch one operator",
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Overhead of splitting a layer's experts between the card and the CPU; zero by default.

    Attributes:
        layer_s: seconds per layer: the router's choice is copied to the CPU and looked up, and the results are summed;
            for an emulated card also its router, which the library's operators compute there.
        card_s: seconds added if the card computes any expert; host_s: likewise for the CPU.
        host_expert_s: seconds added for each expert that the CPU computes.
        fetch_s: seconds of the host for each expert that is fetched, which others wait for.
        sum_s: seconds of the host for each other card whose sum the first one adds.
        host_rate: CPU bandwidth here, relative to computing all experts alone in one call.
        card_call_s: seconds added to each call that computes experts on an emulated card.
        seen_card_expert_s: seconds by which the engine overestimates an expert on the card when it chooses between card
            and CPU, because it times experts one at a time, each in a call of its own.
        by_flags: the card asks for what it misses while it computes the step. Rows are no copies then, the card
            computes all experts that it holds, and none is fetched before the step has ended.
        bundled_bytes: rows of up to so many bytes come to the CPU with the routing.
    """

    layer_s: float = 0.0
    card_s: float = 0.0
    host_s: float = 0.0
    host_expert_s: float = 0.0
    fetch_s: float = 0.0
    sum_s: float = 0.0
    host_rate: float = 1.0
    card_call_s: float = 0.0
    seen_card_expert_s: float = 0.0
    by_flags: bool = False
    bundled_bytes: float = 0.0

    def slower(self, factor: float) -> Dispatch:
        """With calls that take so many times as long."""
        calls = ("layer_s", "card_s", "host_s", "host_expert_s", "fetch_s", "sum_s", "card_call_s")
        return replace(self, **{name: factor * getattr(self, name) for name in calls})


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens use in a layer, if all experts are equally likely."""
    if tokens <= 0:
        return 0.0
    unused: float = (1.0 - per_token / experts) ** tokens
    return experts * (1.0 - unused)


class Cards(StrEnum):
    """How several cards share a model."""

    TENSORS = "tensors"
    """Every matrix is cut, as published systems do (MoE-Lightning, 4.3): all of them are as one card."""
    LAYERS = "layers"
    """Each has a run of layers: one sequence passes through them one after the other."""
    EXPERTS = "experts"
    """Each has a part of every layer's experts, the first one all else.  Rows travel there, and sums back."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """How a card runs steps of one sequence, if other than its other passes (`engine.planner.step_time`).

    Attributes:
        launches: of a step.
        graph_operator_s: seconds of an operator in a graph; 0 if steps are not captured.
        exchange: a layer's hand-over within a graph; None: only steps that miss no experts are one.
        exchange_token: operators more of a step that has them, beside the layers.
    """

    launches: Launches
    graph_operator_s: float = 0.0
    exchange: Dispatch | None = None
    exchange_token: int = 0

    def slower(self, factor: float) -> DecodeSteps:
        """With calls that take so many times as long."""
        exchange = self.exchange.slower(factor) if self.exchange is not None else None
        return replace(self, graph_operator_s=factor * self.graph_operator_s, exchange=exchange)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a run has found, over what was predicted.

    Attributes:
        evenness: distinct experts that tokens use, over those that they would if all were equally likely.
        card_layer: seconds of a layer on the card without attention and experts; card_attention, card_experts,
            cpu_attention, cpu_experts, disk: likewise.
    """

    evenness: float = 1.0
    card_layer: float = 1.0
    card_attention: float = 1.0
    card_experts: float = 1.0
    cpu_attention: float = 1.0
    cpu_experts: float = 1.0
    disk: float = 1.0


@dataclass(frozen=True)
class Costs:
    """Times of a model's parts on a machine.

    Attributes:
        machine, model, precision: `precision` is that of the routed experts.
        dense_precision: of all other weights on the CPU; card_dense_precision: likewise on a card.
        threads: CPU threads; 0 for all cores.
        efficiency: factors relative to the data sheet.
        dequantised: experts are unpacked to 16-bit weights in the card's memory before use.
        host_layer_s: seconds of a layer on the CPU in addition to reading and arithmetic; host_token_s: of a pass.
        native_card: the card is an emulated one: the native kernels compute for it, on the CPU. What it shares with the
            CPU is computed by one thread of its own, all else as if there were no card.
        dispatch: overhead of splitting experts between card and CPU.
        step_share: of the bandwidth measured of the expert kernels alone, at which a whole step reads.
        cached_share: of the model's bytes, that the processor's cache can hold; cached_gain: how much faster than from
            RAM they are read.
        score_bytes: memory traffic of one attention score of a prompt: written in 32 bits, read for the softmax, then
            both again in 16 bits; 0 for a fused kernel.
        streamed_bytes: of dense weights that each pass reads from disk, layer by layer, while it computes.
        rows: of tables on disk that each token looks up; row_bytes: of these together.
        launches: operators of a pass on a card.
        steps: of one sequence, where they have less; None: as all passes.
        cards: how several cards share the model.
        observed: what a run has found to be otherwise.
    """

    machine: HardwareProfile
    model: ModelShape
    precision: str = "bf16"
    threads: int = 0
    efficiency: Efficiency = field(default=EFFICIENCY)
    dequantised: bool = False
    dense_precision: str = "bf16"
    host_layer_s: float = 0.0
    host_token_s: float = 0.0
    native_card: bool = False
    step_share: float = 1.0
    cached_share: float = 0.0
    cached_gain: float = 1.0
    card_dense_precision: str = "bf16"
    dispatch: Dispatch = field(default=Dispatch())
    score_bytes: float = 12.0
    streamed_bytes: float = 0.0
    rows: int = 0
    row_bytes: int = 0
    launches: Launches = field(default=Launches())
    steps: DecodeSteps | None = None
    cards: Cards = Cards.TENSORS
    observed: Observed = field(default=Observed())

    def used_experts(self, tokens: float) -> float:
        """Distinct experts that so many tokens use in a layer."""
        experts, each, evenness = self.model.experts, self.model.experts_per_token, self.observed.evenness
        even = distinct_experts(experts, each, tokens)
        return even if evenness == 1.0 else min(even, max(evenness * even, min(each, even)))

    @property
    def expert_cards(self) -> int:
        """Cards that compute a layer's experts at once, and bring them over links of their own."""
        return self.machine.gpu.count if self.machine.gpu and self.cards is not Cards.LAYERS else 1

    @property
    def dense_cards(self) -> int:
        """Cards that compute all else of a layer at once."""
        return self.machine.gpu.count if self.machine.gpu and self.cards is Cards.TENSORS else 1

    def between_cards(self, rows: float) -> float:
        """Seconds of hidden states that cross to another card."""
        return self.machine.link.between_cards(2.0 * rows * self.model.hidden)

    def pass_on(self, rows: float) -> float:
        """Seconds for which a pass waits because its next layer is on another card, and at last the head on the
        first."""
        gpu = self.machine.gpu
        return gpu.count * self.between_cards(rows) if gpu and gpu.count > 1 and self.cards is Cards.LAYERS else 0.0

    def together(self, rows: float, cards: int) -> float:
        """Seconds for rows to reach the others of so many cards that share work, and for what they make to come
        back."""
        others = cards - 1
        return 2 * others * self.between_cards(rows) if others and self.cards is Cards.EXPERTS else 0.0

    @cached_property
    def expert_bytes(self) -> float:
        return self.model.expert_bytes(self.precision)

    @property
    def card_layer_bytes(self) -> float:
        """Of one MoE layer's weights without its routed experts, on a card."""
        return self.model.layer_bytes_per_weight(self.card_dense_precision) * self.model.layer_weights

    @property
    def host_dense_bytes(self) -> float:
        """Bytes of all weights but the routed experts, as the CPU uses them; the embedding is never quantised."""
        model, head = self.model, self.model.vocabulary * self.model.hidden
        layers = model.layer_bytes_per_weight(self.dense_precision) * model.matrix_weights
        untied = format_of(self.dense_precision).is_tiled or not model.tied_embeddings
        return layers + 2.0 * head + (model.head_bytes_per_weight(self.dense_precision) * head if untied else 0.0)

    @cached_property
    def card_bytes_per_s(self) -> float:
        gpu = self.machine.gpu
        assert gpu is not None, "this machine has no graphics card"
        reached = gpu.bytes_per_s * self.dense_cards * self.efficiency.card_memory
        return min(self._gain * reached, self._host_bytes_per_s(1)) if self.native_card else reached

    @cached_property
    def card_flops(self) -> float:
        gpu = self.machine.gpu
        assert gpu is not None, "this machine has no graphics card"
        return gpu.flops * self.dense_cards * self.efficiency.arithmetic

    @cached_property
    def cpu_flops(self) -> float:
        return self.machine.cpu.flops * self.efficiency.arithmetic * self._core_share

    @cached_property
    def _card_traffic(self) -> float:
        """Bytes that computing one expert moves within the card's memory."""
        return self.expert_bytes + (4.0 * self.model.expert_weights if self.dequantised else 0.0)

    @cached_property
    def _expert_flops(self) -> float:
        return 2.0 * self.model.expert_weights

    @property
    def _core_share(self) -> float:
        cores = self.machine.cpu.cores
        return min(self.threads or cores, cores) / cores

    @cached_property
    def cpu_bytes_per_s(self) -> float:
        """Bandwidth at which the CPU reads weights: measured per thread count, else half of the cores saturate it."""
        return self._host_bytes_per_s(self.threads or self.machine.cpu.cores)

    @property
    def _gain(self) -> float:
        """Factor on the bandwidth of the RAM, a part of the weights being in the processor's cache."""
        return 1 / (1 - self.cached_share + self.cached_share / self.cached_gain)

    def _host_bytes_per_s(self, threads: int) -> float:
        cpu = self.machine.cpu
        threads = min(threads, cpu.cores)
        if cpu.weights_bytes_per_s:
            reached = self._gain * self.step_share
            return reached * _interpolated(dict(cpu.weights_bytes_per_s), threads)
        return self._gain * cpu.ram_bytes_per_s * self.efficiency.host_memory * min(1.0, threads / (cpu.cores / 2))

    @cached_property
    def by_kind(self) -> CostModel:
        """The same as the run has it, which goes on to correct what was measured: see `engine.common.costs`."""
        costs, origins = CostModel(), self.machine.origins
        for kind, name, seconds in (
            (Cost.CPU_EXPERT, "cpu.ram_bytes_per_s", self.cpu_experts),
            (Cost.CPU_LAYER, "cpu.ram_bytes_per_s", partial(self.cpu_layer, context=0.0)),
            (Cost.DISK, "disk_bytes_per_s", self.disk),
            (Cost.CPU_PICTURE, "cpu.flops", lambda gflops: 1e9 * gflops / self.cpu_flops),
            *(
                (
                    (Cost.CARD_EXPERT, "gpu.bytes_per_s", self.gpu_experts),
                    (Cost.CARD_LAYER, "gpu.bytes_per_s", partial(self.gpu_layer, context=0.0)),
                    (Cost.CARD_PICTURE, "gpu.flops", self.gpu_picture),
                    (Cost.H2D, "link.h2d", self.h2d),
                    (Cost.H2D_PAGEABLE, "link.h2d_pageable", partial(self.h2d, pinned=False)),
                    (Cost.D2H, "link.d2h", self.d2h),
                )
                if self.machine.gpu is not None
                else ()
            ),
        ):
            is_measured = origins.get(name) is Origin.MEASURED
            costs.know(kind, seconds, Source.MEASURED if is_measured else Source.DATA_SHEET)
        return costs

    def predict(self, kind: Cost, size: float = 1) -> float:
        return self.by_kind.predict(kind, size)

    def prefers_cpu(self, rows: float = 1, *, pinned: bool = True) -> bool:
        """Fiddler's Algorithm 1, with these costs."""
        return prefers_cpu(self.by_kind, self.expert_bytes, rows, pinned=pinned)

    def break_even_rows(self) -> int:
        """The most rows of an expert for which the CPU is still faster; 0 if it never is."""
        return bisect_left(range(1, (1 << 16) + 1), True, key=lambda rows: not self.prefers_cpu(rows))

    # On the card

    def gpu_experts(self, tokens: float, experts: float = 1.0, *, grouped: bool = False, shared: bool = True) -> float:
        """`experts` experts in one go, `tokens` rows in total.

        Args:
            grouped: one kernel call for all experts; else each has its own operator launches.
            shared: whether the CPU may compute others of the layer.
        """
        if tokens <= 0 or experts <= 0:
            return 0.0
        if self.native_card or self.cards is not Cards.EXPERTS or self.expert_cards == 1:
            return self.one_card_experts(tokens, experts, grouped=grouped, shared=shared)
        part = most_on_one(experts, self.expert_cards, self.model.experts) / experts  # that the busiest card has
        calls = min(self.expert_cards, experts) if grouped else experts  # the host launches them one after the other
        launching = (calls - 1 if grouped else calls - part * experts) * self.launches.experts
        passing = 0.0
        if part < 1:
            passing = self.together(max(1.0, tokens / self.model.experts_per_token), self.expert_cards)
        computing = self.one_card_experts(part * tokens, part * experts, grouped=grouped)
        return computing + launching * self.efficiency.operator_s + passing

    def one_card_experts(
        self, tokens: float, experts: float = 1.0, *, grouped: bool = False, shared: bool = True
    ) -> float:
        """The same of experts that one card has, without what passes between cards."""
        if tokens <= 0 or experts <= 0:
            return 0.0
        calls = 1.0 if grouped else experts
        if self.native_card and not shared:
            return self.cpu_experts(tokens, experts)
        if self.native_card:
            reading = experts * self.expert_bytes / self.card_bytes_per_s
            seconds = max(reading, tokens * self._expert_flops / self.card_flops) + calls * self.dispatch.card_call_s
            return seconds * self.observed.card_experts
        reading, arithmetic = experts * self._card_traffic, tokens * self._expert_flops
        computing = max(reading / self.card_bytes_per_s, arithmetic / self.card_flops)
        seconds = computing + calls * self.launches.experts * self.efficiency.operator_s
        return seconds * self.observed.card_experts

    def gpu_layer(
        self, tokens: float, context: float, *, dense: bool = False, cached: bool = True, prompts: float = 0.0
    ) -> float:
        """Attention, router and shared experts of one layer for `tokens` rows with `context` tokens of context each.

        Args:
            dense: the layer has a dense feed-forward block instead of experts.
            cached: the card reads the keys and values; else attention itself runs elsewhere.
            prompts: number of prompts that the rows belong to; 0 if each row is a sequence's next token.
        """
        if self.native_card:
            return self.cpu_layer(tokens, context, dense=dense, prompts=prompts) * self.observed.card_layer
        reading, flops = self._layer(self.card_dense_precision, tokens, context if cached else 0.0, dense, prompts)
        time = max(reading / self.card_bytes_per_s, flops / self.card_flops)
        return (time + self.launches.layer * self.efficiency.operator_s) * self.observed.card_layer

    def _layer(self, precision: str, tokens: float, context: float, dense: bool, prompts: float) -> tuple[float, float]:
        """(bytes read, flops) of `gpu_layer`."""
        model = self.model
        weights = model.dense_layer_weights if dense else model.layer_weights
        reading = model.layer_bytes_per_weight(precision) * weights + self._attention_bytes(tokens, context, prompts)
        return reading, 2.0 * tokens * weights + self._attention_flops(tokens, context)

    def _attention_flops(self, tokens: float, context: float) -> float:
        return 4.0 * tokens * context * self.model.attention.heads * self.model.attention.head_dim

    def card_attention(self, tokens: float, context: float, *, prompts: float = 0.0) -> float:
        """What attention of one layer adds to `gpu_layer`."""
        whole = self.gpu_layer(tokens, context, prompts=prompts) - self.gpu_layer(tokens, 0, cached=False)
        return max(0.0, whole) / self.observed.card_layer * self.observed.card_attention

    def kv_read_bytes(self, tokens: float, context: float) -> float:
        """Bytes of one layer's cache that `tokens` sequences read, averaged over the layers."""
        return 2.0 * self.model.attention.kv_elements * context * tokens * self._kv_share

    def _attention_bytes(self, tokens: float, context: float, prompts: float) -> float:
        """Memory traffic of attention: each row reads its sequence's cache; the rows of a prompt read it together."""
        if not prompts:
            return self.kv_read_bytes(tokens, context)
        scores = self.score_bytes * tokens * context * self.model.attention.heads * self._kv_share
        return self.kv_read_bytes(prompts, context) + scores

    @property
    def _kv_share(self) -> float:
        return self.model.full_attention_layers / self.model.layers

    def gpu_head(self, rows: float) -> float:
        """Embedding and head for `rows` tokens that need logits."""
        if self.native_card:
            return self.cpu_head(rows)
        reading, flops = self._head(self.card_dense_precision, rows)
        return (
            max(reading / self.card_bytes_per_s, flops / self.card_flops)
            + self.launches.token * self.efficiency.operator_s
        )

    # On the CPU

    def cpu_experts(self, tokens: float, experts: float = 1.0) -> float:
        """`experts` experts, `tokens` rows in total; linear in rows once arithmetic dominates (Fiddler, 3.3)."""
        if tokens <= 0 or experts <= 0:
            return 0.0
        reading = experts * self.expert_bytes / self.cpu_bytes_per_s
        return max(reading, tokens * self._expert_flops / self.cpu_flops) * self.observed.cpu_experts

    def host_share(self, tokens: float, experts: float) -> float:
        """`cpu_experts` in a layer whose experts are split between card and CPU, with the dispatch overhead."""
        if tokens <= 0 or experts <= 0:
            return 0.0
        reading = experts * self.expert_bytes / (self.cpu_bytes_per_s * self.dispatch.host_rate)
        seconds = max(reading, tokens * self._expert_flops / self.cpu_flops)
        return seconds * self.observed.cpu_experts + experts * self.dispatch.host_expert_s

    @cached_property
    def side_by_side(self) -> float:
        """Slowdown of card and CPU when both compute at once: an emulated card shares the RAM's bandwidth."""
        cpu = self.machine.cpu
        if not self.native_card:
            return 1.0
        together = self._gain * max((cpu.ram_bytes_per_s, *cpu.weights_bytes_per_s.values()))
        return max(1.0, (self.cpu_bytes_per_s + self.card_bytes_per_s) / together)

    def cpu_layer(self, tokens: float, context: float, *, dense: bool = False, prompts: float = 0.0) -> float:
        """`gpu_layer` on the CPU."""
        reading, flops = self._layer(self.dense_precision, tokens, context, dense, prompts)
        return max(reading / self.cpu_bytes_per_s, flops / self.cpu_flops) + self.host_layer_s

    def cpu_head(self, rows: float) -> float:
        """`gpu_head` on the CPU."""
        reading, flops = self._head(self.dense_precision, rows)
        return max(reading / self.cpu_bytes_per_s, flops / self.cpu_flops) + self.host_token_s

    def _head(self, precision: str, rows: float) -> tuple[float, float]:
        weights = self.model.vocabulary * self.model.hidden
        return self.model.head_bytes_per_weight(precision) * weights, 2.0 * rows * weights

    def cpu_attention(self, tokens: float, context: float, *, expanded: bool = False) -> float:
        """Softmax attention of one layer over keys and values in RAM.

        Args:
            expanded: keys and values are first repeated for every query head and widened to 32 bits, as kernels without
                grouped queries do.
        """
        reading = self.kv_read_bytes(tokens, context)
        if expanded:
            attention = self.model.attention
            group = attention.heads / max(attention.kv_heads, 1)
            reading *= 1 + 2 * 2 * group
        bandwidth = self.machine.cpu.ram_bytes_per_s * self.efficiency.host_memory
        flops = self._attention_flops(tokens, context) * self._kv_share
        return max(reading / bandwidth, flops / self.cpu_flops) * self.observed.cpu_attention

    # Transfers

    @property
    def tower_bytes(self) -> int:
        """Of what reads pictures."""
        return as_stored(self.precision).width * self.model.tower_weights

    def gpu_picture(self, gflops: float) -> float:
        """A picture through the tower, whose weights come over the link and go again."""
        return self.h2d(self.tower_bytes, pinned=False) + 1e9 * gflops / self.card_flops

    def h2d(self, nbytes: float, *, pinned: bool = True) -> float:
        link = self.machine.link
        return nbytes / ((link.h2d if pinned else link.h2d_pageable) * self.dense_cards) + link.latency_s

    def h2d_of_experts(self, nbytes: float, *, pinned: bool = True) -> float:
        """One of a layer's experts after another, each over the link of its card, as fast as RAM can be read, which is
        no limit where links are modelled."""
        if self.cards is not Cards.EXPERTS:
            return self.h2d(nbytes, pinned=pinned)
        link = self.machine.link
        one_s = nbytes / (link.h2d if pinned else link.h2d_pageable) + link.latency_s
        if self.machine.origins.get("link.h2d") is Origin.MODELLED:
            return one_s / self.expert_cards
        return max(one_s / self.expert_cards, min(one_s, nbytes / self.machine.cpu.ram_bytes_per_s))

    def d2h(self, nbytes: float) -> float:
        return nbytes / (self.machine.link.d2h * self.dense_cards) + self.machine.link.latency_s

    def disk(self, nbytes: float) -> float:
        return nbytes / self.machine.disk_bytes_per_s * self.observed.disk

    def look_up(self, tokens: float) -> float:
        """Rows of tables on disk for so many tokens, which nothing is computed beside."""
        return max(tokens * self.rows * self.machine.disk_row_s, self.disk(tokens * self.row_bytes))

    def activations(self, rows: float) -> float:
        """`rows` hidden states over the link in one direction: a copy and the synchronisation after it, or flags."""
        if self.dispatch.by_flags:
            return self.d2h(2.0 * rows * self.model.hidden) - self.machine.link.latency_s
        return self.d2h(2.0 * rows * self.model.hidden) + 2 * self.efficiency.operator_s

    def transfer_expert(self) -> float:
        return self.h2d(self.expert_bytes)


@cache
def _most_of(experts: int, cards: int) -> float:
    """The expected number on the busiest of so many cards, each of which is as likely to have an expert."""
    total, expected = float(cards**experts), 0.0
    for most in range(experts):
        # Ways in which no card has more than `most`: experts! times the coefficient of x^experts in (sum x^i / i!)^n.
        ways, one = [1.0], [1.0 / factorial(count) for count in range(most + 1)]
        for _ in range(cards):
            grown = [0.0] * min(len(ways) + most, experts + 1)
            for left, some in enumerate(ways):
                for more, each in enumerate(one):
                    if left + more < len(grown):
                        grown[left + more] += some * each
            ways = grown
        expected += 1 - (factorial(experts) * ways[experts] / total if len(ways) > experts else 0.0)
    return expected


_COUNTED = 16
"""Experts up to which their spread over cards is counted out; of many each card has about its share."""


def most_on_one(experts: float, cards: int, of: float = inf) -> float:
    """Experts on the busiest card: of a layer that has so many, all of which are as likely; of all, each has its
    share."""
    if experts <= 1 or cards == 1:
        return experts
    if experts > _COUNTED:
        over = (_most_of(_COUNTED, cards) - _COUNTED / cards) / sqrt(_COUNTED) * sqrt(experts)
    else:
        low = int(experts)
        below, above = _most_of(low, cards), _most_of(min(low + 1, _COUNTED), cards)
        over = below + (experts - low) * (above - below) - experts / cards
    left = sqrt(max(0.0, of - experts) / max(of - 1, 1)) if of < inf else 1.0  # drawn without putting back
    return min(experts, experts / cards + over * left)


def _interpolated(by_threads: dict[int, float], threads: int) -> float:
    known = sorted(by_threads.items())
    if threads <= known[0][0]:
        return known[0][1] * threads / known[0][0]
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if threads <= high:
            return slow + (fast - slow) * (threads - low) / (high - low)
    return known[-1][1]


OF_DATA_SHEETS = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.56, operator_s=15e-6)
"""Relative to data sheets: on a card with the library's operators, on the CPU with the native kernels."""
OF_MODELLED = Efficiency(arithmetic=1.0, card_memory=1.0, host_memory=1.0)
"""Relative to what is modelled."""
OF_MEASUREMENTS = Efficiency(arithmetic=0.8, card_memory=0.9, host_memory=0.95, operator_s=15e-6)
"""Relative to the machine's measured bandwidth and product rate (checked with `bench decode`)."""
HOST_LAYER_S = 60e-6
"""A decoder layer of one token in the native kernels, without reading weights: two calls from Python, their hand-over
to threads, norms, rotations, attention.  Timed call by call on two cores of a Xeon with the starter's layers: 35, 29
and 25 microseconds around attention in bf16, int8 and int4; 28, 21 and 22 around router and experts; and some in
between.  Where a native call has been timed, that decides."""
LAYER_CALLS, TOKEN_CALLS = 3.0, 11.0
"""A layer, and what a token takes beside its layers (embedding, angles, head, choice of the next one), in native calls
that compute next to nothing.  On two cores of an EPYC (Zen 5) such a call took 4 microseconds, a layer of a model that
lies in the second-level cache 12, and a token 43."""
STEP_SHARE = 0.9
"""Of the bandwidth of the expert kernels in a loop, at which a step reads that also computes everything else (the EPYC,
models of real shapes: 0.75 to 1.1).  The longer `HOST_LAYER_S` of an untimed machine already contains it."""
DISPATCH = Dispatch(layer_s=60e-6, card_s=30e-6, host_s=30e-6)
"""Estimated as four, two and two operators (`OF_DATA_SHEETS.operator_s`); never timed on a real card."""
STEP_LAUNCHES = Launches(layer=7, experts=2, token=14)
"""Counted by `tests/engine/test_card_launches.py`: two products, two norms, rotation, attention and router; products of
experts; at most 14 for the embedding, angles, the last norm and the head: 5 where one kernel finds the angles."""
BUNDLED_BYTES = 2.0**17
"""See `engine.experts.dispatcher`; what is estimated of real cards, `DISPATCH`, counts a copy for rows."""
MODELLED_LAUNCHES = Launches(layer=4, experts=1, token=4)
"""Of a card whose time is modelled: see `engine.runtime.load.timed_card`."""
GRAPH_OPERATOR_S = 2.8e-6
"""A kernel after another one in a graph, and its first reads: as in `benchmarks/card_kernels.py`."""
FLAGS_S = 10e-6
"""Two flags over the link, each seen by who waits for it, and the row and outputs that go with them, in a layer that
misses an expert; the others ask nobody: an assumption."""
EXCHANGE_LAYER, EXCHANGE_TOKEN = 2, 2
"""Launches of `exchange.cu`, more: `post` and `join` of a layer, `begin` and `finish` of a token."""
EXCHANGE = Dispatch(layer_s=EXCHANGE_LAYER * GRAPH_OPERATOR_S, host_s=FLAGS_S, by_flags=True)
_AMD, _WITHOUT_GRAPHS = ("amd", "radeon"), ("intel", "apple")
DISPATCH_EMULATED = Dispatch(
    330e-6, 250e-6, 250e-6, host_expert_s=25e-6, host_rate=0.85, card_call_s=15e-6, seen_card_expert_s=250e-6
)
"""For an emulated card without a data sheet, as measured when its streams were threads.  `benchmarks.strategies` on two
cores of a Xeon, with the starter and two layers of Qwen3-30B-A3B's shape in bf16 and int4: 205 to 272, 185 to 330, 236
to 313 microseconds, and about 90 for a router.  Next to a card, the CPU kernels get each expert as a separate row: that
is the cost per expert, and why experts are read more slowly than in one call for all of them.  The engine times single
experts on the card: 48 to 480 microseconds more than an expert takes in a group.  Where these calls have been timed,
that decides."""


CACHED_GAIN = 1.6
"""How much faster than from RAM weights are read that lie in the processor's cache: hardly, where something else pushes
them out, and more than twice where nothing else runs
(experts of 512 x 256 in 16 bits on an EPYC: 25 and 58 GB/s; one thread with 13 MB of int8: 2.3 times)."""


def engine_costs(
    machine: HardwareProfile,
    model: ModelShape,
    precision: str,
    threads: int | None = None,
    *,
    captures: bool = True,
    cards: Cards = Cards.LAYERS,
) -> Costs:
    """Costs of this engine, with dense weights in the experts' precision or close to it.

    Args:
        captures: whether a card's decode steps may be captured as graphs.
        cards: how several cards share the model.
    """

    def measured(*names: str) -> Efficiency:
        found = {machine.origins.get(name) for name in names}
        if found <= {Origin.MEASURED, Origin.MODELLED}:
            return OF_MODELLED if found == {Origin.MODELLED} else OF_MEASUREMENTS
        return OF_DATA_SHEETS

    calls = machine.calls
    rates = ("cpu.flops", "gpu.flops") if machine.gpu is not None else ("cpu.flops",)
    efficiency = Efficiency(
        arithmetic=measured(*rates).arithmetic,
        card_memory=measured("gpu.bytes_per_s").card_memory,
        host_memory=measured("cpu.ram_bytes_per_s").host_memory,
        operator_s=calls.launch_s or OF_DATA_SHEETS.operator_s,
    )
    parts = machine.gpu.count if machine.gpu is not None and cards is Cards.EXPERTS else 1
    is_emulated = machine.gpu is not None and machine.gpu.name.startswith("emulated") and not calls.launch_s
    dense = careful(precision, model.total_weights)
    return Costs(
        machine,
        model,
        precision,
        threads=threads or 0,
        efficiency=efficiency,
        dense_precision=dense,
        card_dense_precision=dense,
        host_layer_s=LAYER_CALLS * calls.native_s or HOST_LAYER_S,
        host_token_s=TOKEN_CALLS * calls.native_s,
        native_card=is_emulated,
        dispatch=_dispatch(calls, parts=parts, is_emulated=is_emulated),
        step_share=STEP_SHARE if calls.native_s and efficiency.host_memory < 1 else 1.0,
        cached_share=min(1.0, machine.cpu.cache_bytes / max(_bytes_read(model, precision, dense), 1.0)),
        cached_gain=CACHED_GAIN,
        score_bytes=0.0,
        launches=MODELLED_LAUNCHES if calls.launch_s else Launches(),
        steps=None if machine.gpu is None or is_emulated else _steps(machine.gpu, calls, captures=captures),
        cards=cards,
    )


def _steps(gpu: GpuProfile, calls: CallProfile, *, captures: bool) -> DecodeSteps:
    """Of NVIDIA's cards each may ask the CPU for experts from within a graph, if it is the only one."""
    if calls.launch_s:
        by_flags = Dispatch(host_s=calls.flags_s, by_flags=True)
        return DecodeSteps(MODELLED_LAUNCHES, calls.launch_s, by_flags if captures and gpu.count == 1 else None)
    name = gpu.name.lower()
    if not captures or any(maker in name for maker in _WITHOUT_GRAPHS):
        return DecodeSteps(STEP_LAUNCHES)
    if gpu.count > 1 or any(maker in name for maker in _AMD):
        return DecodeSteps(STEP_LAUNCHES, GRAPH_OPERATOR_S)
    return DecodeSteps(STEP_LAUNCHES, GRAPH_OPERATOR_S, EXCHANGE, EXCHANGE_TOKEN)


def _bytes_read(model: ModelShape, precision: str, dense: str) -> float:
    """Of all weights that some token reads: one row of the embedding is not worth counting."""
    each = model.layer_bytes_per_weight(dense)
    layers = each * model.matrix_weights
    head = model.head_bytes_per_weight(dense) * model.vocabulary * model.hidden
    return layers + head + model.all_expert_bytes(precision)


def _dispatch(calls: CallProfile, *, parts: int, is_emulated: bool) -> Dispatch:
    """Of a layer whose experts are on so many cards: the host hands over to each."""
    usual = DISPATCH_EMULATED if is_emulated else DISPATCH
    usual = replace(usual, card_s=parts * usual.card_s, sum_s=usual.card_s)
    if not calls.layer_s:
        return usual
    return replace(
        usual,
        layer_s=calls.layer_s + (calls.router_s if is_emulated else 0.0),
        card_s=parts * calls.card_s,
        host_s=calls.host_s,
        host_expert_s=calls.host_expert_s,
        fetch_s=calls.fetch_s,
        sum_s=calls.sum_s or calls.card_s,
        bundled_bytes=BUNDLED_BYTES if calls.launch_s else 0.0,
        card_call_s=calls.single_s,
        seen_card_expert_s=calls.single_s,
    )
