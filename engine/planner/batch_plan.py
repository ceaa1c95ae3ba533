"""The batch policy of a plan: sizes of the fastest schedule, and whether they hide the transfers (Klotski).

A plan only offers what the executor runs, and uses the schedules that were simulated for it.

r_c of MoE-Lightning, the share of keys and values that stays on the card, is always 0 here, although its search
(section 4.2) may prefer a larger share.  The executor keeps a single pool of pages, in RAM: rows with the same prefix
share pages, and pages are reassigned between sweeps.  Pages that stay on the card would need a second pool with its own
reservations, and memory that the expert cache would have to release before a job begins.  A plan that counted on that
would promise more than the engine delivers.
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
    card_usable,
    dense_in_ram,
    headroom_bytes,
    ram_usable,
    records_nbytes,
    written_bytes,
)
from engine.planner.klotski import block_times, fewest_batches
from engine.planner.plan_parts import BatchPlan, Limits, TierBytes
from engine.planner.plan_search import EXECUTED_SCHEDULES, Question, run_shared
from engine.planner.simulator.batch import system_of
from engine.planner.simulator.outcome import Outcome
from engine.planner.workload import Workload

_MOST_SEQUENCES = 512
_DRAWN_LAYERS = 4


def plan_batch(question: Question, outcomes: list[Outcome]) -> BatchPlan | None:
    """The fastest batch schedule that the executor supports and that fits; None if there is none."""
    able = [one for one in outcomes if one.policy in EXECUTED_SCHEDULES]
    found = max(able, key=lambda one: one.tokens_per_s, default=None)
    if found is None or found.batch is None:
        return None
    policy = found.batch
    costs = replace(question, cards=found.cards).setting().costs
    times = block_times(costs, question.workload, policy.micro_batch, policy.resident)
    fewest, system = fewest_batches(times), system_of(found.policy, policy)
    return BatchPlan(
        schedule=found.policy,
        prefill=system.prefill.name,
        decode=system.decode.name,
        sequences=policy.sequences,
        micro_batch=policy.micro_batch,
        attention_on_card=not policy.cpu_attention,
        experts_on_card=not policy.cpu_experts,
        weights_on_card=policy.resident,
        cache_on_card=policy.cached,
        batches=policy.micro_batches,
        fewest_batches=fewest,
        hides_transfers=fewest is not None and policy.micro_batches >= fewest,
        tokens_per_s=found.tokens_per_s,
        sharing="experts" if found.cards is Cards.EXPERTS else "auto",
    )


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
    """What a batch schedule holds: embeddings and two layers' weights on the card, all weights and the KV in RAM."""
    model, precision = costs.model, costs.precision
    gpu, policy = costs.machine.gpu, outcome.batch
    assert gpu is not None
    assert policy is not None
    layer = model.experts * max(records_nbytes(model, precision)) + round(costs.card_layer_bytes)
    resident = round(policy.resident * model.layers * layer)
    embedding = 2 * model.embedding_weights
    staging = round(2 * layer * (1 - policy.resident))
    tokens = workload.prompt_tokens + workload.generated_tokens * workload.beams
    kv = round(model.kv_bytes_per_token() * tokens * policy.sequences)
    room = max(0, card_usable(costs, limits) - embedding - resident - staging)
    kv_on_card = min(round(kv * policy.cached), room)
    working = max(0, round(outcome.vram_bytes) - embedding - resident - staging - kv_on_card)
    card = TierBytes(
        total=costs.machine.vram_bytes,
        weights=embedding + resident,
        staging=staging,
        kv=kv_on_card,
        activations=min(working, room - kv_on_card),
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
