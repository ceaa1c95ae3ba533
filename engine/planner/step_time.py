"""Seconds of a decode step whose experts are on a card, in RAM or on disk, from the share of them that misses.

One formula for all who ask: curves over numbers of slots (`predict`), other programs' published speeds (`rivals`)
and `docs/step-time.md`.  Its parts are costs of `engine.planner.costs`, as in the simulator, which plays
the same steps event by event.  Misses of a layer are a binomial draw, so a step takes microseconds to price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.common.costs import drawn
from engine.planner.costs import Cards, Costs

MOST_ROWS = 16
"""That the kernels for decode steps take."""


def costs_of_step(
    costs: Costs, misses: str, *, rows: float = 1, disk_share: float = 0.0, has_all: bool = False
) -> Costs:
    """Costs of a step: what it launches, for how long each, and how a layer is handed over.

    A step of one token is one graph if all experts are on the card that runs it.  It is one, too, if the card can ask
    for what it misses, all experts are in RAM, and the CPU is to compute misses, by name or because it is sooner done
    with one than the link.  All others are launched one by one from Python.

    Args:
        misses: how they are met: `cpu`, `mixed`, or another way, which no graph has.
        rows: tokens of the step.
        disk_share: share of the misses that is read from disk first.
        has_all: all experts are on the card.
    """
    steps = costs.steps
    if steps is None or rows > MOST_ROWS:
        return costs
    launched = replace(costs, launches=steps.launches, steps=None)
    if rows > 1 or not steps.graph_operator_s:
        return launched
    if has_all and (costs.cards is not Cards.EXPERTS or costs.expert_cards == 1):
        return replace(launched, efficiency=replace(costs.efficiency, operator_s=steps.graph_operator_s))
    if disk_share or not prefers_cpu(launched, misses):
        return launched
    return _asking(costs) or launched


def ways_of_step(costs: Costs, misses: str, *, rows: float = 1, disk_share: float = 0.0) -> list[Costs]:
    """The same of all ways that the engine chooses from while it runs, by what a whole token takes."""
    first = costs_of_step(costs, misses, rows=rows, disk_share=disk_share)
    steps = costs.steps
    if misses != "mixed" or rows > 1 or disk_share or steps is None or not steps.graph_operator_s:
        return [first]
    asking = _asking(costs)
    return [replace(costs, launches=steps.launches, steps=None), *([asking] if asking is not None else [])]


def _asking(costs: Costs) -> Costs | None:
    """Costs of a step that is one graph and asks by flags for what it misses; `None` if the card has none."""
    steps = costs.steps
    if steps is None or steps.exchange is None:
        return None
    more = replace(steps.launches, token=steps.launches.token + steps.exchange_token)
    efficiency = replace(costs.efficiency, operator_s=steps.graph_operator_s)
    return replace(costs, launches=more, steps=None, efficiency=efficiency, dispatch=steps.exchange)


def prefers_cpu(costs: Costs, misses: str) -> bool:
    """Whether a step has its misses computed by the CPU: asked for, or one is sooner computed than fetched."""
    return misses == "cpu" or (misses == "mixed" and costs.prefers_cpu())


TOKEN_LAYER_S = 40e-6
"""A layer's part of what a token takes on an emulated card that computes it by itself, beside the computing: flags, and
Python between two tokens."""


@dataclass(frozen=True)
class StepTime:
    """Prices the decode steps of one sequence.

    Attributes:
        costs: machine, model, precision and overheads.
        on_card: a card computes everything but experts that miss; else the CPU computes everything, and a miss is an
            expert that is not in RAM.
        way: how a card's misses are met: `cpu`, `fetch`, `layer` (whole layers ahead), else both at once.
        context: tokens that each step attends to.
        disk_share: share of the misses that has to be read from disk first.
        rows: tokens that a step computes: more than one if drafts are checked.
        new_experts: share of a row's experts that the row before it did not use.
        reads_ahead: without a card: experts that are there are computed while others are read.
    """

    costs: Costs
    on_card: bool = True
    way: str = "mixed"
    context: int = 256
    disk_share: float = 0.0
    rows: float = 1.0
    new_experts: float = 1.0
    reads_ahead: bool = False

    @cached_property
    def used(self) -> int:
        """Different experts of a layer that a step uses."""
        model = self.costs.model
        wanted = model.experts_per_token * (1 + (self.rows - 1) * self.new_experts)
        return min(model.experts, round(wanted))

    def seconds(self, miss_ratio: float, *, whole_layers: int = 0) -> float:
        """Seconds of a step.

        Args:
            miss_ratio: share of expert uses that miss, 0 to 1, in the layers that are not
            whole_layers: MoE layers with all of their experts on the card, for which nothing is looked up.

        Raises:
            ValueError: the miss ratio is not between 0 and 1.
        """
        if not 0 <= miss_ratio <= 1:
            raise ValueError(f"a miss ratio is between 0 and 1, not {miss_ratio}")
        if self.on_card and self.costs.steps is not None:
            as_run = [self._with_all] if whole_layers == self.costs.model.moe_layers else self._with_misses
            return min(way.seconds(miss_ratio, whole_layers=whole_layers) for way in as_run)
        layer_s = sum(share * time for share, time in zip(drawn(self.used, miss_ratio), self._layers_s, strict=True))
        rest = self.costs.model.moe_layers - whole_layers
        whole_s = whole_layers * self.whole_layer_s if whole_layers else 0.0
        computing_s = self.drafts_s + self.without_experts_s + whole_s + rest * layer_s
        read_s = 0.0 if self.on_card else self.costs.disk(self.costs.streamed_bytes)
        return self.costs.look_up(self.rows) + max(computing_s, read_s)

    @cached_property
    def _with_all(self) -> StepTime:
        """The same step with costs of the way in which it is run, if all experts are on the card."""
        return replace(self, costs=costs_of_step(self.costs, self.way, rows=self.rows, has_all=True))

    @cached_property
    def _with_misses(self) -> list[StepTime]:
        ways = ways_of_step(self.costs, self.way, rows=self.rows, disk_share=self.disk_share)
        return [replace(self, costs=costs) for costs in ways]

    @cached_property
    def without_experts_s(self) -> float:
        """Seconds of the head and the dense layers."""
        costs, dense, rows, context = self.costs, self.costs.model.dense_layers, self.rows, self.context
        if self.on_card:
            return costs.gpu_head(rows) + dense * costs.gpu_layer(rows, context, dense=True)
        return costs.cpu_head(rows) + dense * costs.cpu_layer(rows, context, dense=True)

    @cached_property
    def whole_layer_s(self) -> float:
        """Seconds of a MoE layer whose experts are all on the card."""
        costs = self.costs
        layer_s = costs.gpu_layer(self.rows, self.context)
        return layer_s + costs.gpu_experts(self._visits(self.used), self.used, grouped=True, shared=False)

    @cached_property
    def drafts_s(self) -> float:
        """Seconds until one more layer and the head have drafted all but one of the step's rows, one by one."""
        if self.rows <= 1 or not self.on_card:
            return 0.0
        costs, experts = self.costs, self.costs.model.experts_per_token
        layer_s = costs.gpu_layer(1, self.context) + costs.gpu_experts(experts, experts, grouped=True, shared=False)
        return (self.rows - 1) * (layer_s + costs.gpu_head(1))

    @cached_property
    def _layers_s(self) -> Sequence[float]:
        """Seconds of a MoE layer by its number of misses."""
        layer_s = self._on_card_s if self.on_card else self._on_cpu_s
        return [layer_s(misses) for misses in range(self.used + 1)]

    def _visits(self, experts: float) -> float:
        """Rows that so many of a layer's experts compute: each row visits `experts_per_token`."""
        return self.rows * self.costs.model.experts_per_token * experts / self.used

    @cached_property
    def _disk_s(self) -> float:
        return self.costs.disk(self.costs.expert_bytes) * self.disk_share

    def _on_cpu_s(self, misses: int) -> float:
        """Seconds of a MoE layer that reads `misses` of its experts from disk."""
        costs, used, read_s = self.costs, self.used, misses * self._disk_s
        layer_s = costs.cpu_layer(self.rows, self.context)
        experts_s = costs.cpu_experts(self._visits(used), used)
        if self.reads_ahead and misses:
            # Each expert is computed as it arrives, so only the last one's time is not hidden behind reading.
            return layer_s + max(experts_s, read_s + experts_s / used)
        return layer_s + read_s + experts_s

    def _on_card_s(self, misses: int) -> float:
        """Seconds of a MoE layer with `misses` of its experts not on the card."""
        costs, used = self.costs, self.used
        attention_s = costs.gpu_layer(self.rows, self.context)
        if self.way == "layer":
            experts = costs.model.experts
            whole = max(costs.h2d(experts * costs.expert_bytes), experts * self._disk_s)
            return max(whole, attention_s + costs.gpu_experts(self._visits(used), used, grouped=True))
        if self._runs_tokens:
            return attention_s + TOKEN_LAYER_S + costs.cpu_experts(self._visits(used), used)
        hits, dispatch = used - misses, costs.dispatch
        hits_s = costs.gpu_experts(self._visits(hits), hits, grouped=True) + (dispatch.card_s if hits else 0.0)
        none_fetched = self.way == "cpu" or dispatch.by_flags
        fetches = [0] if none_fetched else [misses] if self.way == "fetch" else range(misses + 1)
        found = min(self._served_s(fetched, misses - fetched, hits_s) for fetched in fetches)
        return attention_s + dispatch.layer_s + found

    @cached_property
    def _runs_tokens(self) -> bool:
        """Whether an emulated card computes a token by itself: threads of the CPU then share hits and misses."""
        costs = self.costs
        if not costs.native_card or self.rows != 1 or self.disk_share:
            return False
        return prefers_cpu(costs, self.way)

    def _served_s(self, fetched: int, computed: int, hits_s: float) -> float:
        """Seconds until a layer is done: some experts fetched while the card computes the hits, some on the CPU.

        The disk reads the CPU's experts first; experts it reads afterwards are copied to the card as they arrive.
        """
        costs, disk_s = self.costs, self._disk_s
        read = computed * disk_s
        card_s = hits_s
        if fetched:
            copy_s = costs.transfer_expert()
            copied = max(fetched * copy_s + disk_s, read + fetched * disk_s + copy_s) if disk_s else fetched * copy_s
            card_s = max(hits_s, copied) + costs.gpu_experts(self._visits(1))
        if not computed:
            return card_s
        visits = self._visits(computed)
        host_s = costs.dispatch.host_s + costs.host_share(visits, computed)
        # Each expert is computed as it arrives, so only the last one's time is not hidden behind reading.
        return max(card_s, 2 * costs.activations(visits) + max(host_s, read + host_s / computed))
