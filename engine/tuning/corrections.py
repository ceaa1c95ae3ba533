"""What was timed overrules what was modelled: factors of predictions, found by timing and used from then on."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.planner.plan_parts import Speed
from engine.planner.plan_words import help_sentence
from engine.planner.planned import Plan
from engine.planner.simulator.strategy import HOST_ONLY
from engine.planner.workload import Workload
from engine.tuning.result import Correction, Timed

_LEAST, _MOST = 0.1, 10.0
"""A factor beyond is no correction: something else was going on."""
_RANGE = 0.1
"""How far a corrected prediction may still be off."""


def corrected(
    corrections: Iterable[Correction], precision: str, threads: int, modelled: float, *, on_card: bool, off: float
) -> tuple[float, float, float]:
    """(tokens/s, low, high) of a prediction.

    What was timed just so decides.  What was not is corrected as what is most like it was: much of what the model of
    a machine has wrong is the same for all; its range stays as wide.

    Args:
        off: the range of the model of the machine, as a share.
    """
    here = [one for one in corrections if one.on_card == on_card]
    alike = [one for one in here if one.precision == precision]
    same = [one for one in alike if one.threads == threads]
    factor = statistics.median(one.factor for one in same or alike or here) if here else 1.0
    off = _RANGE if same else off
    rate = factor * modelled
    return rate, (1 - off) * rate, (1 + off) * rate


def corrections_from(timed: Iterable[Timed], modelled: Mapping[str, float]) -> tuple[Correction, ...]:
    """From a race: of each precision and number of threads, on a card and on none, the fastest decides.

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
    """The plan with its speed as it was seen to be, and so its alternatives and what would help.

    The time until the first token is left alone: it is limited by other things.
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
    """The plan with another decode speed, and what would help with it; its alternatives are left alone."""
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
    """Tokens per second, prefill counted, once decoding has another speed."""
    if not before.tokens_per_s or not before.decode_tokens_per_s or work.sequences > 1:
        return before.tokens_per_s
    seconds = work.tokens_out / before.tokens_per_s
    steps = work.generated_tokens
    return work.tokens_out / max(seconds + steps / decode - steps / before.decode_tokens_per_s, 1e-9)
