"""`switchyard bench cluster --simulated`: what it takes to hand out a job's rows to many nodes, which are made up here.

All but the nodes is what a real job runs: `engine.remote.ray_rows`, which reads rows as nodes want them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from benchmarks.simulated_ray import SimulatedRay
from engine.batch_files.rows import RowRequest
from engine.bench.report import Report
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.jobs.rows import BatchOutcome, RowAnswer, never
from engine.remote.ray_rows import ClusterJob, RayRows

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


def simulate(rows: int, nodes: int, seed: int = 1) -> SimulatedJob:
    """Runs a job, and makes sure that each row is answered once."""
    chance = random.Random(seed)
    kinds = [(_PLACES, chance.uniform(_SLOWEST, _FASTEST)) for _ in range(nodes)]
    answered = bytearray(rows)
    process = psutil.Process()
    before = most_memory = process.memory_info().rss
    most_open = count = 0

    def on_row(answer: RowAnswer) -> None:
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
