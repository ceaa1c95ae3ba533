"""A job's rows on a Ray cluster: an engine on each node, rows in blocks by each node's measured rate.

The journal stays with the caller; this decides which rows are where.  Nodes join and leave as they like; what a node
held that died is handed out again, and its engine is started again after a pause.  Only our own clock is read.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import queue
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol, cast

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, PlacePace, PlaceState
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import Answer, RowRequest, failed
from engine.checkpoint.names import name_of, resolve
from engine.checkpoint.shards import content_digest
from engine.common.channel import ANY_LENGTH, Channel, Pipes
from engine.common.collector import without_collector
from engine.common.config import EngineConfig
from engine.common.confined import started
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module
from engine.formats import AUTO
from engine.jobs.job import Answerer, run_job
from engine.jobs.rows import BatchOutcome, Check, RowCallback
from engine.planner.batch_prediction import first_rows
from engine.protocol import (
    ClusterEvent,
    ClusterJob,
    ClusterNode,
    ClusterNodes,
    DropRows,
    Failed,
    GiveRows,
    NodeAnswers,
    NodeCommand,
    NodeDoes,
    NodeGone,
    NodeReady,
    StartNode,
    decode,
    encode,
)
from engine.remote.ray_blocks import Blocks

_PROGRAM = "engine.process.ray_driver"
_ENDS_S = 8.0


class Link(Protocol):
    """Commands to the nodes of a cluster, and what they say."""

    def send(self, command: NodeCommand) -> None:
        """Without effect once the other side has ended."""

    def events(self, wait_s: float) -> list[ClusterEvent]:
        """What was said since the last call, after waiting for something; a `Failed` is the last thing."""

    def close(self) -> None:
        """Ends the other side and all that it began on nodes."""


class RayLink:
    """A process of our own; safe to use on one thread at a time.

    Args:
        address: of the cluster, as `ray.init` takes it.
    """

    def __init__(self, address: str) -> None:
        self._process = started(_PROGRAM, {**os.environ, **python_module(_PROGRAM)[1]}, address)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._said: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self._channel = Channel(
            Pipes(self._process.stdout, self._process.stdin, ANY_LENGTH),
            lambda line: self._said.put(cast(ClusterEvent, decode(line))),
            lambda: self._said.put(Failed("", ErrorCode.ENGINE_DIED, "")),
        )
        self._channel.start()

    def send(self, command: NodeCommand) -> None:
        self._channel.send(encode(command))

    def events(self, wait_s: float) -> list[ClusterEvent]:
        found: list[ClusterEvent] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._said.get(timeout=wait_s))
            while True:
                found.append(self._said.get_nowait())
        return found

    def close(self) -> None:
        self._channel.hang_up()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()


_FIRST_REST_S, _LONGEST_REST_S = 1.0, 60.0
MOST_FAILURES = 6
"""Lives of a node in a row that answered nothing, after which it is left alone."""
_MEMORY_S = 60.0
_STATES: dict[str, PlaceState] = {"opening": "starting", "working": "working", "refused": "out", "gone": "out"}


@dataclass(eq=False)
class RayNodeState:
    """One node.

    Attributes:
        ident: Ray's.
        life: how often an engine was started there.
        stage: `new`, `opening`, `working`, `resting` until `rests_until_s`, `refused` or `gone`.
        why: not `working`, as the end of a sentence.
        doing: while it is `opening`, as what follows its name in a sentence.
        failures: lives in a row that answered nothing.
        at_once: rows that it answers at the same time.
        under_way, under_way_tokens: rows in its sweeps, and the tokens generated for them.
    """

    ident: str
    name: str
    host: str
    cpus: float
    gpus: float
    memory: int
    life: int = 0
    stage: str = "new"
    why: str = ""
    doing: str = ""
    failures: int = 0
    rests_until_s: float = 0.0
    at_once: int = 0
    under_way: int = 0
    under_way_tokens: int = 0
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    _recent: float = 0.0
    _recent_s: float = 0.0
    _since_s: float = 0.0

    def begin(self, now: float) -> None:
        self.life += 1
        self.stage, self.why, self.doing, self._since_s = "opening", "", "starts", now

    def works(self, at_once: int, now: float) -> None:
        self.stage, self.why, self._since_s, self.at_once = "working", "", now, at_once

    def refuses(self, why: str) -> None:
        """It cannot, until something there is changed."""
        self.stage, self.why = "refused", why

    def fails(self, why: str, now: float) -> None:
        """Its engine has ended: another is started after a while, twice as long each time."""
        self.failures += 1
        self.under_way = self.under_way_tokens = 0
        if self.failures > MOST_FAILURES:
            self.refuses(f"{why}, {self.failures} times in a row")
            return
        self.stage, self.why = "resting", why
        self.rests_until_s = now + min(_LONGEST_REST_S, _FIRST_REST_S * 2 ** (self.failures - 1))

    def leaves(self) -> None:
        self.stage, self.why = "gone", "it left the cluster"
        self.under_way = self.under_way_tokens = 0

    def answered(self, answer: Answer, now: float) -> None:
        self.failures = 0
        self.rows += 1
        self.failed += answer.failed
        self.prompt_tokens += answer.prompt_tokens
        self.generated_tokens += answer.generated_tokens
        passed = max(0.0, now - self._since_s)
        fades = math.exp(-passed / _MEMORY_S)
        self._recent = self._recent * fades + answer.generated_tokens
        self._recent_s, self._since_s = self._recent_s * fades + passed, now

    @property
    def says(self) -> str:
        """Why it does not answer, as a sentence; empty if it does."""
        if self.stage == "opening":
            return f"{self.name} {self.doing}."
        return f"{self.name}: {self.why}." if self.why else ""

    def pace(self, held: int) -> PlacePace:
        """For people; `held` rows have been handed to it."""
        state = _STATES.get(self.stage, "resting")
        rate = self._recent / self._recent_s if self._recent_s > 0 and self.stage == "working" else 0.0
        return PlacePace(
            self.name,
            self.host,
            state,
            self.says,
            held,
            self.at_once,
            self.rows,
            self.failed,
            self.prompt_tokens,
            self.generated_tokens,
            rate,
        )


def settings_for(node: RayNodeState, asked: EngineConfig, *, shares: bool) -> EngineConfig:
    """The settings of the engine on a node: budgets that were asked for hold for each.

    Args:
        shares: whether other nodes are on its machine.  They get what their raylets were started with (`--memory`,
            `--num-cpus`): each engine would take the whole machine otherwise.  A machine of its own is left to the
            node's own measurements.
    """
    if not shares:
        return asked
    ram_bytes = asked.ram_bytes or node.memory or None
    return replace(asked, ram_bytes=ram_bytes, threads=asked.threads or max(1, int(node.cpus)))


_WAIT_S = 0.1
_ROUND_S = 1.0
"""How often all nodes are looked at, besides those that say something."""
_SILENT_S = 45.0
"""A link that says nothing for so long is made anew."""
_CONNECTS_S = 90.0
"""The first connection may take so long."""
_PATIENCE_S = 300.0
"""How long a job waits while no node answers."""
_READS = 512
"""Rows read before messages are looked at again."""
_COLLECT_S = 60.0


class RayRows:
    """A `ClosingExecutor` over a cluster.  For one thread.

    Args:
        address: as `ray.init` takes it.
        open_link: connects to the cluster.
        clock: monotonic seconds.

    Attributes:
        note: a remark for the user.
    """

    def __init__(
        self,
        address: str,
        asked: ClusterJob,
        open_link: Callable[[str], Link] = RayLink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._asked = address, asked
        self._open_link, self._clock = open_link, clock
        self._link: Link | None = open_link(address)
        self._looked_s = self._worked_s = clock()
        self._silent_s = 0.0
        self._has_heard = False
        self._lost = 0
        self._links_at_s = 0.0
        self._why_lost = ""
        self._blocks = Blocks[RowRequest]()
        self._row_of: dict[int, int] = {}
        self._nodes: dict[str, RayNodeState] = {}
        self._leader = ""
        self._has_opened = False
        self._round_s = 0.0
        self._to_give: set[str] = set()
        self._given_up: list[RowRequest] = []
        self._on_row: RowCallback = _nobody
        self._collected_s = time.monotonic()

    # --- what a job asks --------------------------------------------------------------------------

    @property
    def note(self) -> str:
        unused = [node for node in self._nodes.values() if node.stage == "refused"]
        return " ".join(f"{node.name} was not used: {node.why}." for node in unused)

    @property
    def under_way(self) -> tuple[int, int]:
        working = [node for node in self._nodes.values() if node.stage == "working"]
        return sum(node.under_way for node in working), sum(node.under_way_tokens for node in working)

    @property
    def waits(self) -> str:
        if self._link is None:
            return f"The Ray cluster at {self.address} was lost ({self._why_lost}): it is tried again."
        if any(node.stage == "working" for node in self._nodes.values()):
            return ""
        if not self._nodes:
            return f"Connecting to the Ray cluster at {self.address}."
        waiting = [node for node in self._nodes.values() if node.stage in ("opening", "resting")]
        if not waiting:
            return f"The Ray cluster at {self.address} has no node that can answer: it waits for one to join."
        return " ".join(filter(None, ("No node answers yet.", waiting[0].says)))

    @property
    def places(self) -> tuple[PlacePace, ...]:
        return tuple(node.pace(self._blocks.held(node.ident)) for node in self._nodes.values())

    @property
    def open_rows(self) -> int:
        """Rows that were read and have no answer: what is in memory of a job."""
        return self._blocks.open_rows

    @property
    def steps(self) -> int:
        return self._blocks.steps

    @property
    def model(self) -> tuple[str, str]:
        """(digest, precision) of what all nodes run; the precision is `auto` until a node has answered `open`."""
        return self._asked.digest, self._asked.config.precision

    def open(self, cancelled: Check) -> bool:
        """Waits until one node can answer; False if cancelled."""
        while not self._has_opened:
            if cancelled():
                return False
            self._step()
        return True

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        self._on_row = on_row
        self._blocks.is_read = False
        self._worked_s = self._looked_s = self._clock()
        try:
            with without_collector():  # which would look through all open rows, again and again
                while True:
                    if cancelled():
                        return BatchOutcome.CANCELLED
                    if should_yield():
                        return BatchOutcome.YIELDED
                    self._read(rows)
                    if self._blocks.is_read and not self._blocks.open_rows:
                        return BatchOutcome.FINISHED
                    self._step()
                    self._collect()
        finally:
            self._on_row = _nobody

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _collect(self) -> None:
        """What others leave in this process must not pile up for days."""
        now = time.monotonic()
        if now - self._collected_s >= _COLLECT_S:
            self._collected_s = now
            gc.collect()

    # --- rows -------------------------------------------------------------------------------------

    def _read(self, rows: Iterator[RowRequest]) -> None:
        for _ in range(min(_READS, self._blocks.lacks)):
            row = next(rows, None)
            if row is None:
                self._blocks.is_read = True
                return
            self._row_of[self._blocks.add(row)] = row.row

    def _step(self) -> None:
        """Hears what nodes say, and hands out rows."""
        events = self._link.events(_WAIT_S) if self._link is not None else self._rest()
        for event in events:
            self._heard(event, self._clock())
        if not all(isinstance(event, NodeAnswers) for event in events):
            self._blocks.coming = sum(node.stage == "opening" for node in self._nodes.values())
        now = self._clock()
        # Only what was waited here counts: this computer may have slept.
        self._silent_s = 0.0 if events else self._silent_s + min(_ROUND_S, now - self._looked_s)
        self._looked_s = now
        self._keep_link(now)
        if now - self._round_s >= _ROUND_S:
            self._round_s = now
            self._start_nodes(now)
            self._to_give.update(self._nodes)
            self._require_hope(now)
        for ident in self._to_give:
            self._give(self._nodes[ident], now)
        self._to_give.clear()
        self._give_up()

    def _rest(self) -> list[ClusterEvent]:
        time.sleep(_WAIT_S)
        return []

    def _give(self, node: RayNodeState, now: float) -> None:
        if node.stage != "working" or self._link is None:
            return
        if tickets := self._blocks.in_vain(node.ident):
            self._link.send(DropRows(node.ident, node.life, tuple(tickets)))
        if block := self._blocks.hand_out(node.ident, now):
            rows = tuple(replace(row, row=ticket) for ticket, row in block)
            self._link.send(GiveRows(node.ident, node.life, rows))

    def _answers(self, event: NodeAnswers, now: float) -> None:
        node = self._nodes.get(event.node)
        if node is None:
            return
        if node.life == event.life:
            node.under_way, node.under_way_tokens = event.under_way
            self._to_give.add(node.ident)
        answers = {answer.row: answer for answer in event.answers}
        for ticket in self._blocks.answered(node.ident, answers, now):
            node.answered(answers[ticket], now)
            # Our own engine: as if it were here.
            self._on_row(replace(answers[ticket], row=self._row_of.pop(ticket), by=""))

    def _give_up(self) -> None:
        rows, self._given_up = self._given_up, []
        for row in rows:
            why = "several nodes of the cluster ended while they answered it, and nothing else"
            self._on_row(failed(row.row, f"{why}."))

    # --- nodes ------------------------------------------------------------------------------------

    def _heard(self, event: ClusterEvent, now: float) -> None:
        if isinstance(event, ClusterNodes):
            self._lost, self._has_heard = 0, True
            self._see(event.nodes)
        elif isinstance(event, NodeAnswers):
            self._answers(event, now)
        elif isinstance(event, Failed):
            if self._link is not None:  # what ends says why, and then that it has ended
                self._lose_link(event.message, now)
        else:
            node = self._nodes.get(event.node)
            if node is None or node.life != event.life or node.stage not in ("opening", "working"):
                return
            if isinstance(event, NodeDoes):
                node.doing = event.what
            elif isinstance(event, NodeReady):
                self._ready(node, event, now)
            elif isinstance(event, NodeGone):
                self._given_up += self._blocks.leave(node.ident, died=not event.refuses)
                if event.refuses:
                    node.refuses(event.why.removesuffix("."))
                else:
                    node.fails(event.why, now)
                self._lead_no_more(node)

    def _see(self, found: Iterable[ClusterNode]) -> None:
        there = {each.ident: each for each in found if each.cpus > 0}  # a head often has none, to be left alone
        for ident, each in there.items():
            if ident not in self._nodes:
                self._nodes[ident] = RayNodeState(ident, each.name, each.host, each.cpus, each.gpus, each.memory)
        names = Counter(node.name for node in self._nodes.values())
        for node in self._nodes.values():
            if names[node.name] > 1:  # several on one machine
                node.name = f"{node.name} ({node.ident[:6]})"
            if node.ident not in there and node.stage != "gone":
                self._given_up += self._blocks.leave(node.ident, died=False)
                node.leaves()
                self._lead_no_more(node)
            elif node.ident in there and node.stage == "gone":
                node.stage, node.why = "new", ""
        self._round_s = 0.0

    def _start_nodes(self, now: float) -> None:
        """Starts engines where none is: on one node alone first, as long as it is to decide the precision."""
        if self._link is None:
            return
        ready = [
            node
            for node in self._nodes.values()
            if node.stage == "new" or (node.stage == "resting" and now >= node.rests_until_s)
        ]
        if self._asked.config.precision == "auto" or not self._asked.digest:
            if self._leader or not ready:
                return
            ready = [max(ready, key=lambda node: node.memory)]
            self._leader = ready[0].ident
        if not ready:
            return
        sharing = Counter(node.host for node in self._nodes.values() if node.stage != "gone")
        for node in ready:
            node.begin(now)
            self._start(node, shares=sharing[node.host] > 1)

    def _start(self, node: RayNodeState, *, shares: bool) -> None:
        assert self._link is not None
        config = settings_for(node, self._asked.config, shares=shares)
        cpus = min(node.cpus, config.threads or node.cpus)
        gpus = 0.0 if config.device == "cpu" else node.gpus
        self._link.send(StartNode(node.ident, node.life, cpus, gpus, replace(self._asked, config=config)))

    def _ready(self, node: RayNodeState, event: NodeReady, now: float) -> None:
        self._has_opened = True
        config = replace(self._asked.config, precision=event.precision)
        self._asked = replace(self._asked, digest=event.digest, config=config)
        node.works(event.at_once, now)
        self._blocks.join(node.ident, node.at_once, now, event.rows_per_s)
        self._to_give.add(node.ident)

    def _lead_no_more(self, node: RayNodeState) -> None:
        if self._leader == node.ident:
            self._leader = ""

    # --- the link ---------------------------------------------------------------------------------

    def _keep_link(self, now: float) -> None:
        """Makes it anew where it was lost."""
        if self._link is None and now >= self._links_at_s:
            self._link, self._silent_s = self._open_link(self.address), 0.0
        elif self._link is not None and self._silent_s > (_SILENT_S if self._has_heard else _CONNECTS_S):
            self._lose_link("it has been silent" if self._has_heard else "", now)

    def _lose_link(self, why: str, now: float) -> None:
        """With it all engines on nodes end."""
        self.close()
        if not self._has_heard:
            raise EngineError(
                ErrorCode.DEVICE_UNAVAILABLE,
                why or f"The Ray cluster at {self.address} does not answer: check the address, and that it runs.",
            )
        self._why_lost = why.removesuffix(".") or "the connection ended"
        self._lost += 1
        self._links_at_s = now + min(60.0, 2.0**self._lost)
        for node in self._nodes.values():
            self._given_up += self._blocks.leave(node.ident, died=False)
            node.leaves()
        self._leader = ""

    def _require_hope(self, now: float) -> None:
        stages = {node.stage for node in self._nodes.values()}
        if stages & {"new", "opening", "working"}:
            self._worked_s = now
        never = self._link is not None and stages == {"refused"}
        if never or now - self._worked_s > _PATIENCE_S:
            whys = "; ".join(f"{node.name}: {node.why}" for node in list(self._nodes.values())[:5]) or self._why_lost
            raise EngineError(
                ErrorCode.DEVICE_UNAVAILABLE,
                f"No node of the Ray cluster at {self.address} can answer ({whys}): see to that, and resume the job.",
            )


def _nobody(_answer: Answer) -> None:
    """While no job runs nothing is kept: rows are answered for `run` alone."""


def run_cluster_job(prepared: PreparedJob, config: EngineConfig, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job on the nodes of its cluster and writes its result.

    The job is the same as with this model on this machine: either can go on with what the other began.

    Args:
        config: of the engine on each node; its model is a name or a path, here and there.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    models, digest = _where(config.model)
    if config.precision == AUTO:
        config = replace(config, precision=prepared.begun_precision)
    first, total = first_rows(prepared.asked())
    sample = [(place / total, row) for place, row in enumerate(first, 1) if isinstance(row, RowRequest)]
    asked = ClusterJob(models, digest, config, prepared.job, tuple(sample))
    known = Pace(0, 0, None, 0.0, None, None)
    with closing(RayRows(prepared.job.ray, asked)) as rows:

        def cancelled() -> bool:
            watcher.on_pace(known, rows.waits)
            return watcher.cancelled()

        if not rows.open(cancelled):
            return JobEnding(False, known, 0)
        digest, precision = rows.model
        return run_job(prepared, Answerer(models[-1], digest, precision), lambda _watcher: rows, watcher)


def _where(model: str) -> tuple[tuple[str, ...], str]:
    """What nodes may find a model by, and its digest; a name will do if it is not on this machine."""
    try:
        path = resolve(model)
    except EngineError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND or "/" in model or "\\" in model:
            raise
        return (model,), ""
    return tuple(dict.fromkeys((model, name_of(path), str(path)))), content_digest(path)
