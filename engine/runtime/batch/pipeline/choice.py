"""Which order of a layer's work suits a model on its device: what was measured overrules what is believed."""

from __future__ import annotations

from engine.planner.schedules import CGOPIPE, HYBRID, KLOTSKI, Schedule

_CANDIDATES = (CGOPIPE, KLOTSKI, HYBRID)
_TRIALS = 2
"""Sweeps by which each is judged; the shorter counts, for somebody else may have had the machine meanwhile."""


class ScheduleChoice:
    """Tries each schedule on the first sweeps of a size, and keeps to the fastest.

    Args:
        planned, reading: what the planner expects to be the fastest, and the same of sweeps that read prompts: tried
            first.

    Sizes within a factor of two count as one: how many experts a sweep wants, and how much it computes from each, is
    what decides between a link that brings all of them and a CPU that computes some.
    """

    def __init__(self, planned: Schedule | None = None, reading: Schedule | None = None) -> None:
        self._first = {False: planned, True: reading}
        self._seconds: dict[tuple[int, bool], dict[Schedule, list[float]]] = {}

    def of(self, tokens: int, *, reads: bool = False) -> Schedule:
        """For a sweep of so many tokens; whether some of them are prompts."""
        known = self._known(tokens, reads)
        for schedule, seconds in known.items():
            if len(seconds) < _TRIALS:
                return schedule
        return min(known, key=lambda schedule: min(known[schedule]))

    def took(self, schedule: Schedule, tokens: int, seconds: float, *, reads: bool = False) -> None:
        """What a sweep has taken by one of them; after the trials it is of no interest."""
        known = self._known(tokens, reads).get(schedule)
        if known is not None and len(known) < _TRIALS:
            known.append(seconds / tokens)

    def _known(self, tokens: int, reads: bool) -> dict[Schedule, list[float]]:
        first = self._first[reads]
        candidates = _CANDIDATES if first is None else (first, *_CANDIDATES)
        return self._seconds.setdefault((tokens.bit_length(), reads), {schedule: [] for schedule in candidates})
