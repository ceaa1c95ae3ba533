"""`switchyard bench cluster --simulated`: what it takes to hand out a job's rows to many nodes, which are made up here.

All but the nodes is what a real job runs: `engine.remote.ray_rows`, which reads rows as nodes want them.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import psutil

from engine.batch_files.rows import Answer, RowRequest
from engine.bench.report import Report
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.jobs.rows import BatchOutcome, never
from engine.protocol import (
    ClusterEvent,
    ClusterJob,
    ClusterNode,
    ClusterNodes,
    DropRows,
    GiveRows,
    NodeAnswers,
    NodeCommand,
    NodeReady,
    StartNode,
)
from engine.remote.ray_rows import RayRows

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
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.known = ClusterNode(self.ident, f"node {number}", host, 8.0, 0.0, 32 * 10**9)


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

    def send(self, command: NodeCommand) -> None:
        node = self._of[command.node]
        if isinstance(command, StartNode):
            node.life = command.life
            loads_s = self._chance.uniform(2.0, 4.0)
            heapq.heappush(self._due, (self.now + loads_s, int(node.ident, 16)))
        elif isinstance(command, GiveRows):
            node.rows.extend(row.row for row in command.rows)
        elif isinstance(command, DropRows):
            gone = set(command.tickets)
            node.rows = deque(ticket for ticket in node.rows if ticket not in gone)

    def events(self, wait_s: float) -> list[ClusterEvent]:
        """See `Link`: time passes here alone."""
        next_s = min(self._due[0][0] if self._due else self.now + wait_s, self._lists_at_s)
        self.now = min(self.now + wait_s, max(self.now, next_s) + _MOMENT_S)
        said: list[ClusterEvent] = []
        if self.now >= self._lists_at_s:
            self._lists_at_s = self.now + _NODES_S
            said.append(ClusterNodes(tuple(node.known for node in self._nodes)))
        while self._due and self._due[0][0] <= self.now:
            due_s, number = heapq.heappop(self._due)
            said.append(self._says(self._nodes[number], due_s))
        return said

    def close(self) -> None:
        """See `Link`."""

    def _says(self, node: _Node, due_s: float) -> ClusterEvent:
        heapq.heappush(self._due, (due_s + _TELL_S, int(node.ident, 16)))
        if node.owed == 0.0:  # it has loaded
            node.owed = 0.5
            rows_per_s = node.rate * self._chance.uniform(0.5, 1.5)
            return NodeReady(node.ident, node.life, "d", "bf16", node.places, rows_per_s)
        node.owed += node.rate * _TELL_S * self._chance.uniform(0.7, 1.3)
        count = min(int(node.owed), len(node.rows))
        node.owed = min(node.owed - count, node.owed % 1.0 + node.places)
        answers = tuple(Answer(ticket, "An answer.", "stop", 20, 30) for ticket in islice(node.rows, count))
        for _ in range(count):
            node.rows.popleft()
        return NodeAnswers(node.ident, node.life, answers, (min(node.places, len(node.rows)), 0))


_PLACES = 16
_SLOWEST, _FASTEST = 1.0, 8.0
"""Rows per second of a node."""


class ClusterPlan(NamedTuple):
    """What to simulate: jobs of so many rows, each on so many nodes."""

    nodes: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """A job that was simulated.

    Attributes:
        steps: rows and nodes that were looked at; unlike seconds they are the same on every machine.
        planning_s: processor time, with that of the simulation.
        busy: share of what the nodes could have answered in its time.
        most_open: most rows that were read and had no answer.
        memory: bytes that the process grew by.
    """

    steps: int
    planning_s: float
    busy: float
    most_open: int
    memory: int


def simulate(rows: int, nodes: int) -> SimulatedJob:
    """Runs a job, and makes sure that each row is answered once."""
    chance = random.Random(1)
    kinds = [(_PLACES, chance.uniform(_SLOWEST, _FASTEST)) for _ in range(nodes)]
    answered = bytearray(rows)
    process = psutil.Process()
    before = most_memory = process.memory_info().rss
    most_open = count = 0

    def on_row(answer: Answer) -> None:
        nonlocal count, most_open, most_memory
        assert not answered[answer.row]
        answered[answer.row] = 1
        count += 1
        if count % 4096 == 0:
            most_open = max(most_open, cluster.open_rows)
            most_memory = max(most_memory, process.memory_info().rss)

    link = SimulatedRay(kinds, chance)
    asked = ClusterJob(("m",), "d", EngineConfig("m", precision="bf16"), BatchJob("in", "out", ray="auto"), ())
    begun_s = time.process_time()
    cluster = RayRows("simulated", asked, lambda _address: link, link.clock)
    assert cluster.open(never)
    outcome = cluster.run(_requests(rows), on_row, never, never)
    took_s = time.process_time() - begun_s
    cluster.close()
    assert outcome is BatchOutcome.FINISHED
    assert count == rows
    busy = rows / (sum(rate for _places, rate in kinds) * link.now)
    return SimulatedJob(cluster.steps, took_s, busy, max(most_open, min(rows, 1)), most_memory - before)


def _requests(rows: int) -> Iterator[RowRequest]:
    sampling = SamplingParams()
    for index in range(rows):
        yield RowRequest(index, (ChatMessage("user", f"What is said about {index}?"),), sampling)


def bench_cluster(plan: ClusterPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: steps and microseconds of planning for each row of a job, and what is in memory."""
    for nodes in plan.nodes:
        for rows in plan.rows:
            name = f"{rows:,} rows on {nodes:,} node{'s' if nodes != 1 else ''}"
            say(f"simulating {name}")
            job = simulate(rows, nodes)
            report.add(f"{name}: steps for each row", [job.steps / rows], "steps")
            report.add(f"{name}: with what is simulated", [job.planning_s / rows * 1e6], "us")
            report.add(f"{name}: most rows in memory", [job.most_open], "rows")
            report.add(f"{name}: memory", [job.memory / 1e6], "MB")
            report.add(f"{name}: of what its nodes could answer in that time", [job.busy], "")
