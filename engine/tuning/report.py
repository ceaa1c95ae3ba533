"""A result as text, for the terminal and the clipboard."""

from __future__ import annotations

from engine.protocol import TuningNumber
from engine.tuning.result import Timed, TuningResult
from engine.tuning.saved_results import day


def report_text(result: TuningResult, *, saved: bool = True) -> str:
    """The whole result as plain text: machine, contestants with prediction and timing, winner, before and after.

    Args:
        saved: whether it is saved and in use.
    """
    width = max((len(one.contestant.name) for one in result.timed), default=0)
    lines = [
        f"{result.model}, tuned on {day(result.taken_at)} ({result.kind})",
        *(f"  {fact.name}: {fact.value}" for fact in result.machine),
        "",
        f"{'':<{width}}  {'timed':>9} {'predicted':>10} {'off by':>7} {'TTFT, s':>8}  tokens/s at batch 1",
        *(_line(one, result, width) for one in result.timed),
        "",
        verdict(result, saved=saved),
    ]
    remarks = [*result.notes, *(note for note in dict.fromkeys(one.note for one in result.timed) if note)]
    return "\n".join([*lines, *remarks])


def verdict(result: TuningResult, *, saved: bool = True) -> str:
    """The winner and its gain, in one or two sentences."""
    won, before = result.won, result.before
    if won is None:
        return "None of them could run: the settings are unchanged."
    if not saved:
        best = f"Best: {won.contestant.name}, {won.tokens_per_s:.1f} tokens/s. It is not saved."
        return best + _why_not_fastest(result, won)
    if won.contestant.is_before:
        return f"The settings stay the same: {won.tokens_per_s:.1f} tokens/s, and nothing else is better."
    text = f"From now on: {won.contestant.name}, {won.tokens_per_s:.1f} tokens/s."
    if before is not None and before.tokens_per_s:
        text += f" Before: {before.tokens_per_s:.1f} tokens/s, so {won.tokens_per_s / before.tokens_per_s:.2f} times."
    elif before is not None:
        text += " Before, it could not run."
    return text + _why_not_fastest(result, won)


def _why_not_fastest(result: TuningResult, won: Timed) -> str:
    faster = next((one for one in result.timed if one.tokens_per_s > won.tokens_per_s), None)
    if faster is None:
        return ""
    return f" {faster.precision} would be faster, but not by enough to justify its loss of quality."


def number_text(number: TuningNumber) -> str:
    """`33.1 GB/s, 2 threads`."""
    if number.unit == "bytes/s":
        value = f"{number.value / 1e9:.3g} GB/s"
    elif number.unit == "flop/s":
        value = f"{number.value / 1e12:.3g} Tflop/s"
    else:
        value = f"{number.value:.1f} tokens/s"
    return f"{value}, {number.detail}" if number.detail else value


def _line(one: Timed, result: TuningResult, width: int) -> str:
    name = f"{one.contestant.name:<{width}}"
    predicted = one.contestant.predicted_tokens_per_s
    if one.problem:
        return f"{name}  {'-':>9} {predicted:>10.1f} {'':>7} {'':>8}  {one.problem}"
    off = f"{predicted / one.tokens_per_s - 1:+.0%}" if predicted else ""
    marks = [
        "chosen" if one.contestant.name == result.winner else "",
        "the plan" if one.contestant.is_plan else "",
        "as before" if one.contestant.is_before else "",
    ]
    said = ", ".join(filter(None, marks))
    return f"{name}  {one.tokens_per_s:>9.1f} {predicted:>10.1f} {off:>7} {one.ttft_s:>8.2f}  {said}".rstrip()
