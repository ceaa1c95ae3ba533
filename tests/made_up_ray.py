"""The other side of the link to a Ray cluster, made up: nodes that answer at once, die, leave, join and are late."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.remote.ray_link import Message

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
        started: (node, spec) of every engine.
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
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.answered: list[tuple[str, str]] = []
        self.unreachable = ""
        self.foreseen = 0.0
        self.on_look: Callable[[MadeUpRay], None] = lambda _cluster: None
        self.engines: dict[str, tuple[int, deque[tuple[int, dict[str, Any]]]]] = {}
        self.said: list[Message] = []
        self.closed = True

    @staticmethod
    def node(name: str) -> dict[str, Any]:
        return {"id": name, "name": name, "host": name, "cpus": 2.0, "gpus": 0.0, "memory": 10**9}

    def open(self, _address: str) -> MadeUpRay:
        """See `Link`: a connection."""
        assert self.closed, "two links at once"
        self.links += 1
        self.closed = False
        self.said = [{"said": "refused", "why": self.unreachable}] if self.unreachable else []
        return self

    def clock(self) -> float:
        return self.now

    def send(self, command: Message) -> None:
        node = command["node"]
        if command["do"] == "start":
            self.started.append((node, command["spec"]))
            about = {"node": node, "life": command["life"]}
            if node in self.refusals:
                self.said.append({"said": "opened", **about, "about": {"refused": self.refusals[node]}})
                return
            precision = command["spec"]["config"]["precision"].replace("auto", "int8")
            digest = command["spec"]["digest"] or "d"
            found = {"digest": digest, "precision": precision, "at_once": 8, "rows_per_s": self.foreseen}
            self.engines[node] = (command["life"], deque())
            self.said.append({"said": "opened", **about, "about": found})
            return
        life, rows = self.engines.get(node, (-1, deque()))
        if life == command["life"] and command["do"] == "give":
            rows.extend(command["rows"])

    def events(self, _wait_s: float) -> list[Message]:
        self.now += STEP_S
        if self.closed:
            return []
        self.on_look(self)
        if self.trouble and self.chance.random() < self.trouble:
            self._go_wrong()
        said, self.said = self.said, []
        if self.unreachable:
            return said
        said.insert(0, {"said": "nodes", "nodes": list(self.nodes.values())})
        for node, (life, rows) in self.engines.items():
            if node in self.nodes:
                answers = [self._answer(node, *rows.popleft()) for _ in range(min(self.speed, len(rows)))]
                about = {"node": node, "life": life, "under_way": [len(rows), 0]}
                said.append({"said": "answers", **about, "answers": answers})
        return said

    def close(self) -> None:
        """Engines end with the link."""
        self.closed = True
        self.engines.clear()

    def kill(self, node: str, why: str = "its process ended") -> None:
        """An engine ends; what it had answered may still come."""
        if node in self.engines:
            life, rows = self.engines.pop(node)
            self.said.append({"said": "gone", "node": node, "life": life, "why": why})
            late = [self._answer(node, *row) for row in list(rows)[: self.chance.randrange(3)]]
            if late:
                about = {"node": node, "life": life, "under_way": [0, 0]}
                self.said.append({"said": "answers", **about, "answers": late})

    def end_link(self) -> None:
        """The program on the other side dies."""
        self.engines.clear()
        self.said = [{"said": "ended"}]

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

    def _answer(self, node: str, ticket: int, row: dict[str, Any]) -> list[Any]:
        question = row["messages"][-1]["content"]
        self.answered.append((node, question))
        text = question.upper()
        fields = {"row": ticket, "text": text, "finish_reason": "stop", "prompt_tokens": 2, "generated_tokens": 3}
        return [ticket, {**fields, "reasoning": "", "error": "", "is_complete": True, "by": ""}]
