"""Correction factors of predictions, derived from timings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.planner.plan_parts import Plan, Speed
from engine.planner.plan_words import help_sentence
from engine.planner.simulator.strategy import HOST_ONLY
from engine.planner.workload import Workload
from engine.tuning.result import Correction, Timed

_LEAST, _MOST = 0.1, 10.0
"""Limit of a factor: beyond it, something else is wrong."""
_RANGE = 0.1
"""Relative error of a corrected prediction."""


def corrected(
    corrections: Iterable[Correction], precision: str, threads: int, modelled: float, *, on_card: bool, off: float
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
    off = _RANGE if same else off
    rate = factor * modelled
    return rate, (1 - off) * rate, (1 + off) * rate


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
    rate = before.decode_tokens_per_s
    off = before.high / rate - 1 if rate else 0.0
    decode, low, high = corrected(corrections, precision, plan.threads, rate, on_card=on_card, off=off)
    delivered = _delivered(plan.workload, before, decode)
    return replace(before, tokens_per_s=delivered, decode_tokens_per_s=decode, low=low, high=high)


def _delivered(work: Workload, before: Speed, decode: float) -> float:
    """Tokens per second including prefill, at another decode speed."""
    if not before.tokens_per_s or not before.decode_tokens_per_s or work.sequences > 1:
        return before.tokens_per_s
    seconds = work.tokens_out / before.tokens_per_s
    steps = work.generated_tokens
    return work.tokens_out / max(seconds + steps / decode - steps / before.decode_tokens_per_s, 1e-9)
