"""All policies on one machine, model and workload, and which of them Switchyard would choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.planner.memory import card_memory, share_on_disk, usual_rule
from engine.planner.policy_search import PerformanceModel
from engine.planner.precision import bytes_per_weight
from engine.planner.simulator.batch import run_batch
from engine.planner.simulator.batch_costs import BatchPolicy
from engine.planner.simulator.batch_schedules import Schedule, cgopipe, flexgen_s3, flexgen_s4, whole_layer
from engine.planner.simulator.klotski import Klotski
from engine.planner.simulator.outcome import Outcome
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import IDEAL_PREFETCH, OWN, PUBLISHED, Residency, Strategy

SWITCHYARD = "Switchyard"
_KLOTSKI_BATCHES = 15

BATCH_SCHEDULES: dict[str, Schedule] = {
    "DeepSpeed": whole_layer,
    "FlexGen (S4)": flexgen_s4,
    "FlexGen, CPU attention (S3)": flexgen_s3,
    "MoE-Lightning (CGOPipe)": cgopipe,
    "Klotski": Klotski(),
}
"""Schedules of many sequences, by policy."""

REQUEST_STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (*PUBLISHED, *OWN)}
"""Schedules of single requests, by policy."""

POLICY_NAMES = (SWITCHYARD, *REQUEST_STRATEGIES, *BATCH_SCHEDULES)


def run_policy(name: str, setting: Setting, *, record: bool = False) -> Outcome | None:
    """One policy at its best: a cache of the ways that serve it best, a batch of the size that does.

    Returns:
        None if the model does not fit with this policy.

    Raises:
        KeyError: no such policy.
    """
    if name == SWITCHYARD:
        return switchyard(run_all(setting), setting, record=record)
    tried = list(_tries(name, setting, record=False))
    if not tried:
        return None
    best = max(range(len(tried)), key=lambda index: tried[index].tokens_per_s)
    if not record:
        return tried[best]
    return list(_tries(name, setting, record=True))[best]


def run_all(setting: Setting) -> list[Outcome]:
    """Every policy that fits, the fastest first."""
    outcomes = [run_policy(name, setting) for name in POLICY_NAMES if name != SWITCHYARD]
    return sorted((outcome for outcome in outcomes if outcome), key=lambda outcome: -outcome.tokens_per_s)


def switchyard(outcomes: list[Outcome], setting: Setting, *, record: bool = False) -> Outcome | None:
    """What Switchyard does: of all mechanisms, published ones and its own, the one that is fastest here.

    Args:
        outcomes: of `run_all`.
    """
    if not outcomes:
        return None
    best = outcomes[0]
    drawn = run_policy(best.policy, setting, record=True) if record else best
    assert drawn is not None
    return replace(drawn, policy=f"{SWITCHYARD}: {best.policy}")


def _tries(name: str, setting: Setting, *, record: bool) -> Iterator[Outcome]:
    if name in REQUEST_STRATEGIES:
        strategy = REQUEST_STRATEGIES[name]
        ways = _ways(setting) if strategy.residency is Residency.CACHE else [0]
        for count in ways:
            outcome = run_requests(strategy, replace(setting, ways=count), record=record)
            if outcome is not None:
                yield outcome
        return
    yield from _batches(name, BATCH_SCHEDULES[name], setting, record=record)


def _ways(setting: Setting) -> list[int]:
    """Slots spread evenly over all layers, and fuller sets for the first layers only (CPU-GPU Collaborative, IV-C)."""
    if setting.ways or setting.even_only:
        return [setting.ways]
    model, experts = setting.costs.model, setting.costs.model.experts
    machine, precision = setting.costs.machine, setting.costs.precision
    if card_memory(machine, model, precision, cached_tokens=0, rule=setting.rule).for_experts >= (
        model.all_expert_bytes(setting.costs.precision) * 1.5
    ):
        return [0]
    return sorted({0, max(1, experts // 4), max(1, experts // 2), experts})


def _batches(name: str, schedule: Schedule, setting: Setting, *, record: bool) -> Iterator[Outcome]:
    costs, work = setting.costs, setting.workload
    machine, model = costs.machine, costs.model
    if machine.gpu is None:
        return
    width = bytes_per_weight(costs.precision)
    performance = PerformanceModel(machine, model, work, width, setting.rule)
    room = performance.card_room(0.0)
    per_sequence = performance.prefill_bytes_per_token() * work.prompt_tokens * work.beams
    kept_tokens = work.prompt_tokens + work.generated_tokens * work.beams
    on_card = kept_tokens * model.kv_bytes_per_token() if name == "DeepSpeed" else 0.0
    largest = int(room // (per_sequence + on_card))
    if largest < 1:
        return
    micro_batch = min(largest, work.sequences)
    rule = setting.rule or usual_rule(machine)
    for count in _counts(name, -(-work.sequences // micro_batch)):
        sequences = min(micro_batch * count, work.sequences)
        kv = kept_tokens * model.kv_bytes_per_token() * sequences
        if kv > rule.ram:
            continue
        yield run_batch(
            name,
            schedule,
            costs,
            work,
            BatchPolicy(sequences, micro_batch),
            disk_share=share_on_disk(machine, model, costs.precision, kv_bytes=kv, rule=rule),
            vram_bytes=rule.card - room + micro_batch * (per_sequence + on_card),
            record=record,
        )


def _counts(name: str, most: int) -> list[int]:
    """Numbers of micro-batches to try."""
    if name == "DeepSpeed":
        return [1]
    if name == "Klotski":
        most = min(most, _KLOTSKI_BATCHES)
    return sorted({1, min(most, 4), min(most, 15), most})


def bounds(setting: Setting) -> list[Outcome]:
    """What a schedule could reach that knew each layer's experts one layer ahead."""
    outcome = run_requests(IDEAL_PREFETCH, setting)
    return [outcome] if outcome else []
