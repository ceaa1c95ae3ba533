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
    """The plan with its speed as it was seen to be.

    The time until the first token is left alone: it is limited by other things.
    """
    before = plan.speed
    off = before.high / before.decode_tokens_per_s - 1 if before.decode_tokens_per_s else 0.0
    rate, on_card = before.decode_tokens_per_s, plan.card is not None
    decode, low, high = corrected(corrections, plan.precision, plan.threads, rate, on_card=on_card, off=off)
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
