"""Which place gets which row, and when: bookkeeping alone, without threads, connections or a clock of its own.

A place is where rows are answered: a server, or this machine.  Each takes its next row when it has room for one, so all
get as many as they can answer; near the end a slow one leaves the last rows to those that will be done sooner.  A row
may be asked several times and is answered once: later answers are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.batch_files.job_watcher import PlacePace, PlaceState
from engine.batch_files.rows import RowRequest
from engine.remote.client import MinuteLimit, Spent, Width
from engine.remote.failures import Trouble

MOST_AT_ONCE = 64
"""Rows at a place that says nothing of how many it takes."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_OUT_PAUSE_S, _LONGEST_OUT_S = 60.0, 600.0
_MOST_STRIKES = 4
"""Tries of a row that end in a place's fault, while other rows are answered, before the row is to blame."""
_LAST_S = 180.0
_RATE_S = 30.0
_NEWEST = 0.3
"""Weight of the newest row in the average of a place's seconds."""
_SLOW = 1.5
"""A row that takes so much longer than another place needs for one is asked there as well."""


OUT = frozenset((Trouble.KEY, Trouble.CERTIFICATE, Trouble.WRONG_MODEL, Trouble.ADDRESS))
"""The place will answer nothing until somebody does something."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows are answered.

    Attributes:
        name: unique; empty for this machine.
        host: where text goes.
        most_at_once: rows at the same time at most; fewer where more make it no faster.
        requests_per_minute, tokens_per_minute: what may be asked of it; None: no limit.
        price_in, price_out: of a million tokens read and written; None: not known.
        reads_all: whether it takes rows with pictures and tools, too.
    """

    name: str
    host: str = ""
    most_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    price_in: float | None = None
    price_out: float | None = None
    currency: str = ""
    reads_all: bool = True


@dataclass(slots=True, eq=False)
class _Open:
    """A row without an outcome."""

    asked: RowRequest
    turns: list[Turn] = field(default_factory=list)
    strikes: int = 0
    has_failed: bool = False
    fails_since_s: float = 0.0
    troubled_s: float = 0.0
    """When it met trouble last."""
    avoids: str | None = None


@dataclass(slots=True, eq=False)
class Turn:
    """One row asked of one place.

    Attributes:
        at: the place's name.
        row: what is asked.
    """

    at: str
    row: RowRequest
    open: _Open
    begun_s: float
    reserved: Spent
    tokens: int = 0


class _Placed:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.requests, self.tokens = MinuteLimit(place.requests_per_minute), MinuteLimit(place.tokens_per_minute)
        self.width = Width(place.most_at_once or MOST_AT_ONCE)
        self.turns: list[Turn] = []
        self.faults = 0
        self.rests_until_s = 0.0
        self.troubled_s = -math.inf
        self.is_out = False
        self.why = ""
        self.seconds: float | None = None
        self.rows = self.failed = self.prompt_tokens = self.generated_tokens = self.arrived = 0
        self._seen: deque[tuple[float, int]] = deque()

    @property
    def room(self) -> int:
        """How many more rows it may have: one alone after a fault, until that is answered."""
        return (1 if self.faults else self.width.rows) - len(self.turns)

    def reads(self, row: _Open) -> bool:
        return self.place.reads_all or not row.asked.is_for_servers

    def is_well(self, now: float) -> bool:
        return not self.faults and now >= self.rests_until_s

    def free_at(self, now: float, amount: float) -> float:
        """When it may be asked something of so many tokens, if it has room then."""
        return max(self.rests_until_s, self.requests.free_at(now, 1), self.tokens.free_at(now, amount))

    def begin(self, turn: Turn) -> None:
        self.turns.append(turn)

    def came(self, turn: Turn, tokens: int, now: float) -> bool:
        """So many tokens of a turn have come in all; whether any of them are new."""
        if turn not in self.turns or tokens <= turn.tokens:
            return False
        self.arrived += tokens - turn.tokens
        turn.tokens = tokens
        self._seen.append((now, self.arrived))
        while len(self._seen) > 2 and (self._seen[1][0] < now - _RATE_S or len(self._seen) > 4096):
            self._seen.popleft()
        return True

    def tokens_per_s(self, now: float) -> float:
        if len(self._seen) < 2 or now <= self._seen[0][0]:
            return 0.0
        first_s, first = self._seen[0]
        return (self.arrived - first) / max(now - first_s, 1.0)

    def rest(self, now: float, seconds: float, why: str, *, is_out: bool = False) -> None:
        self.rests_until_s = max(self.rests_until_s, now + seconds)
        self.why, self.is_out = why, is_out

    def recover(self) -> None:
        self.faults, self.why, self.is_out = 0, "", False

    @property
    def cost(self) -> float | None:
        price_in, price_out = self.place.price_in, self.place.price_out
        if price_in is None and price_out is None:
            return None
        return (self.prompt_tokens * (price_in or 0.0) + self.generated_tokens * (price_out or 0.0)) / 1e6


