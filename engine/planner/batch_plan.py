"""The batch policy of a plan: sizes of the fastest schedule, and whether they hide the transfers (Klotski).

A plan only offers what the executor runs, and uses the schedules that were simulated for it.
"""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.model_shape import ModelShape
from engine.hardware.machine import HardwareProfile
from engine.planner.batch_prediction import JobRows
from engine.planner.costs import Cards, Costs
from engine.planner.engine_memory import (
    EngineMemory,
    all_records_nbytes,
    dense_in_ram,
    headroom_bytes,
    memory_rule,
    ram_usable,
    written_bytes,
)
from engine.planner.klotski import block_times, fewest_batches
from engine.planner.memory import with_all_visits
from engine.planner.plan_parts import BatchPlan, Limits, TierBytes
from engine.planner.plan_search import EXECUTED_SCHEDULES, Question, run_shared
from engine.planner.policy_search import PerformanceModel
from engine.planner.schedules import SCHEDULES
from engine.planner.simulator.batch import KLOTSKI, system_of
from engine.planner.simulator.outcome import Outcome
from engine.planner.workload import Workload

_MOST_SEQUENCES = 512
_DRAWN_LAYERS = 4


def plan_batch(question: Question, outcomes: list[Outcome]) -> BatchPlan | None:
    """The fastest batch schedule that the executor supports and that fits; None if there is none."""
    able = [one for one in outcomes if one.policy in EXECUTED_SCHEDULES]
    found = max(able, key=lambda one: one.tokens_per_s, default=None)
    if found is None:
        return None
    return batch_plan_of(replace(question, cards=found.cards).setting().costs, question.workload, found)


def batch_plan_of(costs: Costs, workload: Workload, found: Outcome) -> BatchPlan:
    """The plan that a simulated batch schedule is."""
    policy = found.batch
    assert policy is not None
    times = block_times(costs, workload, policy.micro_batch, policy.resident)
    fewest, system = fewest_batches(times), system_of(found.policy, policy)
    return BatchPlan(
        schedule=found.policy,
        prefill=system.prefill.name,
        decode=system.decode.name,
        sequences=policy.sequences,
        micro_batch=policy.micro_batch,
        weights_on_card=policy.resident,
        cache_on_card=policy.cached,
        row_tokens=workload.prompt_tokens + workload.generated_tokens * workload.beams,
        batches=policy.micro_batches,
        fewest_batches=fewest,
        hides_transfers=fewest is not None and policy.micro_batches >= fewest,
        tokens_per_s=found.tokens_per_s,
        sharing="experts" if found.cards is Cards.EXPERTS else "auto",
    )


def why_not(plan: BatchPlan) -> str:
    """Why a plan, written by hand or by another version, cannot be carried out, as the end of a sentence; empty if it
    can."""
    unknown = [name for name in (plan.prefill, plan.decode) if name not in SCHEDULES]
    if unknown:
        return f"there is no schedule {unknown[0]!r}, only {', '.join(SCHEDULES)}"
    if not 1 <= plan.micro_batch <= plan.sequences:
        return f"micro-batches of {plan.micro_batch} are no parts of {plan.sequences} sequences"
    for share, of in ((plan.weights_on_card, "weights"), (plan.cache_on_card, "keys and values")):
        if not 0 <= share <= 1:
            return f"{share:g} is no share of the {of}"
    if plan.cache_on_card and not all(SCHEDULES[name].attends_on_card for name in (plan.prefill, plan.decode)):
        return "keys and values on the card are of no use to attention on the CPU"
    if plan.cache_on_card and plan.row_tokens < 1:
        return "sequences without tokens have no keys and values"
    return ""


def best_batch(
    machine: HardwareProfile, model: ModelShape, limits: Limits, precision: str, rows: JobRows
) -> tuple[BatchPlan, str] | None:
    """(how the engine runs these rows on a card, its busiest lane); None if no schedule fits."""
    work = Workload(
        "job", round(rows.prompt_tokens), max(1, round(rows.generated_tokens)), min(rows.rows, _MOST_SEQUENCES)
    )
    question = Question(machine, model, work, limits, precision)
    outcomes = run_shared(question, _DRAWN_LAYERS, EXECUTED_SCHEDULES)
    plan = plan_batch(question, outcomes)
    if plan is None:
        return None
    use = next(one.utilisation for one in outcomes if one.policy == plan.schedule)
    return plan, max(use, key=lambda lane: use[lane], default="")


def batch_memory(costs: Costs, limits: Limits, workload: Workload, outcome: Outcome) -> EngineMemory:
    """What a batch schedule holds: on the card all weights but the experts, the share of these that stays and two
    layers of them, the keys and values that stay and those of two micro-batches; in RAM all experts and other KV."""
    model, precision = costs.model, costs.precision
    gpu, policy = costs.machine.gpu, outcome.batch
    assert gpu is not None
    assert policy is not None
    rule = memory_rule(costs, limits)
    if outcome.policy == KLOTSKI:
        rule = with_all_visits(rule, model)
    performance = PerformanceModel(costs.machine, model, workload, memory=rule)
    record, kv = round(rule.record or 0), round(performance.kv_bytes()) * policy.sequences
    kv_on_card = round(kv * policy.cached)
    card = TierBytes(
        total=costs.machine.vram_bytes,
        weights=round(rule.weights or 0),
        experts=record * round(policy.resident * model.experts) * model.moe_layers,
        staging=2 * model.experts * record + round(rule.staging),
        kv=kv_on_card + round(performance.working_bytes(policy)),
        activations=round(rule.runtime),
        headroom=headroom_bytes(gpu),
        other_programs=limits.vram_of_others,
    )
    total, usable = costs.machine.cpu.ram_bytes, ram_usable(costs, limits)
    kv = min(kv - kv_on_card, usable)
    dense, experts = dense_in_ram(model, precision), all_records_nbytes(model, precision)
    held = min(experts, max(0, usable - dense - kv))
    ram = TierBytes(
        total,
        weights=min(dense, usable - kv),
        experts=held,
        kv=kv,
        headroom=max(0, total - limits.ram_of_others - usable),
        other_programs=limits.ram_of_others,
    )
    on_disk = held < experts
    return EngineMemory(card, ram, experts if on_disk else 0, written=written_bytes(costs, from_disk=on_disk))
