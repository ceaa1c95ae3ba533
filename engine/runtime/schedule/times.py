"""How the time of a model is shared by those who are answered at once and what goes on in the background."""

from __future__ import annotations

from collections.abc import Callable

from engine.common.clock import read
from engine.common.costs import Cost, CostModel

SLICE_S = 0.15
"""The background goes on for so long at a time: a token after it costs more, for what it needs is in no cache, and
people do not see so short a pause."""
_MOST_OWED_S = 2.0
"""Neither side saves up more than this."""
_SLOWER, _FASTER = 0.05, 0.5
"""Weights of the newest token's time in their average: the first ones after a slice of the background are slow, and
none is faster than it would be without."""
_MOST_CREDIT = 0.5
"""Of either side's time that need not be paid for, whatever tokens are thought to take."""


class Times:
    """What requests, and work in the background, have had of each other's time.

    A token that a request gets counts as much time as it takes without the background, also within a sweep of that, and
    when it takes longer because what it needs is in no cache any more.  So both go on at the same share of their speeds
    alone.
    """

    def __init__(self, clock: Callable[[], float] = read) -> None:
        self._clock = clock
        self._owed_s = 0.0
        """Of the requests' time that the background has had more than they."""
        self._since_s = clock()
        self._is_background = False
        self._credit_s = 0.0
        """Of the requests' time that the background has spared them since they left."""
        self._tokens = 0.0
        """Of each request, since their time was noted."""
        self._unpriced_s = 0.0
        self._costs = CostModel()
        self.start()

    @property
    def token_s(self) -> float:
        """What a token for each of the requests takes without the background, lately; 0 before there was any."""
        return self._costs.predict(Cost.TOKEN)

    def start(self) -> None:
        self._owed_s = 0.0
        self._costs.learn(Cost.TOKEN, weight=_SLOWER, falling=_FASTER, raw=1)
        self.rest()

    def rest(self) -> None:
        """The time from now on belongs to nobody."""
        self._since_s, self._is_background = self._clock(), False
        self._tokens = self._unpriced_s = self._credit_s = 0.0

    def is_due(self) -> bool:
        """Whether the background has had as much by now, and a slice more."""
        return self._owed_s + self._clock() - self._since_s - self._credit_s >= SLICE_S

    @property
    def owes(self) -> bool:
        """Whether requests still have less."""
        return self._owed_s > 0

    def enter(self) -> None:
        spent_s = self._clock() - self._since_s - self._credit_s
        self._owed_s = min(self._owed_s + spent_s, _MOST_OWED_S)
        self.rest()

    def note(self, *, counts: bool) -> None:
        """Requests have had the time since; `counts` if it is charged to them."""
        now = self._clock()
        took_s = now - self._since_s
        if counts:
            self._unpriced_s += took_s
            if self._tokens >= 1:  # what they took beyond their price need not be paid for, once they have come
                tokens, all_s = self._tokens, self._unpriced_s
                self._tokens = self._unpriced_s = 0.0
                self._costs.observe(Cost.TOKEN, 1, all_s / tokens)
                took_s -= max(0.0, min(all_s - tokens * self.token_s, _MOST_CREDIT * all_s))
            self._owed_s = max(self._owed_s - took_s, -_MOST_OWED_S)
        else:
            self._tokens = self._unpriced_s = 0.0
        self._since_s = now

    def wrote(self, share: float) -> None:
        """One of the requests, which are `share` of all, has got a token."""
        if self._is_background:
            most_s = _MOST_CREDIT * (self._clock() - self._since_s)
            self._credit_s = min(self._credit_s + share * self.token_s, most_s)
        else:
            self._tokens += share

    def leave(self) -> None:
        self.rest()
        self._is_background = True
