"""The other side of the link to a Ray cluster, made up: nodes that answer at once, die, leave, join and are late."""

import random
from collections import deque
from collections.abc import Callable

from engine.batch_files.rows import Answer, RowRequest
from engine.common.errors import ErrorCode
from engine.protocol import (
    ClusterEvent,
    ClusterNode,
    ClusterNodes,
    Failed,
    GiveRows,
    NodeAnswers,
    NodeCommand,
    NodeGone,
    NodeReady,
    StartNode,
)

STEP_S = 0.5


class MadeUpRay:
    """A cluster behind any number of links, with a clock of its own.

    Args:
        nodes: names, which are their ids too.
        speed: rows that a node answers between two looks.
        chance, trouble: how likely something goes wrong at each look.

    Attributes:
        refusals: by node, why it cannot be used.
        links: how many were opened.
        started: what every engine was to do.
        answered: (node, row's question) of every answer that was given.
        unreachable: why no link can be opened.
        foreseen: rows per second that a node's plan predicts.
    """

    def __init__(self, nodes: list[str], speed: int = 7, chance: random.Random | None = None, trouble: float = 0.0):
        self.nodes = {name: self.node(name) for name in nodes}
        self.speed, self.chance, self.trouble = speed, chance or random.Random(0), trouble
        self.refusals: dict[str, str] = {}
        self.links = 0
        self.now = 0.0
        self.started: list[StartNode] = []
        self.answered: list[tuple[str, str]] = []
        self.unreachable = ""
        self.foreseen = 0.0
        self.on_look: Callable[[MadeUpRay], None] = lambda _cluster: None
        self.engines: dict[str, tuple[int, deque[RowRequest]]] = {}
        self.said: list[ClusterEvent] = []
        self.closed = True

    @staticmethod
    def node(name: str) -> ClusterNode:
        return ClusterNode(name, name, name, 2.0, 0.0, 10**9)

    def open(self, _address: str) -> "MadeUpRay":
        """See `Link`: a connection."""
        assert self.closed, "two links at once"
        self.links += 1
        self.closed = False
        self.said = [_failed(self.unreachable), _failed("")] if self.unreachable else []
        return self

    def clock(self) -> float:
        return self.now

    def send(self, command: NodeCommand) -> None:
        node, life = command.node, command.life
        if isinstance(command, StartNode):
            self.started.append(command)
            if node in self.refusals:
                self.said.append(NodeGone(node, life, self.refusals[node], refuses=True))
                return
            precision = command.asked.config.precision.replace("auto", "int8")
            self.engines[node] = (life, deque())
            self.said.append(NodeReady(node, life, command.asked.digest or "d", precision, 8, self.foreseen))
        elif isinstance(command, GiveRows):
            known, rows = self.engines.get(node, (-1, deque()))
            if life == known:
                rows.extend(command.rows)

    def events(self, _wait_s: float) -> list[ClusterEvent]:
        self.now += STEP_S
        if self.closed:
            return []
        self.on_look(self)
        if self.trouble and self.chance.random() < self.trouble:
            self._go_wrong()
        said, self.said = self.said, []
        if self.unreachable:
            return said
        said.insert(0, ClusterNodes(tuple(self.nodes.values())))
        for node, (life, rows) in self.engines.items():
            if node in self.nodes:
                answers = tuple(self._answer(node, rows.popleft()) for _ in range(min(self.speed, len(rows))))
                said.append(NodeAnswers(node, life, answers, (len(rows), 0)))
        return said

    def close(self) -> None:
        """Engines end with the link."""
        self.closed = True
        self.engines.clear()

    def kill(self, node: str, why: str = "its process ended") -> None:
        """An engine ends; what it had answered may still come."""
        if node in self.engines:
            life, rows = self.engines.pop(node)
            self.said.append(NodeGone(node, life, why))
            if late := tuple(self._answer(node, row) for row in list(rows)[: self.chance.randrange(3)]):
                self.said.append(NodeAnswers(node, life, late, (0, 0)))

    def end_link(self) -> None:
        """The program on the other side dies."""
        self.engines.clear()
        self.said = [_failed("")]

    def _go_wrong(self) -> None:
        what = self.chance.choice(["kill", "kill", "leave", "join", "link"])
        names = sorted(self.nodes)
        if what == "join":
            name = f"late{len(self.started)}"
            self.nodes[name] = self.node(name)
        elif what == "link":
            self.end_link()
        elif what == "leave" and len(names) > 1:
            del self.nodes[self.chance.choice(names)]
        elif self.engines:
            self.kill(self.chance.choice(sorted(self.engines)))

    def _answer(self, node: str, row: RowRequest) -> Answer:
        question = row.messages[-1].content
        self.answered.append((node, question))
        return Answer(row.row, question.upper(), "stop", 2, 3)


def _failed(why: str) -> Failed:
    return Failed("", ErrorCode.DEVICE_UNAVAILABLE, why)
