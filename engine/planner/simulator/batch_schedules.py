"""One layer of one pass, by each of the batch schedules that MoE-Lightning compares (its figure 6).

A schedule issues a layer's work given when its weights have arrived, starts the next layer's weights on their way, and
says when both are done.  Micro-batches are numbered j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.planner.simulator.batch_costs import BatchPolicy, PassCosts
from engine.planner.simulator.timeline import Timeline


@dataclass(slots=True)
class LayerState:
    """Between two layers of a pass.

    Attributes:
        weights: when this layer's weights are on the card.
        before: when the layer before last had ended, whose buffer this layer's successor gets.
        ready: when each micro-batch's hidden states are ready.
    """

    weights: float
    before: float
    ready: list[float]

    @classmethod
    def beginning(cls, policy: BatchPolicy) -> LayerState:
        return cls(0.0, 0.0, [0.0] * policy.micro_batches)

    @property
    def done(self) -> float:
        return max(self.ready)


Schedule = Callable[[Timeline, PassCosts, BatchPolicy, LayerState, int], LayerState]


def whole_layer(timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int) -> LayerState:
    """DeepSpeed's ZeRO-Inference: the next layer on its way, this one computed, cache on the card."""
    arrived = work.fetch(timeline, work.layer_bytes() * (1 - policy.resident), "weights", state.before, layer + 1)
    ready = []
    for start in state.ready:
        attended = timeline.run("gpu", work.attention(), "attention", max(start, state.weights), layer=layer)
        ready.append(timeline.run("gpu", work.experts(), "experts", attended, layer=layer))
    return LayerState(arrived, state.done, ready)


def flexgen_s4(timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int) -> LayerState:
    """FlexGen: attention on the card, each micro-batch's cache fetched one ahead, behind the next layer's weights."""
    arrived = work.fetch(timeline, work.layer_bytes() * (1 - policy.resident), "weights", state.before, layer + 1)
    ready = []
    previous = state.before
    for start in state.ready:
        cache = 0.0
        if not work.prefill:
            cache = work.fetch_cache(timeline, policy, previous, layer)
        previous = timeline.free_at("gpu")
        attended = timeline.run("gpu", work.attention(), "attention", max(start, cache, state.weights), layer=layer)
        work.store_cache(timeline, policy, attended, layer)
        ready.append(timeline.run("gpu", work.experts(), "experts", attended, layer=layer))
    return LayerState(arrived, state.done, ready)


def flexgen_s3(timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int) -> LayerState:
    """FlexGen with attention on the CPU, without grouped queries, one micro-batch after the other."""
    if work.prefill:
        return flexgen_s4(timeline, work, policy, state, layer)
    costs = work.costs
    arrived = work.fetch(timeline, work.layer_bytes() * (1 - policy.resident), "weights", state.before, layer + 1)
    ready = []
    previous = 0.0
    for start in state.ready:
        ahead = max(start, previous, state.weights)
        projected = timeline.run("gpu", work.projections(), "projections", ahead, layer=layer)
        queries = timeline.run("d2h", costs.d2h(work.queries()), "qkv", projected, layer=layer)
        attending = costs.cpu_attention(work.sequences, work.context, expanded=True)
        attended = timeline.run("cpu_attention", attending, "attention", queries, layer=layer)
        hidden = timeline.run("h2d", costs.h2d(work.hidden()), "hidden", attended, layer=layer)
        previous = timeline.run("gpu", work.experts(), "experts", hidden, layer=layer)
        ready.append(previous)
    return LayerState(arrived, state.done, ready)


def cgopipe(timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int) -> LayerState:
    """MoE-Lightning's CGOPipe (Algorithm 1): CPU attention two micro-batches ahead, weights in pages between them."""
    if work.prefill:
        return flexgen_s4(timeline, work, policy, state, layer)
    costs, count = work.costs, policy.micro_batches
    page = work.layer_bytes() * (1 - policy.resident) / count
    attended: list[float] = []
    ready: list[float] = []

    def attend(j: int) -> None:
        projected = timeline.run("gpu", work.projections(), "projections", state.ready[j], layer=layer)
        queries = timeline.run("d2h", costs.d2h(work.queries()), "qkv", projected, layer=layer)
        attending = costs.cpu_attention(work.sequences, work.context)
        attended.append(timeline.run("cpu_attention", attending, "attention", queries, layer=layer))

    for j in range(min(2, count)):
        attend(j)
    arrived = state.before
    for j in range(count):
        hidden = timeline.run("h2d", costs.h2d(work.hidden()), "hidden", attended[j], layer=layer)
        arrived = work.fetch(timeline, page, "page", state.before, layer + 1)
        ready.append(timeline.run("gpu", work.experts(), "experts", max(hidden, state.weights), layer=layer))
        if j + 2 < count:
            attend(j + 2)
    return LayerState(arrived, state.done, ready)


def moe_lightning(
    timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int
) -> LayerState:
    """What MoE-Lightning runs a policy with: CGOPipe if A_g = 0, S4 if A_g = 1; experts on the CPU if F_g = 0."""
    if policy.cpu_experts:
        return experts_on_cpu(timeline, work, policy, state, layer)
    return (cgopipe if policy.cpu_attention else flexgen_s4)(timeline, work, policy, state, layer)


def experts_on_cpu(
    timeline: Timeline, work: PassCosts, policy: BatchPolicy, state: LayerState, layer: int
) -> LayerState:
    """F_g = 0: in decode no expert moves; while the CPU computes one micro-batch's the card attends for the next."""
    if work.prefill:
        return flexgen_s4(timeline, work, policy, state, layer)
    costs = work.costs
    arrived = work.fetch(timeline, 2.0 * costs.model.layer_weights * (1 - policy.resident), "weights", 0.0, layer + 1)
    ready = []
    for start in state.ready:
        ahead = max(start, state.weights)
        if policy.cpu_attention:
            projected = timeline.run("gpu", work.projections(), "projections", ahead, layer=layer)
            queries = timeline.run("d2h", costs.d2h(work.queries()), "qkv", projected, layer=layer)
            attending = costs.cpu_attention(work.sequences, work.context)
            hidden = timeline.run("cpu_attention", attending, "attention", queries, layer=layer)
        else:
            cache = work.fetch_cache(timeline, policy, state.before, layer)
            attended = timeline.run("gpu", work.attention(), "attention", max(ahead, cache), layer=layer)
            work.store_cache(timeline, policy, attended, layer)
            hidden = timeline.run("d2h", costs.d2h(work.hidden()), "hidden", attended, layer=layer)
        if work.disk_share:
            nbytes = work.used() * costs.expert_bytes * work.disk_share
            hidden = timeline.run("disk", costs.disk(nbytes), "experts", hidden, layer=layer)
        done = timeline.run("cpu_experts", work.cpu_experts(), "experts", hidden, layer=layer)
        ready.append(timeline.run("h2d", costs.h2d(work.hidden()), "hidden", done, layer=layer))
    return LayerState(arrived, state.done, ready)
