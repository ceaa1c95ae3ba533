"""The batch policy of a plan: sizes of the fastest schedule, and whether they hide the transfers (Klotski).

A plan only offers what the executor runs, and uses the schedules that were simulated for it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.model_shape import ModelShape
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import FALLS
from engine.common.json_fields import fields_of
from engine.common.sizes import rounded_up
from engine.common.untrusted import DEEPEST, parse_json, read_untrusted, reason
from engine.hardware.machine import HardwareProfile
from engine.planner.batch_prediction import JobRows
from engine.planner.costs import Cards, Costs, Observed
from engine.planner.engine_memory import (
    EngineMemory,
    all_records_nbytes,
    dense_in_ram,
    headroom_bytes,
    memory_rule,
    ram_usable,
    written_bytes,
)
from engine.planner.plan_parts import BatchPlan, Limits, TierBytes, Workload
from engine.planner.plan_search import EXECUTED_SCHEDULES, Question, run_shared
from engine.planner.policy_search import PAGE, block_times, fewest_batches
from engine.planner.schedules import SCHEDULES
from engine.planner.simulator.plans import (
    CGOPIPE,
    FLEXGEN_S4,
    KLOTSKI,
    BatchSystem,
    performance_of,
    run_planned,
    system_of,
)
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting
from engine.planner.simulator.sweeps import OffloadPolicy

GIVEN = "The policy that was given"
_MOST_SEQUENCES = 512
_MOST_POLICY_BYTES = 4 * 2**20
_DRAWN_LAYERS = 4


def plan_batch(question: Question, outcomes: list[Outcome]) -> BatchPlan | None:
    """The fastest batch schedule that the executor supports and that fits; None if there is none."""
    able = [one for one in outcomes if one.policy in EXECUTED_SCHEDULES]
    found = max(able, key=lambda one: one.tokens_per_s, default=None)
    if found is None:
        return None
    return batch_plan_of(replace(question, cards=found.cards).setting().costs, question.workload, found)


def batch_plan_of(costs: Costs, workload: Workload, found: Outcome) -> BatchPlan:
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


def read_policy(file: str) -> BatchPlan:
    """A policy by hand: what `plan --json` prints, or the object `batch` in it.

    Raises:
        EngineError: `INVALID_REQUEST`: it cannot be read, or is no policy; the sentence names the field.
    """
    try:
        return policy_of(parse_json(read_untrusted(Path(file), _MOST_POLICY_BYTES), deepest=DEEPEST))
    except OSError as error:
        why = reason(error)
    except ValueError as error:
        why = f"it is not JSON: {error}"
    except EngineError as error:
        why = error.message.removesuffix(".")
    raise EngineError(ErrorCode.INVALID_REQUEST, f"The policy {file} cannot be used: {why}.")


def policy_of(document: Any) -> BatchPlan:
    given = document["batch"] if isinstance(document, dict) and "batch" in document else document
    if not isinstance(given, dict):
        raise _wrong("batch", "must be the policy of a batch, as `switchyard plan --workload batch --json` prints it")
    known = {each.name: each for each in fields(BatchPlan)}
    if unknown := sorted(given.keys() - known.keys()):
        raise _wrong(f"batch.{unknown[0]}", f"is no part of a policy, only {', '.join(_BY_HAND)} are")
    values: dict[str, Any] = {"schedule": "", "row_tokens": 0, "batches": 0, "fewest_batches": None}
    values |= {"weights_on_card": 0.0, "cache_on_card": 0.0, "hides_transfers": False, "tokens_per_s": 0.0}
    for name, value in given.items():
        try:
            values |= fields_of(BatchPlan, {name: value})
        except (TypeError, ValueError):
            raise _wrong(f"batch.{name}", f"is {value!r}, which is not {_KINDS[str(known[name].type)]}") from None
    for name, each in known.items():
        if name not in values and each.default is MISSING:
            raise _wrong(f"batch.{name}", "is missing")
    plan = BatchPlan(**values | {"by_hand": True})
    for name in ("prefill", "decode"):
        if getattr(plan, name) not in SCHEDULES:
            raise _wrong(f"batch.{name}", f"is {getattr(plan, name)!r}, but must be one of {', '.join(SCHEDULES)}")
    for name, least, most in (
        ("sequences", 1, 2**20),
        ("micro_batch", 1, plan.sequences),
        ("weights_on_card", 0, 1),
        ("cache_on_card", 0, 1),
    ):
        if not least <= getattr(plan, name) <= most:
            raise _wrong(f"batch.{name}", f"is {getattr(plan, name):g}, but must be from {least} to {most:,}")
    if plan.cache_on_card and not all(SCHEDULES[name].attends_on_card for name in (plan.prefill, plan.decode)):
        raise _wrong("batch.cache_on_card", "must be 0 where attention is computed by the CPU (prefill, decode)")
    return plan


_BY_HAND = ("prefill", "decode", "sequences", "micro_batch", "weights_on_card", "cache_on_card", "sharing")
_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "int | None": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "Sharing": "auto, layers or experts",
}


def _wrong(field: str, why: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, f"{field} {why}.")


def given_outcome(question: Question, given: BatchPlan) -> tuple[Outcome | None, str]:
    """(a policy by hand as it is simulated, why it does not fit as the end of a sentence)."""
    gpu = question.machine.gpu
    if gpu is None or not question.limits.use_card:
        return None, "there is no graphics card to use"
    cards = Cards.EXPERTS if gpu.count > 1 else Cards.LAYERS
    question = replace(question, cards=cards)
    work, decode = question.workload, SCHEDULES[given.decode]
    sequences = min(given.sequences, work.sequences)
    policy = OffloadPolicy(
        sequences,
        min(given.micro_batch, sequences),
        given.weights_on_card,
        not decode.attends_on_card,
        decode.experts_in_ram,
        given.cache_on_card,
    )
    is_klotski = "klotski" in given.decode
    name = KLOTSKI if is_klotski else CGOPIPE if decode is not SCHEDULES["s4"] else FLEXGEN_S4
    performance = performance_of(name, question.setting())
    (on_card, in_ram), room = performance.held_bytes(policy), performance.card_room(policy.resident)
    if on_card > room:
        return None, f"it takes {rounded_up(round(on_card - room))} more than the graphics card has"
    if (missing := round(in_ram - performance.rule.ram)) > 0:
        return None, f"keys and values of {sequences} rows take {rounded_up(missing)} more RAM than there is"
    system = BatchSystem(SCHEDULES[given.prefill], decode, page_tokens=PAGE, dense_stays=True)
    return replace(run_planned(name, system, performance, policy), cards=cards), ""


def question_of(
    machine: HardwareProfile,
    model: ModelShape,
    limits: Limits,
    precision: str,
    rows: JobRows,
    observed: Observed | None = None,
) -> Question:
    """How to run these rows.

    Args:
        observed: what a run has found to be otherwise than predicted.
    """
    prompt, generated = round(rows.prompt_tokens), max(1, round(rows.generated_tokens))
    work = Workload("job", prompt, generated, min(rows.rows, _MOST_SEQUENCES))
    return Question(machine, model, work, limits, precision, observed=observed or Observed())


def is_overtaken(question: Question, present: BatchPlan, margin: float) -> bool:
    """Whether another plan is so many times as fast as the present one, by what is known now."""
    now, _ = given_outcome(question, present)
    best = plan_batch(question, run_shared(question, _DRAWN_LAYERS, EXECUTED_SCHEDULES))
    return best is not None and (now is None or best.tokens_per_s > margin * now.tokens_per_s)


def best_batch(question: Question, given: BatchPlan | None = None) -> tuple[BatchPlan, str] | None:
    """(how the engine runs these rows on a card, its busiest lane); None if no schedule fits.

    Args:
        given: is taken instead if it fits; where it does not, that is told.
    """
    if given is not None:
        outcome, why = given_outcome(question, given)
        if outcome is not None:
            FALLS.is_over(GIVEN)
            return carried_out(question, outcome, given), outcome.busiest
        FALLS.say(GIVEN, "the planner's own", why)
    outcomes = run_shared(question, _DRAWN_LAYERS, EXECUTED_SCHEDULES)
    plan = plan_batch(question, outcomes)
    if plan is None:
        return None
    return plan, next(one for one in outcomes if one.policy == plan.schedule).busiest


def carried_out(question: Question, outcome: Outcome, given: BatchPlan) -> BatchPlan:
    """The plan that a policy by hand is, with what is predicted of it."""
    costs = replace(question, cards=outcome.cards).setting().costs
    plan = batch_plan_of(costs, question.workload, outcome)
    return replace(plan, prefill=given.prefill, decode=given.decode, by_hand=True)


def batch_memory(costs: Costs, limits: Limits, workload: Workload, outcome: Outcome) -> EngineMemory:
    """What a batch schedule holds: on the card all weights but the experts, the share of these that stays and two
    layers of them, the keys and values that stay and those of two micro-batches; in RAM all experts and other KV."""
    model, precision = costs.model, costs.precision
    gpu, policy = costs.machine.gpu, outcome.batch
    assert gpu is not None
    assert policy is not None
    performance = performance_of(outcome.policy, Setting(costs, workload, rule=memory_rule(costs, limits)))
    rule = performance.rule
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
