"""One speed for each configuration: the timed one, otherwise the prediction, corrected by what was timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import CACHE_FIELDS, EngineConfig
from engine.common.errors import EngineError
from engine.formats import AUTO
from engine.hardware.cpu import compute_threads
from engine.hardware.machine import HardwareProfile
from engine.hardware.measured import described
from engine.hardware.probe import Probe
from engine.planner.plan import Limits, make_plan
from engine.planner.plan_parts import CHAT, Alternative, Plan, Speed, Workload, worthwhile
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.planner.plan_words import help_sentence
from engine.planner.predict import predict_decode
from engine.planner.simulator.strategy import HOST_ONLY
from engine.tuning.result import Correction, Timed, TuningResult
from engine.tuning.saved_results import facts, is_same_question, results_of

_LEAST, _MOST = 0.1, 10.0
"""Limit of a factor: beyond it, something else is wrong."""
_RANGE = 0.1
"""Relative error of a corrected prediction."""


def corrected(
    corrections: Iterable[Correction],
    precision: str,
    threads: int,
    modelled: tuple[float, float, float],
    *,
    on_card: bool,
) -> tuple[float, float, float]:
    """(tokens/s, low, high) of a corrected prediction.

    A timing of the same configuration decides. Otherwise the factor of the most similar one is used, as much of the
    machine model's error is common to all; the range stays as wide.

    Args:
        off: relative error of the machine model.
    """
    here = [one for one in corrections if one.on_card == on_card]
    alike = [one for one in here if one.precision == precision]
    same = [one for one in alike if one.threads == threads]
    factor = statistics.median(one.factor for one in same or alike or here) if here else 1.0
    rate, low, high = (factor * each for each in modelled)
    return (rate, (1 - _RANGE) * rate, (1 + _RANGE) * rate) if same else (rate, low, high)


def corrections_from(timed: Iterable[Timed], modelled: Mapping[str, float]) -> tuple[Correction, ...]:
    """Corrections from a race: the fastest of each precision and thread count, with and without a card.

    Args:
        modelled: uncorrected predictions by contestant's name.
    """
    found: dict[tuple[str, bool, int], Timed] = {}
    for one in timed:
        key = (one.precision, one.device != "cpu", one.threads)
        wanted = one.contestant.config.precision in ("auto", one.precision)
        if one.problem or not one.tokens_per_s or not wanted or not modelled.get(one.contestant.name):
            continue
        if key not in found or one.tokens_per_s > found[key].tokens_per_s:
            found[key] = one
    factors = {key: one.tokens_per_s / modelled[one.contestant.name] for key, one in found.items()}
    return tuple(Correction(*key, factor) for key, factor in sorted(factors.items()) if _LEAST < factor < _MOST)


def corrected_plan(plan: Plan, corrections: Iterable[Correction]) -> Plan:
    """The plan with corrected speeds, including its alternatives and suggestions.

    The time to first token stays: it has other limits.
    """
    known = tuple(corrections)
    if not known:
        return plan
    speed = _corrected_speed(plan, known, plan.precision, plan.speed, on_card=plan.card is not None)
    plan = _with_speed(plan, speed)
    others = tuple(
        replace(
            one, speed=_corrected_speed(plan, known, one.precision, one.speed, on_card=one.policy != HOST_ONLY.name)
        )
        for one in plan.alternatives
    )
    others = tuple(sorted(others, key=lambda one: -one.speed.tokens_per_s))
    return replace(plan, alternatives=others)


def with_decode(plan: Plan, tokens_per_s: float, low: float, high: float) -> Plan:
    """The plan with another decode speed, also in its suggestions; its alternatives stay."""
    delivered = _delivered(plan.workload, plan.speed, tokens_per_s)
    speed = replace(plan.speed, tokens_per_s=delivered, decode_tokens_per_s=tokens_per_s, low=low, high=high)
    return _with_speed(plan, speed)


def _with_speed(plan: Plan, speed: Speed) -> Plan:
    before = plan.speed
    delivered = speed.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 1.0
    decoded = speed.decode_tokens_per_s / before.decode_tokens_per_s if before.decode_tokens_per_s else 1.0
    helps = tuple(
        replace(one, tokens_per_s=delivered * one.tokens_per_s, decode_tokens_per_s=decoded * one.decode_tokens_per_s)
        for one in plan.helps
    )
    return replace(plan, speed=speed, helps=helps, what_helps=help_sentence(helps, plan.workload))


def _corrected_speed(
    plan: Plan, corrections: tuple[Correction, ...], precision: str, before: Speed, *, on_card: bool
) -> Speed:
    modelled = before.decode_tokens_per_s, before.low, before.high
    decode, low, high = corrected(corrections, precision, plan.threads, modelled, on_card=on_card)
    delivered = _delivered(plan.workload, before, decode)
    return replace(before, tokens_per_s=delivered, decode_tokens_per_s=decode, low=low, high=high)


def _delivered(work: Workload, before: Speed, decode: float) -> float:
    """Tokens per second including prefill, at another decode speed."""
    if not before.tokens_per_s or not before.decode_tokens_per_s or work.sequences > 1:
        return before.tokens_per_s
    seconds = work.tokens_out / before.tokens_per_s
    steps = work.generated_tokens
    return work.tokens_out / max(seconds + steps / decode - steps / before.decode_tokens_per_s, 1e-9)


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
    for precision in model.precisions:
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
    if (found_timing := _timed(way, known)) is not None:
        plan = with_timed(plan, *found_timing)
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
    return (
        precision,
        threads,
        *(getattr(config, name) for name in CACHE_FIELDS),
        config.graphs,
        config.sharing == "experts",
    )


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
    if (found := _timed(way, results)) is None:
        return one
    rate, predicted = found[0].tokens_per_s, one.speed.decode_tokens_per_s
    speed = replace(one.speed, decode_tokens_per_s=rate, low=rate, high=rate, predicted=predicted, timed_at=found[1])
    return replace(one, speed=speed)


def _timed(way: tuple[Any, ...], results: Iterable[TuningResult]) -> tuple[Timed, str] | None:
    """The latest timing of this way, and when it was taken."""
    timings = ((timed, result.taken_at) for result in results for timed in result.timed)
    return next((each for each in timings if mechanism_of(each[0]) == way), None)
