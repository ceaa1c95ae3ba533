"""Which schedule suits a model on its device: measurements override predictions."""

from __future__ import annotations

from engine.planner.schedules import CGOPIPE, HYBRID, KLOTSKI, Schedule

_CANDIDATES = (CGOPIPE, KLOTSKI, HYBRID)
_TRIALS = 2
"""Sweeps that each schedule is timed with; the shorter one counts, as another process may have slowed the other."""


class ScheduleChoice:
    """Tries each schedule on the first sweeps of a size, then stays with the fastest.

    Args:
        planned, reading: the schedules that the planner expects to be the fastest, for decoding and for sweeps that
            read prompts: tried first.

    Sizes within a factor of two count as one.  The number of experts that a sweep uses, and the arithmetic per expert,
    decide between a link that transfers all of them and a CPU that computes some.
    """

    def __init__(self, planned: Schedule | None = None, reading: Schedule | None = None) -> None:
        self._first = {False: planned, True: reading}
        self._seconds: dict[tuple[int, bool], dict[Schedule, list[float]]] = {}

    def of(self, tokens: int, *, reads: bool = False) -> Schedule:
        """The schedule for a sweep of `tokens` tokens; `reads` if some are prompt tokens."""
        known = self._known(tokens, reads)
        for schedule, seconds in known.items():
            if len(seconds) < _TRIALS:
                return schedule
        return min(known, key=lambda schedule: min(known[schedule]))

    def took(self, schedule: Schedule, tokens: int, seconds: float, *, reads: bool = False) -> None:
        """Records the time of a sweep under a schedule; ignored after the trials."""
        known = self._known(tokens, reads).get(schedule)
        if known is not None and len(known) < _TRIALS:
            known.append(seconds / tokens)

    def _known(self, tokens: int, reads: bool) -> dict[Schedule, list[float]]:
        first = self._first[reads]
        candidates = _CANDIDATES if first is None else (first, *_CANDIDATES)
        return self._seconds.setdefault((tokens.bit_length(), reads), {schedule: [] for schedule in candidates})
