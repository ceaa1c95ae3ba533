"""A Ray cluster of made-up nodes, as the link to it shows one, in a time of its own.

Nodes load for a while, then answer rows at a rate of their own, and say so about once a second, as ours do.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.remote.ray_link import Message

_TELL_S = 1.0
_NODES_S = 2.0
_MOMENT_S = 0.05
"""What comes in so short a time is heard together."""


class _Node:
    """One, with the rows that it has been given and has not answered."""

    def __init__(self, number: int, places: int, rate: float) -> None:
        self.ident = f"{number:032x}"
        self.places, self.rate = places, rate
        self.life = 0
        self.rows: deque[int] = deque()
        self.owed = 0.0
        self.known: dict[str, Any] = {
            "id": self.ident,
            "name": f"node {number}",
            "host": f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            "cpus": 8.0,
            "gpus": 0.0,
            "memory": 32 * 10**9,
        }


class SimulatedRay:
    """A `Link` to so many nodes, of (rows at the same time, rows per second) each.

    Attributes:
        now: seconds so far.
    """

    def __init__(self, nodes: Sequence[tuple[int, float]], chance: random.Random) -> None:
        self.now = 0.0
        self._chance = chance
        self._nodes = [_Node(number, places, rate) for number, (places, rate) in enumerate(nodes)]
        self._of = {node.ident: node for node in self._nodes}
        self._due: list[tuple[float, int]] = []
        self._lists_at_s = 0.0

    def clock(self) -> float:
        """Its time, for whoever speaks to it."""
        return self.now

    def send(self, command: Message) -> None:
        """See `Link`."""
        node = self._of[command["node"]]
        if command["do"] == "start":
            node.life = command["life"]
            loads_s = self._chance.uniform(2.0, 4.0)
            heapq.heappush(self._due, (self.now + loads_s, int(node.ident, 16)))
        elif command["do"] == "give":
            node.rows.extend(ticket for ticket, _fields in command["rows"])
        elif command["do"] == "drop":
            gone = set(command["tickets"])
            node.rows = deque(ticket for ticket in node.rows if ticket not in gone)

    def events(self, wait_s: float) -> list[Message]:
        """See `Link`: time passes here alone."""
        next_s = min(self._due[0][0] if self._due else self.now + wait_s, self._lists_at_s)
        self.now = min(self.now + wait_s, max(self.now, next_s) + _MOMENT_S)
        said: list[Message] = []
        if self.now >= self._lists_at_s:
            self._lists_at_s = self.now + _NODES_S
            said.append({"said": "nodes", "nodes": [node.known for node in self._nodes]})
        while self._due and self._due[0][0] <= self.now:
            due_s, number = heapq.heappop(self._due)
            said.append(self._says(self._nodes[number], due_s))
        return said

    def close(self) -> None:
        """See `Link`."""

    def _says(self, node: _Node, due_s: float) -> Message:
        heapq.heappush(self._due, (due_s + _TELL_S, int(node.ident, 16)))
        about = {"node": node.ident, "life": node.life}
        if node.owed == 0.0:  # it has loaded
            node.owed = 0.5
            foreseen = {"at_once": node.places, "rows_per_s": node.rate * self._chance.uniform(0.5, 1.5)}
            return {"said": "opened", **about, "about": {"digest": "d", "precision": "bf16", **foreseen}}
        node.owed += node.rate * _TELL_S * self._chance.uniform(0.7, 1.3)
        count = min(int(node.owed), len(node.rows))
        node.owed = min(node.owed - count, node.owed % 1.0 + node.places)
        answers = [[ticket, _ANSWER] for ticket in islice(node.rows, count)]
        for _ in range(count):
            node.rows.popleft()
        under_way = [min(node.places, len(node.rows)), 0]
        return {"said": "answers", **about, "answers": answers, "under_way": under_way}


_ANSWER = {
    "row": 0,
    "text": "An answer.",
    "finish_reason": "stop",
    "prompt_tokens": 20,
    "generated_tokens": 30,
    "reasoning": "",
    "error": "",
    "is_complete": True,
    "by": "",
}
