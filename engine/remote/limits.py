"""How much may be asked of an endpoint: so much a minute, and as many at once as make it faster.

Bookkeeping alone; `now` is any monotonic clock in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(slots=True, eq=False)
class Spent:
    """Something that counts for a minute; its amount may be corrected once it is known."""

    at_s: float
    amount: float


class MinuteLimit:
    """At most so much within any minute: whoever keeps it keeps a token bucket of the same size and rate as well.

    Args:
        most: None for no limit.
    """

    def __init__(self, most: float | None) -> None:
        self.most = most
        self._spent: deque[Spent] = deque()

    def free_at(self, now: float, amount: float) -> float:
        """The first moment at which this amount may be spent; more than the limit may be once nothing else counts."""
        if self.most is None:
            return now
        while self._spent and self._spent[0].at_s + MINUTE_S <= now:
            self._spent.popleft()
        left = sum(spent.amount for spent in self._spent)
        moment = now
        for spent in self._spent:
            if left + amount <= self.most:
                break
            left -= spent.amount
            moment = spent.at_s + MINUTE_S
        return moment

    def spend(self, now: float, amount: float) -> Spent:
        """Counts it from now on."""
        spent = Spent(now, amount)
        if self.most is not None:
            self._spent.append(spent)
        return spent


_START = 2
"""Rows at first: with one that is read while the other is written, most small servers are busy already."""
_WORTH = 1.1
"""So much faster must twice as many rows be."""
_SHORTEST_S, _LEAST_S = 0.25, 2.0
"""How long a place is watched: the shorter only where its rows are short."""
_TELLING_TOKENS = 24
"""Of each row: enough to know the rate where answers are long."""
_HOLD = 16
"""Windows after which a place is tried with more rows again: others may have left it."""


class Width:
    """How many rows a place has at once.

    It doubles while that makes the place faster, and goes back where it does not; it halves where the place says that
    it is too many.

    Args:
        most: never more than these.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.rows = min(_START, self.most)
        self._enough = self.rows
        self._rate = 0.0
        self._tries_more = False
        self._holds = 0
        self._begun: tuple[float, float] | None = None
        self._answers = 0

    def starve(self) -> None:
        """It does not have as many rows as it may have: its rate says nothing at present."""
        self._begun = None

    def look(self, now: float, tokens: float, *, has_answered: bool = False) -> None:
        """Called whenever something has come from the place.

        Args:
            tokens: all that came from it so far.
            has_answered: whether this was the end of a row.
        """
        if self._begun is None:
            self._begun, self._answers = (now, tokens), 0
            return
        self._answers += has_answered
        begun_s, before = self._begun
        seconds = now - begun_s
        if seconds < _SHORTEST_S:
            return
        if seconds < _LEAST_S:
            tells = self._answers >= 2 * self.rows
        else:
            tells = self._answers >= self.rows or tokens - before >= _TELLING_TOKENS * self.rows
        if not tells:
            return
        self._begun = None
        self._decide((tokens - before) / seconds)

    def halve(self) -> None:
        """The place says that it has too many."""
        self.rows = self._enough = max(1, self.rows // 2)
        self._tries_more, self._begun = False, None
        self._holds = _HOLD

    def _decide(self, rate: float) -> None:
        if self._tries_more and rate < self._rate * _WORTH:
            # A few more than it works on: the next one is there when one ends.
            self.rows = min(self.most, self._enough + self._enough // 4)
            self._tries_more, self._holds = False, _HOLD
            return
        if self._tries_more:
            self._enough = self.rows
        self._rate = rate
        if self._holds > 0 and not self._tries_more:
            self._holds -= 1
            return
        self._tries_more = self._enough < self.most
        if self._tries_more:
            self.rows = min(self.most, self._enough * 2)
