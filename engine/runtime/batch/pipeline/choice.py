"""Which schedule suits a model on its device: measurements override predictions."""

from __future__ import annotations

from engine.common.choice import Choice
from engine.planner.schedules import CGOPIPE, HYBRID, KLOTSKI, Schedule

_CANDIDATES = (CGOPIPE, KLOTSKI, HYBRID)


class ScheduleChoice:
    """The schedule of each sweep, for sweeps of about one size.

    Args:
        planned, reading: the schedules that the planner expects to be the fastest, for decoding and for sweeps that
            read prompts: taken first.
        by_hand: whether no others are tried.

    Sizes within a factor of two count as one.  The number of experts that a sweep uses, and the arithmetic per expert,
    decide between a link that transfers all of them and a CPU that computes some.
    """

    def __init__(
        self, planned: Schedule | None = None, reading: Schedule | None = None, *, by_hand: bool = False
    ) -> None:
        self._others = () if by_hand else _CANDIDATES
        self._first = {False: planned, True: reading}
        self._choices: dict[tuple[int, bool], Choice[Schedule]] = {}

    def of(self, tokens: int, *, reads: bool = False) -> Schedule:
        """The schedule for a sweep of `tokens` tokens; `reads` if some are prompt tokens."""
        choice = self._choice(tokens, reads)
        return choice.take(dict.fromkeys(choice.arms, 1.0))

    def took(self, schedule: Schedule, tokens: int, seconds: float, *, reads: bool = False) -> None:
        """Records the time of a sweep under a schedule."""
        choice = self._choice(tokens, reads)
        if schedule in choice.arms:
            choice.observe(schedule, seconds / tokens, 1.0)

    def _choice(self, tokens: int, reads: bool) -> Choice[Schedule]:
        first = self._first[reads]
        arms = tuple(dict.fromkeys(self._others if first is None else (first, *self._others)))
        return self._choices.setdefault((tokens.bit_length(), reads), Choice(arms, run=1, first=2, in_common=1.0))