class Spread:
    """Rows on their way to places and back.

    Args:
        may_ask_twice: whether the last rows may be asked of a second place when the first one is slow, which costs
            tokens.
    """

    def __init__(self, places: Sequence[Place], *, may_ask_twice: bool = False) -> None:
        self._placed = {place.name: _Placed(place) for place in places}
        self._may_ask_twice = may_ask_twice
        self._waiting: deque[_Open] = deque()
        self._open: dict[int, _Open] = {}
        self._answers = 0
        self._works_s = -math.inf
        """When the last of the turns that were answered began."""
        self._stuck_since_s: float | None = None
        self.is_read = False
        """Whether there are no more rows to add at present."""

    # --- rows -------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many more rows are to be read: few enough to lose nothing, enough to see the end coming."""
        return sum(max(1, placed.width.rows) for placed in self._placed.values()) - len(self._waiting)

    def add(self, asked: RowRequest) -> None:
        """One more row to be answered.  It has no answer yet, or is to be tried again."""
        assert asked.row not in self._open
        row = self._open[asked.row] = _Open(asked)
        self._waiting.append(row)

    @property
    def is_empty(self) -> bool:
        """Whether no row is left without an outcome."""
        return not self._open

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that are being answered, and the tokens that came for them."""
        turns = [row.turns for row in self._open.values() if row.turns]
        return len(turns), sum(max(turn.tokens for turn in each) for each in turns)

    # --- asking -----------------------------------------------------------------------------------

    def next(self, now: float) -> Turn | None:
        """What to ask now; None if that has to wait."""
        free = [placed for placed in self._placed.values() if placed.room > 0 and placed.rests_until_s <= now]
        free.sort(key=lambda placed: placed.seconds or 0.0)
        for placed in free:
            row = self._row_for(placed, now)
            if row is not None:
                return self._begin(placed, row, now)
        for placed in free:
            placed.width.starve()
        return None

    def moment(self, now: float) -> float | None:
        """When `next` may have something although nothing has come meanwhile; None if that will not be."""
        moments = list[float]()
        for placed in self._placed.values():
            if placed.room > 0:
                amount = _most_tokens(self._waiting[0].asked) if self._waiting else 0
                moments.append(placed.free_at(now, amount))
        later = [moment for moment in moments if moment > now]
        return min(later) if later else None

    def _row_for(self, placed: _Placed, now: float) -> _Open | None:
        well = [other for other in self._placed.values() if other is not placed and other.is_well(now)]
        for row in self._waiting:
            if not placed.reads(row):
                continue
            others = [other for other in well if other.reads(row)]
            if row.avoids == placed.place.name and others:
                continue
            if any(turn.row.row == row.asked.row for turn in placed.turns):
                continue  # it still answers an earlier try, which nobody wants any more
            amount = _most_tokens(row.asked)
            if placed.free_at(now, amount) > now:
                return None
            able = [other for other in others if row.avoids != other.place.name and other.free_at(now, amount) <= now]
            if placed.faults or not self._is_better_left(placed, able):
                self._waiting.remove(row)
                return row
            return None
        return self._slow_row(placed, now) if self._may_ask_twice and self.is_read and not self._waiting else None

    def _is_better_left(self, placed: _Placed, others: Sequence[_Placed]) -> bool:
        """Whether the rows that are left will be answered sooner without this place."""
        if not self.is_read or placed.seconds is None:
            return False
        rate, soonest = 0.0, math.inf
        for other in others:
            if other.seconds:
                # A row's place becomes free after a part of its time, and the last row takes all of it.
                rate += other.width.rows / other.seconds
                soonest = min(soonest, other.seconds)
        return rate > 0 and placed.seconds > len(self._waiting) / rate + soonest

    def _slow_row(self, placed: _Placed, now: float) -> _Open | None:
        """A row that another place has been answering for longer than this one would need."""
        if placed.seconds is None or placed.faults:
            return None
        slow = [
            row
            for row in self._open.values()
            if len(row.turns) == 1
            and row.turns[0].at != placed.place.name
            and placed.reads(row)
            and now - row.turns[0].begun_s > _SLOW * placed.seconds
            and placed.free_at(now, _most_tokens(row.asked)) <= now
        ]
        return min(slow, key=lambda row: row.turns[0].begun_s, default=None)

    def _begin(self, placed: _Placed, row: _Open, now: float) -> Turn:
        placed.requests.spend(now, 1)
        reserved = placed.tokens.spend(now, _most_tokens(row.asked))
        turn = Turn(placed.place.name, row.asked, row, now, reserved)
        row.turns.append(turn)
        placed.begin(turn)
        return turn

    # --- answers ----------------------------------------------------------------------------------

    def came(self, turn: Turn, tokens: int, now: float) -> None:
        """So many tokens of an answer have come in all."""
        placed = self._placed[turn.at]
        if placed.came(turn, tokens, now):
            placed.width.look(now, placed.arrived)

    def answered(
        self, turn: Turn, now: float, prompt_tokens: int, generated_tokens: int, *, failed: bool = False
    ) -> bool:
        """A place has answered; whether that is the row's answer, and not a second one."""
        placed, row = self._placed[turn.at], turn.open
        placed.came(turn, generated_tokens, now)
        turn.reserved.amount = prompt_tokens + generated_tokens
        placed.prompt_tokens += prompt_tokens
        placed.generated_tokens += generated_tokens
        seconds = now - turn.begun_s
        placed.seconds = seconds if placed.seconds is None else placed.seconds + _NEWEST * (seconds - placed.seconds)
        if turn.begun_s >= placed.troubled_s:  # earlier ones say nothing of how it is now
            placed.recover()
        self._works_s = max(self._works_s, turn.begun_s)
        placed.width.look(now, placed.arrived, has_answered=True)
        self._answers += 1
        self._stuck_since_s = None
        is_first = self._end(turn)
        if is_first:
            placed.rows += 1
            placed.failed += failed
            del self._open[row.asked.row]
        return is_first

    def failed(self, turn: Turn, now: float, trouble: Trouble, why: str, retry_after_s: float | None = None) -> bool:
        """A place has not answered; whether that is the row's outcome: it is not asked again then.

        Args:
            why: what the place said, as a sentence.
            retry_after_s: it wants to be left alone for so long.
        """
        placed, row = self._placed[turn.at], turn.open
        turn.reserved.amount = min(turn.reserved.amount, turn.tokens)
        if trouble is Trouble.REFUSED:
            placed.recover()
            self._stuck_since_s = None
        else:
            self._rest(placed, turn, now, trouble, why, retry_after_s)
        if not self._end(turn):
            return False
        if trouble is Trouble.REFUSED or self._is_to_blame(row, trouble, now):
            placed.rows += 1
            placed.failed += 1
            del self._open[row.asked.row]
            return True
        if not row.turns:
            row.avoids = turn.at
            self._waiting.append(row)  # behind the others, which it would hold up if it is to blame
        return False

    def dropped(self, turn: Turn) -> None:
        """A turn that nobody waits for any more has ended."""
        turn.reserved.amount = min(turn.reserved.amount, turn.tokens)
        if self._end(turn) and not turn.open.turns:
            self._waiting.appendleft(turn.open)

    def others_of(self, turn: Turn) -> Iterator[Turn]:
        """The turns that ask the same row, and whose answers will be dropped."""
        return (other for other in turn.open.turns if other is not turn)

    def leave(self, name: str, why: str) -> None:
        """A place has ended for good."""
        placed = self._placed[name]
        placed.rest(0.0, math.inf, why, is_out=True)
        placed.faults += 1
        for turn in list(placed.turns):
            self.dropped(turn)

    def _end(self, turn: Turn) -> bool:
        """Ends a turn; whether its row has no outcome yet."""
        placed = self._placed[turn.at]
        if turn in placed.turns:
            placed.turns.remove(turn)
        row = turn.open
        if turn in row.turns:
            row.turns.remove(turn)
        return self._open.get(row.asked.row) is row

    def _rest(
        self, placed: _Placed, turn: Turn, now: float, trouble: Trouble, why: str, retry_after_s: float | None
    ) -> None:
        # Rows that were under way together meet the same trouble: it counts once.
        placed.troubled_s = now
        is_new = not placed.faults or (now >= placed.rests_until_s and turn.begun_s >= placed.rests_until_s)
        if trouble is Trouble.BUSY and is_new:
            placed.width.halve()
        placed.faults += is_new
        is_out = trouble in OUT
        first, longest = (_OUT_PAUSE_S, _LONGEST_OUT_S) if is_out else (_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        pause = min(longest, first * 2.0 ** min(placed.faults - 1, 30))
        if retry_after_s is not None:
            pause = max(0.0, retry_after_s)
        if is_new or retry_after_s is not None:
            placed.rest(now, pause, why, is_out=is_out)
        if self._stuck_since_s is None and not any(other.is_well(now) for other in self._useful()):
            self._stuck_since_s = now

    def _is_to_blame(self, row: _Open, trouble: Trouble, now: float) -> bool:
        """Whether the row, not the place, is the reason: others are answered, and this one never is.

        At the end there may be no others: then a server that is there and fails with every row that is left is
        believed after a while.
        """
        if trouble not in (Trouble.UNREACHABLE, Trouble.SERVER):
            return False
        # Only what was asked later and answered shows that places work for others.
        work_for_others = row.has_failed and self._works_s > row.troubled_s
        if not row.has_failed or work_for_others:
            row.fails_since_s = now
        row.strikes += work_for_others
        row.has_failed, row.troubled_s = True, now
        are_all_failing = (
            trouble is Trouble.SERVER
            and self._answers > 0
            and self.is_read
            and all(other.has_failed for other in self._open.values())
        )
        return row.strikes >= _MOST_STRIKES or (are_all_failing and now - row.fails_since_s >= _LAST_S)

    # --- for people -------------------------------------------------------------------------------

    def stuck_s(self, now: float) -> float:
        """For how long no place has been well; 0 if one is."""
        return now - self._stuck_since_s if self._stuck_since_s is not None else 0.0

    @property
    def are_all_out(self) -> bool:
        """Whether nobody answers until somebody does something."""
        useful = self._useful()
        return bool(useful) and all(placed.is_out for placed in useful)

    def _useful(self) -> list[_Placed]:
        """The places that can read a row that is left."""
        return [placed for placed in self._placed.values() if any(map(placed.reads, self._open.values()))]

    def waits(self, now: float) -> str:
        """Why nothing is being answered, as a sentence; empty if something is."""
        if self._stuck_since_s is None:
            return ""
        parts = []
        for placed in self._useful():
            left = placed.rests_until_s - now
            again = "" if left == math.inf else f", asked again in {left:.0f} s" if left >= 1 else ", being asked again"
            parts.append(f"{placed.place.name or 'this PC'}: {placed.why.rstrip('.')}{again}")
        return f"Waiting, since nobody answers ({'; '.join(parts)})."

    def paces(self, now: float) -> tuple[PlacePace, ...]:
        return tuple(self._pace(placed, now) for placed in self._placed.values())

    def _pace(self, placed: _Placed, now: float) -> PlacePace:
        state: PlaceState = "out" if placed.is_out else "resting" if placed.faults else "working"
        why = placed.why
        if state == "working" and self._waiting and placed.room > 0 and placed.free_at(now, 0) > now:
            why = "It has been asked as much as its limits allow for now."
        return PlacePace(
            placed.place.name,
            placed.place.host,
            state,
            why,
            len(placed.turns),
            placed.width.rows,
            placed.rows,
            placed.failed,
            placed.prompt_tokens,
            placed.generated_tokens,
            placed.tokens_per_s(now),
            placed.cost,
            placed.place.currency,
        )


def _most_tokens(asked: RowRequest) -> int:
    """The most tokens that a row will take of a limit: a token has three bytes at least, as a rule."""
    read = sum(len(message.content.encode("utf-8", "replace")) // 3 + 16 for message in asked.messages)
    return read + asked.sampling.max_tokens
