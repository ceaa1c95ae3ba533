"""Aligns a prediction with a recorded request, so that both show the same step at the same place."""

from __future__ import annotations

from collections.abc import Sequence

from app.services.history.history import History
from engine.telemetry.lanes import DECODE

_STEPS = 8
"""How many steps after a moment to search for one that can be matched: some may not be recorded singly."""


def aligned_ns(history: History, start_ns: float, end_ns: float, steps_ns: Sequence[int]) -> float | None:
    """The moment of a prediction that corresponds to `start_ns` of a recording.

    A request that begins in [start, end) is aligned with the beginning of its prediction; otherwise the first decode
    step that begins there is aligned with the same step.

    Args:
        steps_ns: beginning of each predicted decode step; the prediction begins at 0.

    Returns:
        None if nothing was decoded before `end_ns`.
    """
    runs = history.last_request(end_ns)
    if not runs or not steps_ns:
        return None
    first_decode = next(run for run in runs if run.phase == DECODE)
    begin = runs[0].start_ns if runs[0] is not first_decode else first_decode.start_ns - steps_ns[0]
    if start_ns <= begin or start_ns < first_decode.start_ns:
        return start_ns - begin
    in_sight = next((run for run in reversed(runs) if run.phase == DECODE and run.start_ns <= start_ns), first_decode)
    one_ns = (in_sight.end_ns - in_sight.start_ns) / max(in_sight.tokens, 1)
    steps = history.steps_between(int(start_ns), int(start_ns + _STEPS * one_ns) + 1)
    steps = steps[(steps["name"] == DECODE) & (steps["start_ns"] >= start_ns)]
    if len(steps):
        number, at_ns = int(steps["step"][0]) - first_decode.first_step, int(steps["start_ns"][0])
    else:  # past the prediction's end, or steps no longer kept: use the mean
        number = int((start_ns - first_decode.start_ns) / max(one_ns, 1.0))
        at_ns = round(first_decode.start_ns + number * one_ns)
    return steps_ns[number % len(steps_ns)] - (at_ns - start_ns)
