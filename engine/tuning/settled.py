"""One speed for each configuration: the timed one, otherwise the corrected prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.formats import AUTO, LADDER
from engine.hardware.cpu import compute_threads
from engine.hardware.machine import HardwareProfile
from engine.hardware.measured import described
from engine.hardware.probe import Probe
from engine.planner.plan import Limits, make_plan
from engine.planner.plan_parts import Alternative, Plan, Speed
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.planner.precision import worthwhile
from engine.planner.predict import predict_decode
from engine.planner.workload import CHAT
from engine.tuning.corrections import corrected_plan, with_decode
from engine.tuning.keeping import facts, is_same_question, results_of
from engine.tuning.result import Correction, Timed, TuningResult

_CACHE = ("cache_slots", "cache_ways", "cache_policy", "misses", "prefetch")


def best_settled(
    machine_of: Callable[[str], HardwareProfile],
    model: ModelShape,
    limits: Limits,
    *,
    measured: bool,
    corrections: Iterable[Correction] = (),
    results: Iterable[TuningResult] = (),
) -> Plan:
    """The plan for a chat that the engine would choose, preferring timings over predictions.

    Args:
        machine_of: precision -> the machine with the rates measured for it.
        measured: see `make_plan`.
        corrections, results: see `settled_plan`.

    Raises:
        EngineError: as `make_plan`, if no precision fits.
    """
    corrections, results = tuple(corrections), tuple(results)

    def settled(precision: str) -> Plan:
        machine, one = machine_of(precision), replace(limits, precision=precision)
        plan = make_plan(machine, model, CHAT, one, measured=measured)
        return settled_plan(plan, machine, model, corrections, results)

    if limits.precision != AUTO:
        return settled(limits.precision)
    plans: dict[str, Plan] = {}
    problem: EngineError | None = None
    for precision in LADDER:
        try:
            plans[precision] = settled(precision)
        except EngineError as error:
            problem = error
    chosen = worthwhile({name: plan.speed.decode_tokens_per_s for name, plan in plans.items()})
    if chosen is None:
        assert problem is not None
        raise problem
    return _with_others(plans[chosen], plans)


def _with_others(plan: Plan, plans: Mapping[str, Plan]) -> Plan:
    """The plan, with those of other precisions as alternatives, each at the rates measured for it."""
    same = [one for one in plan.alternatives if one.precision == plan.precision]
    others = [Alternative(one.policy, one.precision, one.speed, runs_here=True) for one in plans.values()]
    others = [one for one in others if one.precision != plan.precision]
    return replace(plan, alternatives=tuple(sorted([*same, *others], key=lambda one: -one.speed.tokens_per_s)))


def settled_plan(
    plan: Plan,
    machine: HardwareProfile,
    model: ModelShape,
    corrections: Iterable[Correction] = (),
    results: Iterable[TuningResult] = (),
) -> Plan:
    """The plan with its timed or corrected speed.

    Predicted like the contestants of a race, not like a comparison of policies: the two models differ.

    Args:
        machine: with the rates measured for the plan's precision.
        results: trusted results of this machine and these settings, latest first.
    """
    known = list(results)
    config = plan.engine_config(model.name)
    if plan.policy in ENGINE_SETTINGS and plan.batch is None:
        try:
            found = predict_decode(machine, model, config)
        except EngineError:  # it no longer fits, which the plan reports itself
            pass
        else:
            plan = with_decode(plan, found.tokens_per_s, found.low, found.high)
    plan = corrected_plan(plan, corrections)
    way = mechanism(config, plan.precision, on_card=plan.card is not None)
    for result in known:
        same = next((one for one in result.timed if mechanism_of(one) == way), None)
        if same is not None:
            plan = with_timed(plan, same, result.taken_at)
            break
    return replace(plan, alternatives=tuple(_settled(one, plan, known) for one in plan.alternatives))


def with_timed(plan: Plan, timed: Timed, taken_at: str) -> Plan:
    """The plan with the timing of these exact settings; the prediction stays beside it."""
    predicted = timed.contestant.predicted_tokens_per_s or plan.speed.decode_tokens_per_s
    low, high = min(timed.rates, default=timed.tokens_per_s), max(timed.rates, default=timed.tokens_per_s)
    plan = with_decode(plan, timed.tokens_per_s, low, high)
    return replace(plan, speed=replace(plan.speed, predicted=predicted, timed_at=taken_at))


def results_here(mark: str, probe: Probe, asked: EngineConfig) -> tuple[TuningResult, ...]:
    """Trusted results of a model with these settings on this machine, latest first."""
    here = facts(described(probe))
    return tuple(
        one for one in results_of(mark) if one.is_trusted and one.machine == here and is_same_question(one.asked, asked)
    )


def mechanism(config: EngineConfig, precision: str, *, on_card: bool, threads: int = 0) -> tuple[Any, ...]:
    """A key that differs between different configurations; automatic threads are resolved."""
    threads = threads or config.threads or compute_threads()
    if not on_card:
        return ("cpu", precision, threads)
    return (precision, threads, *(getattr(config, name) for name in _CACHE), config.graphs)


def mechanism_of(timed: Timed) -> tuple[Any, ...] | None:
    """The same for a timing, as actually loaded; None if it failed."""
    if timed.problem or not timed.tokens_per_s:
        return None
    return mechanism(timed.contestant.config, timed.precision, on_card=timed.device != "cpu", threads=timed.threads)


def _settled(one: Alternative, plan: Plan, results: list[TuningResult]) -> Alternative:
    settings: Mapping[str, Any] | None = ENGINE_SETTINGS.get(one.policy)
    if settings is None:
        return one
    config = EngineConfig(plan.model, threads=plan.threads, **settings)
    way = mechanism(config, one.precision, on_card=config.device != "cpu" and plan.card is not None)
    for result in results:
        for timed in result.timed:
            if mechanism_of(timed) == way:
                rate = timed.tokens_per_s
                speed: Speed = replace(
                    one.speed,
                    decode_tokens_per_s=rate,
                    low=rate,
                    high=rate,
                    predicted=one.speed.decode_tokens_per_s,
                    timed_at=result.taken_at,
                )
                return replace(one, speed=speed)
    return one
