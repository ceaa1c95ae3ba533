"""What was timed overrules what was modelled: factors of predictions, found by timing and used from then on."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.planner.planned import Plan
from engine.tuning.result import Correction, Timed

_LEAST, _MOST = 0.1, 10.0
"""A factor beyond is no correction: something else was going on."""
_RANGE = 0.1
"""How far a corrected prediction may still be off."""


def factor_of(corrections: Iterable[Correction], precision: str, *, on_card: bool) -> float | None:
    """What a prediction is to be multiplied by; None if nothing of the kind was timed."""
    found = (one.factor for one in corrections if (one.precision, one.on_card) == (precision, on_card))
    return next(found, None)


def corrected(
    corrections: Iterable[Correction], precision: str, modelled: float, *, on_card: bool, off: float
) -> tuple[float, float, float]:
    """(tokens/s, low, high) of a prediction.

    A precision that was not timed is corrected as the others in the same place were: much of what the model of a
    machine has wrong is the same for all.  Its range stays as wide.

    Args:
        off: the range of the model of the machine, as a share.
    """
    known = tuple(corrections)
    factor = factor_of(known, precision, on_card=on_card)
    if factor is not None:
        off = _RANGE
    else:
        factor = statistics.median([one.factor for one in known if one.on_card == on_card] or [1.0])
    rate = factor * modelled
    return rate, (1 - off) * rate, (1 + off) * rate


def corrections_from(timed: Iterable[Timed], modelled: Mapping[str, float]) -> tuple[Correction, ...]:
    """From a race: of each precision, on a card and on none, the fastest decides.

    Args:
        modelled: uncorrected predictions by contestant's name.
    """
    found: dict[tuple[str, bool], Timed] = {}
    for one in timed:
        key = (one.precision, one.device != "cpu")
        wanted = one.contestant.config.precision in ("auto", one.precision)
        if one.problem or not one.tokens_per_s or not wanted or not modelled.get(one.contestant.name):
            continue
        if key not in found or one.tokens_per_s > found[key].tokens_per_s:
            found[key] = one
    factors = {key: one.tokens_per_s / modelled[one.contestant.name] for key, one in found.items()}
    return tuple(Correction(*key, factor) for key, factor in sorted(factors.items()) if _LEAST < factor < _MOST)


def corrected_plan(plan: Plan, corrections: Iterable[Correction]) -> Plan:
    """The plan with speeds as they were seen to be: its own, and those of the others that were timed in its precision.

    The time until the first token is left alone: it is limited by other things.
    """
    before = plan.speed
    off = before.high / before.decode_tokens_per_s - 1 if before.decode_tokens_per_s else 0.0
    decode, low, high = corrected(
        corrections, plan.precision, before.decode_tokens_per_s, on_card=plan.card is not None, off=off
    )
    speed = replace(before, tokens_per_s=_delivered(plan, decode), decode_tokens_per_s=decode, low=low, high=high)
    return replace(plan, speed=speed)


def _delivered(plan: Plan, decode: float) -> float:
    """Tokens per second, prefill counted, once decoding has another speed."""
    work, before = plan.workload, plan.speed
    if not before.tokens_per_s or not before.decode_tokens_per_s or work.sequences > 1:
        return before.tokens_per_s
    seconds = work.tokens_out / before.tokens_per_s
    steps = work.generated_tokens
    return work.tokens_out / max(seconds + steps / decode - steps / before.decode_tokens_per_s, 1e-9)
