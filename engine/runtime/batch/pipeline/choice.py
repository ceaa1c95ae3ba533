"""Which order of a layer's work suits a model on its device: what was measured overrules what is believed."""

from __future__ import annotations

from engine.runtime.batch.pipeline.schedules import Schedule

_CANDIDATES = (Schedule.CGOPIPE, Schedule.KLOTSKI, Schedule.HYBRID)
_TRIALS = 2
"""Sweeps by which each is judged; the shorter counts, for somebody else may have had the machine meanwhile."""


class ScheduleChoice:
    """Tries each schedule on the first sweeps of a size, and keeps to the fastest.

    Args:
        planned: what the planner expects to be the fastest: tried first.

    Sizes within a factor of two count as one: how many experts a sweep wants, and how much it computes from each, is
    what decides between a link that brings all of them and a CPU that computes some.
    """

    def __init__(self, planned: Schedule | None = None) -> None:
        self._candidates = list(_CANDIDATES)
        if planned is not None:
            self._candidates = [planned, *(each for each in _CANDIDATES if each is not planned)]
        self._seconds: dict[int, dict[Schedule, list[float]]] = {}

    def of(self, tokens: int) -> Schedule:
        """For a sweep of so many tokens."""
        known = self._known(tokens)
        for schedule in self._candidates:
            if len(known[schedule]) < _TRIALS:
                return schedule
        return min(self._candidates, key=lambda schedule: min(known[schedule]))

    def took(self, schedule: Schedule, tokens: int, seconds: float) -> None:
        """What a sweep has taken by one of them; after the trials it is of no interest."""
        known = self._known(tokens).get(schedule)
        if known is not None and len(known) < _TRIALS:
            known.append(seconds / tokens)

    def _known(self, tokens: int) -> dict[Schedule, list[float]]:
        return self._seconds.setdefault(tokens.bit_length(), {schedule: [] for schedule in self._candidates})
