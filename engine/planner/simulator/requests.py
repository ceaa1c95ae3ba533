"""A workload under a strategy of single requests: set-up, a sample of decode steps, and extrapolation from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.planner.costs import Costs
from engine.planner.plan_parts import MemoryRule, Workload, card_memory, expert_slots, share_on_disk, usual_rule
from engine.planner.simulator.request import Load, Outcome, RequestSimulation, loads_of, utilisation
from engine.planner.simulator.strategy import (
    PUBLISHED_STATISTICS,
    Prefetch,
    Residency,
    RoutingSkew,
    SimulatedResidents,
    Strategy,
    expected_counts,
    popularity,
    routing,
)
from engine.planner.simulator.sweeps import Timeline

_WARM_UP_STEPS = 6
_MEASURED_STEPS = 12
DECODE_STEPS = _WARM_UP_STEPS + _MEASURED_STEPS + 1
"""Decode steps for which a simulation of one sequence draws routing."""
_WARM_UP_STEPS_OF_MANY = 2
"""Warm-up steps for many rows: they use nearly all experts, so a cache fills quickly."""
_MEASURED_STEPS_OF_MANY = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """The input of a strategy's simulation.

    Attributes:
        costs: machine, model, precision and threads.
        workload: the workload to run.
        statistics: of the synthetic routing.
        slots: experts on the card; None for as many as fit.
        ways: of a cache; 0 for slots spread evenly over all layers.
        recorded: routing of consecutive tokens to use instead, int [tokens, layers, k].
        rule: usable memory of the machine; None for the usual shares.
        even_only: only try caches with slots spread evenly over the layers.
        drawn_layers: simulate this many MoE layers to represent all: faster, and accurate to a few percent.
    """

    costs: Costs
    workload: Workload
    statistics: RoutingSkew = PUBLISHED_STATISTICS
    slots: int | None = None
    ways: int = 0
    recorded: NDArray[np.int16] | None = None
    rule: MemoryRule | None = None
    drawn_layers: int | None = None
    even_only: bool = False

    @property
    def drawn(self) -> int:
        """MoE layers that are simulated."""
        layers = self.costs.model.moe_layers
        return layers if self.drawn_layers is None else min(self.drawn_layers, layers)


def run_requests(strategy: Strategy, setting: Setting, *, record: bool = False) -> Outcome | None:
    """Simulates a workload, with as many sequences at once as their caches allow.

    Returns:
        None if the model does not fit: the strategy keeps non-expert weights and keys and values on the card.
    """
    costs, workload = setting.costs, setting.workload
    model, machine = costs.model, costs.machine
    if machine.gpu is None and not strategy.host_only:
        return None
    context = workload.prompt_tokens + workload.generated_tokens
    per_sequence = context + (workload.beams - 1) * workload.generated_tokens
    staging = _staging(strategy, model.experts, model.experts_per_token)
    rule = setting.rule or usual_rule(machine)
    least = card_memory(machine, model, costs.precision, cached_tokens=per_sequence, staging_experts=staging, rule=rule)
    if least.for_experts < 0 and not strategy.host_only:
        return None
    dense_in_ram = costs.host_dense_bytes if strategy.host_only else 0.0
    if costs.streamed_bytes:  # so many that the others fit
        dense_in_ram = min(max(dense_in_ram - costs.streamed_bytes, 0.0), rule.ram)
    if dense_in_ram > rule.ram:
        return None
    together = 1
    if workload.sequences > 1:
        room = (rule.ram * 0.3) if strategy.host_only else least.for_experts * 0.5
        together = max(1, min(workload.sequences, int(room // max(least.kv, 1.0)) + 1))
    memory = card_memory(
        machine, model, costs.precision, cached_tokens=per_sequence * together, staging_experts=staging, rule=rule
    )
    slots = expert_slots(memory, model, costs.precision) if setting.slots is None else setting.slots
    if strategy.residency is Residency.NONE or strategy.host_only:
        slots = 0
    # A few layers may represent all, with their part of the slots.
    layers = setting.drawn
    shares = _shares(setting)[:layers]
    held, slots = slots, slots * layers // model.moe_layers
    ways = setting.ways or min(model.experts, max(1, slots // layers))
    timeline = Timeline(record=record)
    in_ram = dense_in_ram + (memory.kv if strategy.host_only else 0.0)
    disk = share_on_disk(machine, model, costs.precision, kv_bytes=in_ram, rule=rule)
    simulation = RequestSimulation(
        timeline,
        costs,
        strategy,
        SimulatedResidents(strategy.residency, shares, slots, ways),
        disk_share=disk,
        seed=setting.statistics.seed,
        staging=int(rule.staging // rule.record // max(1, costs.expert_cards)) if rule.record else 0,
    )
    rows = together * workload.beams
    prompt = together * workload.prompt_tokens
    prefill = _prefill_loads(setting, shares, prompt)
    decode = _decode_loads(setting, shares, rows)
    if (strategy.grouped or strategy.host_only) and layers == model.moe_layers > 1 and workload.beams == 1:
        prefill[-1] = decode[0][-1]  # of a prompt's last layer the engine computes the last row alone
    first = simulation.run_pass(
        prefill, decode[0][0], rows=prompt, context=workload.prompt_tokens, after=0.0, step=-1, prompts=together
    )
    timeline.mark("prefill", 0.0, first, count=prompt)
    undrawn = model.moe_layers / layers - 1
    ttft = first + undrawn * simulation.moe_s
    simulation.uses = simulation.hits = 0
    ends, in_layers = [first], [0.0]
    for step in range(len(decode) - 1):
        end = simulation.run_pass(
            decode[step],
            decode[step + 1][0],
            rows=rows,
            context=workload.mean_context,
            after=ends[-1],
            step=step,
        )
        timeline.mark("decode", ends[-1], end, step=step, count=rows)
        ends.append(end)
        in_layers.append(simulation.moe_s)
    warm = _WARM_UP_STEPS if rows == 1 else _WARM_UP_STEPS_OF_MANY
    measured = len(ends) - 1 - warm
    tpot = (ends[-1] - ends[warm] + undrawn * sum(in_layers[warm + 1 :])) / measured
    rounds = workload.sequences / together
    return Outcome(
        policy=strategy.name,
        seconds=rounds * (ttft + tpot * max(workload.generated_tokens - 1, 0)),
        ttft_s=ttft,
        tpot_s=tpot,
        tokens_out=workload.tokens_out,
        vram_bytes=0.0 if strategy.host_only else memory.held + held * costs.expert_bytes,
        ram_bytes=model.all_expert_bytes(costs.precision) * (1 - disk) + in_ram,
        hit_rate=simulation.hits / max(simulation.uses, 1),
        utilisation=utilisation(timeline),
        spans=tuple(timeline.spans),
        slots=held,
        ways=setting.ways,
    )


def _shares(setting: Setting) -> NDArray[np.float64]:
    """Each expert's share of its layer's uses, [MoE layers, experts]: recorded or synthetic."""
    model, recorded = setting.costs.model, setting.recorded
    if recorded is None:
        return popularity(model.moe_layers, model.experts, setting.statistics)
    counts = np.stack([np.bincount(layer.ravel(), minlength=model.experts) for layer in recorded.transpose(1, 0, 2)])
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


def _staging(strategy: Strategy, experts: int, per_token: int) -> float:
    """Expert records for copies in transfer, in addition to the resident ones."""
    if strategy.prefetch is Prefetch.LAYER:
        return 2.0 * experts
    return 2.0 * per_token if strategy.prefetch is not Prefetch.NONE else 1.0


def _prefill_loads(setting: Setting, shares: NDArray[np.float64], tokens: int) -> list[Load]:
    model = setting.costs.model
    if tokens * model.experts_per_token >= 4 * model.experts:
        return [expected_counts(layer, tokens, model.experts_per_token) for layer in shares]
    drawn = routing(len(shares), model.experts, model.experts_per_token, 1, setting.statistics, streams=tokens)
    return loads_of(drawn[0])


def _decode_loads(setting: Setting, shares: NDArray[np.float64], rows: int) -> list[list[Load]]:
    model = setting.costs.model
    steps = DECODE_STEPS
    if rows > 1:
        steps = _WARM_UP_STEPS_OF_MANY + _MEASURED_STEPS_OF_MANY + 1
    if setting.recorded is not None and rows == 1:
        tokens = setting.recorded[:steps, :, None, :]
        return [loads_of(token) for token in tokens]
    if rows * model.experts_per_token >= 4 * model.experts:
        loads: list[Load] = [expected_counts(layer, rows, model.experts_per_token) for layer in shares]
        return [loads] * steps
    drawn = routing(len(shares), model.experts, model.experts_per_token, steps, setting.statistics, streams=rows)
    return [loads_of(token) for token in drawn]
