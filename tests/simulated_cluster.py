"""Rows handed out to made-up nodes in their own time: they answer, die, come back and are late."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine.remote.ray_blocks import Blocks

_BACK_S = 5.0
"""How long a node that died is away, on average."""


@dataclass(slots=True)
class _Node:
    name: str
    places: int
    rate: float
    life: int = 0
    waiting: deque[int] = field(default_factory=deque)
    answering: set[int] = field(default_factory=set)


class SimulatedCluster:
    """A job on made-up nodes, in their own time.

    Args:
        rows: of the job.
        nodes: (rows at the same time, rows per second) of each.
        chance: whatever is random.
        trouble: how likely a node dies, or leaves, with each answer.

    Attributes:
        now: seconds so far.
        counted: rows whose answers counted.
        given_up: rows that seemed to end nodes.
        most_held: most rows that a node held.
    """

    def __init__(
        self, rows: int, nodes: Sequence[tuple[int, float]], chance: random.Random, *, trouble: float = 0.0
    ) -> None:
        self.blocks = Blocks[int]()
        self.now = 0.0
        self.counted: list[int] = []
        self.given_up: list[int] = []
        self.most_held = 0
        self._left = iter(range(rows))
        self._row_of: dict[int, int] = {}
        self._chance, self._trouble = chance, trouble
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._nodes = [_Node(f"node {number}", places, rate) for number, (places, rate) in enumerate(nodes)]
        for node in self._nodes:
            self._later(chance.uniform(0, 1) if trouble else 0.0, lambda node=node: self._join(node))  # type: ignore[misc]

    def run(self) -> None:
        """Until every row has its answer."""
        self._read()
        while self.blocks.open_rows or not self.blocks.is_read:
            self.now, _order, happens = heapq.heappop(self._events)
            happens()

    def _later(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happens))

    def _read(self) -> None:
        for _ in range(self.blocks.lacks):
            entry = next(self._left, None)
            if entry is None:
                self.blocks.is_read = True
                return
            self._row_of[self.blocks.add(entry)] = entry

    def _join(self, node: _Node) -> None:
        self.blocks.join(node.name, node.places, self.now)
        self._look(node, node.life)

    def _look(self, node: _Node, life: int) -> None:
        """A node without work asks for more again and again, as ours do."""
        if life != node.life:
            return
        self._give(node)
        if not node.answering:
            self._later(1.0, lambda: self._look(node, life))

    def _give(self, node: _Node) -> None:
        self._read()
        given = self.blocks.hand_out(node.name, self.now)
        node.waiting.extend(ticket for ticket, _row in given)
        self.most_held = max(self.most_held, self.blocks.held(node.name))
        self._begin(node)

    def _begin(self, node: _Node) -> None:
        while node.waiting and len(node.answering) < node.places:
            ticket, life = node.waiting.popleft(), node.life
            node.answering.add(ticket)
            takes = node.places / node.rate * self._chance.uniform(0.7, 1.3)
            self._later(takes, lambda ticket=ticket, life=life: self._end(node, life, ticket))  # type: ignore[misc]

    def _end(self, node: _Node, life: int, ticket: int) -> None:
        if life != node.life and self._chance.random() < 0.5:
            return  # the rest of what a dead node answered comes late
        for first in self.blocks.answered(node.name, [ticket], self.now):
            self.counted.append(self._row_of.pop(first))
        if life != node.life:
            return
        node.answering.discard(ticket)
        if self._chance.random() < self._trouble:
            self._lose(node)
            return
        self._begin(node)
        self._look(node, life)

    def _lose(self, node: _Node) -> None:
        """It is gone, and comes back some time."""
        self.given_up += self.blocks.leave(node.name, died=self._chance.random() < 0.5)
        node.life += 1
        node.waiting.clear()
        node.answering.clear()
        self._later(self._chance.uniform(0, 2 * _BACK_S), lambda: self._join(node))
