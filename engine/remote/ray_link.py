"""The pipes to the process that speaks to a Ray cluster, and the cluster's nodes as a job sees them.

Of the nodes a job knows who is asked to start, who answers, who rests, and for how long.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import subprocess
from dataclasses import dataclass, replace
from typing import Protocol, cast

from engine.batch_files.job_watcher import PlacePace, PlaceState
from engine.common.channel import Channel, Pipes
from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.common.paths import python_module
from engine.jobs.rows import RowAnswer
from engine.protocol import ClusterEvent, Failed, NodeCommand, decode, encode

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
        command, extra = python_module(_PROGRAM)
        self._process = subprocess.Popen(
            [*command, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Ray explains itself at length
            env={**os.environ, **extra},
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._said: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self._channel = Channel(
            Pipes(self._process.stdout, self._process.stdin),
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

    def answered(self, answer: RowAnswer, now: float) -> None:
        self.failures = 0
        self.rows += 1
        self.failed += bool(answer.error)
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
