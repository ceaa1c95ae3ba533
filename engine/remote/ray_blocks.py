"""Rows for many nodes: who gets how many next, and which answers are the first ones.

Bookkeeping alone, without threads, messages or a clock of its own: `now` is whatever monotonic clock the caller has,
and the clocks of the nodes play no part.  Every step takes the same time whatever the number of nodes and rows.

A node holds what it answers in a few seconds at its measured rate.  Once the input has been read, blocks shrink with
what is left (guided self-scheduling: Polychronopoulos and Kuck 1987), by each node's share of all rates.  A node that
has nothing left answers again what a far slower one still holds (backup tasks: Dean and Ghemawat 2004, section 3.6);
the first answer counts.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Row = TypeVar("Row")

_HORIZON_S = 20.0
"""What a node holds, in seconds of its work: enough to never wait for us, and little to lose when it dies."""
MOST_HELD = 2048
"""Most rows of one node."""
_MOST_READ = 16384
"""Most rows that are read before somebody wants them."""
_LEAST_READ = 64
_MEMORY_S = 60.0
"""How far back a rate looks."""
_FORESEEN_S = 10.0
"""What a rate that was only predicted weighs, in seconds of real answers."""
_LATENCY_S = 30.0
"""How long a row takes at a node that has not answered any."""
_NEWEST = 0.2
"""Weight of the newest measurement in an average."""
SUSPECTED = 3
"""Deaths of nodes that held a row after which it is handed out with few others; see `_Item.together`."""
_BY_ITSELF = 5
"""Deaths after which it is handed out alone."""


@dataclass(slots=True, eq=False)
class _Item(Generic[Row]):
    """A row without an answer.

    Attributes:
        deaths: nodes that ended while they held it.
        holders: nodes that hold it now: two of them answer a row that the first one is slow with.
    """

    ticket: int
    row: Row
    deaths: int = 0
    holders: list[str] = field(default_factory=list)
    handed_s: float = 0.0

    @property
    def together(self) -> int:
        """How many rows of its kind a node gets at once: of those that may have ended nodes ever fewer."""
        return int(4 ** max(0, _BY_ITSELF - self.deaths))


@dataclass(slots=True, eq=False)
class _Node(Generic[Row]):
    """One that answers rows.

    Attributes:
        places: rows that it answers at the same time.
        rows, seconds: of late, older ones counting less: its rate.
        latency_s: from handing out a row to its answer.
        on_trial: whether it holds rows that may end it; it gets no others then.
    """

    name: str
    places: int
    held: OrderedDict[int, _Item[Row]] = field(default_factory=OrderedDict)
    rows: float = 0.0
    seconds: float = 0.0
    since_s: float = 0.0
    latency_s: float = 0.0
    counted_rate: float = 0.0
    counted_window: int = 0
    on_trial: bool = False

    def rate(self, now: float) -> float:
        """Rows per second; it falls while a node that holds rows is silent."""
        silent = max(0.0, now - self.since_s) if self.held else 0.0
        return self.rows / (self.seconds + silent) if self.rows and self.seconds + silent > 0 else 0.0

    def saw(self, rows: int, now: float) -> None:
        """So many rows were answered since the last time."""
        passed = max(0.0, now - self.since_s)
        fades = math.exp(-passed / _MEMORY_S)
        self.rows, self.seconds, self.since_s = self.rows * fades + rows, self.seconds * fades + passed, now

    def window(self, now: float) -> int:
        """Rows that it should hold."""
        return min(MOST_HELD, max(self.places, math.ceil(self.rate(now) * _HORIZON_S)))


class Blocks(Generic[Row]):
    """The rows of a job between the input and the nodes.  Not thread-safe.

    Attributes:
        is_read: whether no more rows come, unless one is tried again.
        coming: nodes that are about to join: something is left for them.
        steps: rows and nodes that were looked at so far, to measure what planning takes.
    """

    def __init__(self) -> None:
        self.is_read = False
        self.coming = 0
        self.steps = 0
        self._tickets = 0
        self._queue: deque[_Item[Row]] = deque()
        self._suspects: deque[_Item[Row]] = deque()
        self._open: dict[int, _Item[Row]] = {}
        self._once: OrderedDict[int, _Item[Row]] = OrderedDict()  # held by one node, the longest held first
        self._nodes: dict[str, _Node[Row]] = {}
        self._windows = 0
        self._rates = 0.0
        self._with_rate = 0
        self._in_vain: dict[str, list[int]] = {}

    @property
    def open_rows(self) -> int:
        """Rows that were added and have no answer yet."""
        return len(self._open)

    @property
    def lacks(self) -> int:
        """How many rows to read now, so that every node finds enough and the end of the input is seen in time."""
        wanted = min(_MOST_READ, max(_LEAST_READ, 2 * self._windows))
        return 0 if self.is_read else max(0, wanted - len(self._queue))

    def held(self, node: str) -> int:
        return len(self._nodes[node].held) if node in self._nodes else 0

    def rate(self, node: str, now: float) -> float:
        """Rows per second of a node of late; 0 while unknown."""
        return self._nodes[node].rate(now) if node in self._nodes else 0.0

    def add(self, row: Row) -> int:
        """One more row; returns its ticket, by which answers are told apart."""
        self._tickets += 1
        item = _Item(self._tickets, row)
        self._open[item.ticket] = item
        self._queue.append(item)
        self.steps += 1
        return item.ticket

    def join(self, node: str, places: int, now: float, rate: float = 0.0) -> None:
        """A node can take rows; an earlier one of its name has left.

        Args:
            places: rows that it answers at the same time.
            rate: rows per second that its plan predicts; 0 if unknown.
        """
        assert node not in self._nodes
        made = _Node[Row](node, max(1, min(places, MOST_HELD)), since_s=now)
        if rate > 0:
            made.rows, made.seconds = rate * _FORESEEN_S, _FORESEEN_S
        self._nodes[node] = made
        self._count(made, made.rate(now), made.window(now))

    def leave(self, node: str, *, died: bool) -> list[Row]:
        """A node is gone: others get what it held.  Safe to call for one that never joined.

        Args:
            died: whether a row may have been the reason.

        Returns:
            rows that are given up: nodes died of them although they held nothing else.
        """
        gone = self._nodes.pop(node, None)
        self._in_vain.pop(node, None)
        if gone is None:
            return []
        self._count(gone, 0.0, 0)
        given_up, again = [], []
        for item in gone.held.values():
            self.steps += 1
            item.deaths += died
            item.holders.remove(node)
            if item.holders:
                self._once[item.ticket] = item
                continue
            self._once.pop(item.ticket, None)
            if item.deaths > _BY_ITSELF:
                del self._open[item.ticket]
                given_up.append(item.row)
            elif item.deaths >= SUSPECTED:
                self._suspects.append(item)
            else:
                again.append(item)
        self._queue.extendleft(reversed(again))
        return given_up

    def hand_out(self, node: str, now: float) -> list[tuple[int, Row]]:
        """The rows that a node gets now, with their tickets; none if it has enough."""
        self.steps += 1
        to = self._nodes[node]
        if to.on_trial and to.held:
            return []
        to.on_trial = False
        items = self._next(to, now) if self._queue else self._on_trial(to)
        if not items and not self._queue and self.is_read and not to.held:
            items = self._backups(to, now)
        if items and not to.held:
            to.since_s = now  # it had nothing to do before
        for item in items:
            self.steps += 1
            item.holders.append(node)
            item.handed_s = now
            to.held[item.ticket] = item
            if len(item.holders) == 1:
                self._once[item.ticket] = item
            else:
                self._once.pop(item.ticket, None)
        return [(item.ticket, item.row) for item in items]

    def answered(self, node: str, tickets: Iterable[int], now: float) -> list[int]:
        """Answers have come; returns the tickets of those that count: the others were answered before.

        Answers also count from a node that has left meanwhile.
        """
        first = []
        at = self._nodes.get(node)
        count = 0
        for ticket in tickets:
            self.steps += 1
            if at is not None and (own := at.held.pop(ticket, None)) is not None:
                count += 1
                took = now - own.handed_s
                at.latency_s += (_NEWEST if at.latency_s else 1.0) * (took - at.latency_s)
            item = self._open.pop(ticket, None)
            if item is None:
                continue
            first.append(ticket)
            self._once.pop(ticket, None)
            self._forget(item, node)
        if at is not None and count:
            at.saw(count, now)
            self._count(at, at.rate(now), at.window(now))
        return first

    def in_vain(self, node: str) -> list[int]:
        """Tickets that a node need not answer any more, since it was last asked."""
        return self._in_vain.pop(node, [])

    def _forget(self, item: _Item[Row], by: str) -> None:
        """A row has its answer: whoever else holds it need not go on."""
        for name in item.holders:
            if name != by and name in self._nodes:
                self._nodes[name].held.pop(item.ticket, None)
                self._in_vain.setdefault(name, []).append(item.ticket)

    def _next(self, to: _Node[Row], now: float) -> list[_Item[Row]]:
        held, rate = len(to.held), to.rate(now)
        if not rate and held:
            return []  # first it shows what it can do
        window = to.window(now)
        room = window - held
        if self.is_read:
            room = min(room, math.ceil(self._share(rate) * len(self._queue) / 2))
        elif held and 4 * room < window:
            return []  # not for a row or two
        return self._take(self._queue, room)

    def _share(self, rate: float) -> float:
        """Of the nodes' rates; one without has the mean of the others'."""
        unknown = len(self._nodes) - self._with_rate + self.coming
        mean = self._rates / self._with_rate if self._with_rate else 1.0
        return (rate or mean) / (self._rates + unknown * mean)

    def _on_trial(self, to: _Node[Row]) -> list[_Item[Row]]:
        """Rows that may have ended nodes, for one that holds no others."""
        if to.held or not self._suspects:
            return []
        to.on_trial = True
        return self._take(self._suspects, min(self._suspects[0].together, self._suspects[-1].together))

    def _take(self, waiting: deque[_Item[Row]], most: int) -> list[_Item[Row]]:
        """The first ones; a late answer may have come for some of them, which wait no longer."""
        items = list[_Item[Row]]()
        while waiting and len(items) < most:
            item = waiting.popleft()
            if item.ticket in self._open:
                items.append(item)
        return items

    def _backups(self, to: _Node[Row], now: float) -> list[_Item[Row]]:
        """Rows of a node that will not be done soon, the last ones that it got; both would end at the same time."""
        oldest = next(iter(self._once.values()), None)
        if oldest is None:
            return []
        slow = self._nodes[oldest.holders[0]]
        rate, own = slow.rate(now), to.rate(now)
        left_s = len(slow.held) / rate if rate else now - oldest.handed_s
        if slow is to or slow.on_trial or left_s < 2 * (to.latency_s or _LATENCY_S):
            return []
        part = own / (own + rate) if own else 0.5
        most = max(1, min(to.window(now), int(len(slow.held) * part)))
        items = list[_Item[Row]]()
        for ticket in reversed(slow.held):
            if len(items) == most or ticket not in self._once:
                break
            items.append(slow.held[ticket])
        for item in items:  # those with two holders lie in front: each is passed over once
            slow.held.move_to_end(item.ticket, last=False)
        return items

    def _count(self, node: _Node[Row], rate: float, window: int) -> None:
        self._with_rate += (rate > 0) - (node.counted_rate > 0)
        self._rates = max(0.0, self._rates + rate - node.counted_rate) if self._with_rate else 0.0
        self._windows += window - node.counted_window
        node.counted_rate, node.counted_window = rate, window
