"""Rows spread over places that are slow, full, limited, broken and gone: each is answered once, and limits are kept."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch_files.rows import RowRequest
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.remote.client import MINUTE_S, MinuteLimit
from engine.remote.failures import Trouble
from engine.remote.spread import Place, Spread, Turn

_PROMPT, _WRITTEN = 30, 8


@dataclass
class Server:
    """A simulated place.

    Attributes:
        slots: rows that it answers at the same time; the others wait inside.
        seconds: for one row.
        troubles: spans of time, and what it says to all that is asked within; `UNREACHABLE` also breaks what it has.
        refuses: rows that it will not answer.
        poisoned: rows that it always fails with.
    """

    place: Place
    slots: int = 2
    seconds: float = 1.0
    troubles: tuple[tuple[float, float, Trouble], ...] = ()
    refuses: frozenset[int] = frozenset()
    poisoned: frozenset[int] = frozenset()
    free_s: list[float] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)
    most: int = 0

    def trouble_at(self, moment: float) -> Trouble | None:
        return next((what for first, last, what in self.troubles if first <= moment < last), None)

    def outcome(self, turn: Turn, now: float) -> tuple[float, Trouble | None]:
        """When it answers, and what it says instead of an answer."""
        row = turn.row.row
        self.begun.append((now, len(turn.row.messages[0].content.encode()) // 3 + 16 + turn.row.sampling.max_tokens))
        if (trouble := self.trouble_at(now)) is not None:
            return now + 0.05, trouble
        if row in self.refuses:
            return now + 0.05, Trouble.REFUSED
        if row in self.poisoned:
            return now + 0.1, Trouble.SERVER
        slots = self.free_s or [0.0] * self.slots
        begins = max(now, heapq.heappop(slots))
        ends = begins + self.seconds
        heapq.heappush(slots, ends)
        self.free_s = slots
        for first, _last, what in self.troubles:
            if what is Trouble.UNREACHABLE and now < first < ends:
                return first, what
        return ends, None


@dataclass
class Run:
    """What came of a simulated job."""

    seconds: float
    answered: list[int]
    failed: list[int]
    read_ahead: int
    spread: Spread


def row(number: int, tokens: int = 16, tools: str = "") -> RowRequest:
    return RowRequest(number, (ChatMessage("user", "x" * 42),), SamplingParams(max_tokens=tokens), tools=tools)


def simulate(
    servers: list[Server],
    rows: int,
    *,
    twice: bool = False,
    longest_s: float = 1e6,
    with_tools: Callable[[int], bool] = lambda _number: False,
) -> Run:
    spread = Spread([server.place for server in servers], may_ask_twice=twice)
    by_name = {server.place.name: server for server in servers}
    source, now = iter(range(rows)), 0.0
    events: list[tuple[float, int, Turn, Trouble | None]] = []
    order = itertools.count()
    answered, failed, ahead, given = list[int](), list[int](), 0, 0
    while True:
        for _ in range(max(0, spread.wanted)):
            number = next(source, None)
            if number is None:
                spread.is_read = True
                break
            spread.add(row(number, tools="{}" if with_tools(number) else ""))
            given += 1
        ahead = max(ahead, given - len(answered) - len(failed))
        while (turn := spread.next(now)) is not None:
            server = by_name[turn.at]
            assert server.place.reads_all or not turn.row.is_for_servers
            server.most = max(server.most, sum(1 for _, _, other, _ in events if other.at == turn.at) + 1)
            ends, trouble = server.outcome(turn, now)
            heapq.heappush(events, (ends, next(order), turn, trouble))
        if spread.is_read and spread.is_empty:
            return Run(now, answered, failed, ahead, spread)
        moment = spread.moment(now)
        times = [each for each in (events[0][0] if events else None, moment) if each is not None]
        assert times, f"nothing will ever happen: {spread.paces(now)}"
        now = max(now, min(times))
        assert now < longest_s, spread.waits(now)
        while events and events[0][0] <= now:
            _ends, _order, turn, trouble = heapq.heappop(events)
            if trouble is None:
                if spread.answered(turn, now, _PROMPT, _WRITTEN):
                    answered.append(turn.row.row)
            elif spread.failed(turn, now, trouble, f"{turn.at} says {trouble}."):
                failed.append(turn.row.row)


kinds = st.sampled_from([Trouble.UNREACHABLE, Trouble.BUSY, Trouble.SERVER, Trouble.KEY])


@st.composite
def servers(draw: st.DrawFn) -> list[Server]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        spans = draw(st.lists(st.tuples(st.floats(0, 60), st.floats(0.01, 30), kinds), max_size=3))
        found.append(
            Server(
                Place(
                    f"s{number}",
                    most_at_once=draw(st.none() | st.integers(1, 20)),
                    requests_per_minute=draw(st.none() | st.integers(1, 200)),
                    tokens_per_minute=draw(st.none() | st.integers(20, 5000)),
                ),
                draw(st.integers(1, 12)),
                draw(st.floats(0.01, 10)),
                tuple((first, first + long, what) for first, long, what in spans),
            )
        )
    return found


@settings(max_examples=75, deadline=None)
@given(servers(), st.integers(0, 120), st.booleans())
def test_each_row_is_answered_once_whatever_the_places_do(found: list[Server], rows: int, twice: bool) -> None:
    ran = simulate(found, rows, twice=twice)
    # A place's own trouble passes here: no row may be blamed for it.
    assert sorted(ran.answered) == list(range(rows))
    assert ran.failed == []
    assert sum(pace.rows for pace in ran.spread.paces(ran.seconds)) == rows
    assert ran.read_ahead <= 2 * 64 * len(found) + 1
    for server in found:
        place = server.place
        assert server.most <= (place.most_at_once or 64)
        for begun, _ in server.begun:
            within = [tokens for moment, tokens in server.begun if moment <= begun < moment + MINUTE_S]
            assert place.requests_per_minute is None or len(within) <= place.requests_per_minute
    asked = sum(len(server.begun) for server in found)
    assert asked >= rows


@settings(max_examples=60, deadline=None)
@given(servers(), st.integers(0, 80), st.integers(1, 5), st.booleans())
def test_rows_with_tools_go_past_this_machine(found: list[Server], rows: int, each: int, twice: bool) -> None:
    here = Server(Place("", reads_all=False), 4, 0.5)
    ran = simulate([*found, here], rows, twice=twice, with_tools=lambda number: number % each == 0)
    assert sorted(ran.answered) == list(range(rows))
    assert ran.failed == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(0, 10**6))
def test_no_minute_has_more_than_its_limit(most: int, seed: int) -> None:
    chance, limit, now, spent = random.Random(seed), MinuteLimit(most), 0.0, list[tuple[float, float]]()
    for _ in range(200):
        amount = chance.uniform(0, most / chance.randint(1, 8))
        now = max(now, limit.free_at(now, amount))
        assert limit.free_at(now, amount) == now
        limit.spend(now, amount)
        spent.append((now, amount))
        now += chance.choice((0.0, chance.uniform(0, 20)))
        minute = sum(each for moment, each in spent if now < moment + MINUTE_S)
        assert minute <= most * (1 + 1e-9)


def test_a_row_that_no_server_can_answer_fails_and_the_others_do_not() -> None:
    poisoned = frozenset({7, 39})
    found = [Server(Place(name), poisoned=poisoned) for name in ("a", "b")]
    ran = simulate(found, 40)
    assert sorted(ran.failed) == [7, 39]
    assert sorted(ran.answered) == sorted(set(range(40)) - poisoned)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (0.5, 2.0, 8.0), (0.2, 30.0)])
def test_rows_end_together_at_places_of_any_speed(speeds: tuple[float, ...], twice: bool) -> None:
    found = [Server(Place(f"s{number}"), 4, seconds) for number, seconds in enumerate(speeds)]
    ran = simulate(found, 500, twice=twice)
    ideal = 500 / sum(server.slots / server.seconds for server in found)
    assert ran.seconds <= 1.2 * ideal + min(speeds)
    assert len(ran.answered) == 500


def test_the_last_slow_rows_are_asked_of_another_place_only_if_that_is_allowed() -> None:
    def found() -> list[Server]:
        stuck = Server(Place("stuck"), 4, 1.0)
        stuck.troubles = ((9.5, 500.0, Trouble.UNREACHABLE),)
        return [stuck, Server(Place("quick"), 4, 1.0)]

    assert simulate(found(), 60).seconds < 15
    slow = [Server(Place("slow"), 2, 60.0), Server(Place("quick"), 4, 1.0)]
    once = simulate(slow, 30)
    assert once.seconds >= 60
    slow = [Server(Place("slow"), 2, 60.0), Server(Place("quick"), 4, 1.0)]
    twice = simulate(slow, 30, twice=True)
    assert twice.seconds < 15
    assert sorted(twice.answered) == list(range(30))


def test_pauses_grow_and_what_the_server_asks_for_is_kept() -> None:
    spread = Spread([Place("a")])
    spread.add(row(0))
    now, pauses = 0.0, []
    for _ in range(8):
        turn = spread.next(now)
        assert turn is not None
        assert not spread.failed(turn, now, Trouble.UNREACHABLE, "The connection was refused.")
        assert spread.next(now) is None
        moment = spread.moment(now)
        assert moment is not None
        pauses.append(moment - now)
        now = moment
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    turn = spread.next(now)
    assert turn is not None
    spread.failed(turn, now, Trouble.BUSY, "It wants fewer requests.", retry_after_s=7.0)
    assert spread.moment(now) == now + 7
    assert "asked again in 7 s" in spread.waits(now)
    assert spread.stuck_s(now) == now
    turn = spread.next(now + 7)
    assert turn is not None
    assert spread.answered(turn, now + 8, 3, 4)
    assert spread.waits(now + 8) == ""


def test_costs_are_counted_also_for_what_is_dropped() -> None:
    spread = Spread([Place("a", price_in=1.0, price_out=2.0, currency="EUR"), Place("b")], may_ask_twice=True)
    spread.add(row(0))
    turn = spread.next(0.0)
    assert turn is not None
    assert spread.answered(turn, 1.0, 1_000_000, 500_000)
    (pace, other) = sorted(spread.paces(1.0), key=lambda each: each.name)
    assert (pace.cost, pace.currency) == (2.0, "EUR")
    assert other.cost is None
