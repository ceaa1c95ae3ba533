"""Klotski's expert-aware multi-batch pipeline (its sections 5 and 6), and the three steps that lead to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.planner.simulator.batch_costs import BatchPolicy, PassCosts, distinct_experts
from engine.planner.simulator.batch_schedules import LayerState
from engine.planner.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Klotski:
    """A schedule of one layer.

    Attributes:
        hot_only: only the gate and the K hot experts are prefetched during attention, the rest once the gates have
            spoken; else the whole MoE layer is.
        reordered: experts are computed for all batches at once, hot ones first, cold ones as they arrive; else batch
            by batch.
        pinned: weights lie in pinned memory.
    """

    hot_only: bool = True
    reordered: bool = True
    pinned: bool = True

    def __call__(
        self, timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int
    ) -> LayerState:
        costs, model, count = work.costs, work.costs.model, policy.micro_batches
        if work.disk_share:
            # A window of layers in RAM slides ahead of the card: reading waits for nothing.
            timeline.run("disk", costs.disk(work.layer_bytes() * work.disk_share), "weights", layer=layer)
        in_ram = timeline.free_at("disk")
        used = max(1, round(distinct_experts(model.experts, model.experts_per_token, work.rows * count)))
        wanted = used if self.hot_only else model.experts
        hot = min(model.experts_per_token, wanted) if self.hot_only else wanted
        nbytes = costs.expert_bytes * (1 - policy.resident)
        copy = costs.h2d(nbytes, pinned=self.pinned)
        arrivals: list[float] = []

        def fetch(after: float) -> None:
            expert = len(arrivals)
            begin = max(after, in_ram)
            arrivals.append(timeline.run("h2d", copy, "expert", begin, layer=layer, expert=expert, nbytes=nbytes))

        gates = self._attend(timeline, work, policy, state, layer, fetch, hot)
        while len(arrivals) < hot:
            fetch(state.done)
        while len(arrivals) < wanted:
            fetch(gates)
        nbytes_next = 2.0 * model.layer_weights
        weights = timeline.run(
            "h2d", costs.h2d(nbytes_next), "attention weights", in_ram, layer=layer + 1, nbytes=nbytes_next
        )
        if self.reordered:
            done = gates
            rows = work.rows * count * model.experts_per_token / used
            for expert, arrived in enumerate(arrivals[:used]):
                computing = costs.gpu_experts(rows)
                done = timeline.run("gpu", computing, "expert", max(arrived, gates), layer=layer, expert=expert)
            return LayerState(weights, state.done, [done] * count)
        # Batch by batch every expert is read again.  The first batch meets them as they arrive if they were fetched one
        # by one, and waits for the whole layer if it was fetched as one.
        ready = []
        done = gates if self.hot_only else max(gates, arrivals[-1])
        shares = work.experts() / max(used, 1)
        for expert, arrived in enumerate(arrivals[:used]):
            done = timeline.run("gpu", shares, "expert", max(arrived, done), layer=layer, expert=expert)
        ready.append(done)
        for _ in range(count - 1):
            done = timeline.run("gpu", work.experts(), "experts", done, layer=layer)
            ready.append(done)
        return LayerState(weights, state.done, ready)

    def _attend(
        self,
        timeline: Timeline,
        work: PassCosts,
        policy: BatchPolicy,
        state: LayerState,
        layer: int,
        fetch: Callable[[float], None],
        hot: int,
    ) -> float:
        gates = 0.0
        previous = state.before
        share = -(-hot // len(state.ready))
        issued = 0
        for start in state.ready:
            cache = 0.0
            if not work.prefill:
                cache = work.fetch_cache(timeline, policy, previous, layer)
            for _ in range(min(share, hot - issued)):
                fetch(state.before)
                issued += 1
            previous = timeline.free_at("gpu")
            gates = timeline.run("gpu", work.attention(), "attention", max(start, cache, state.weights), layer=layer)
            work.store_cache(timeline, policy, gates, layer)
        return gates
