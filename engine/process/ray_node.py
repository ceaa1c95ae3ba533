"""The engine on one node of a Ray cluster: takes rows, gives answers, and plans for its own machine alone.

It is what the actors of `engine.process.ray_driver` hold.  It speaks in lines of `engine.protocol`; a row goes by its
ticket here, so that a row that was asked twice has two answers.  One thread of its own has the engine; the methods are
called on others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.batch_files.rows import Answer, RowRequest
from engine.common.errors import EngineError, ErrorCode
from engine.common.installed import version
from engine.protocol import (
    ClusterJob,
    DropRows,
    GiveRows,
    NodeAnswers,
    NodeDoes,
    NodeEvent,
    NodeGone,
    NodeReady,
    StartNode,
    decode,
    encode,
)

if TYPE_CHECKING:
    from engine.runtime.batch.model_rows import ModelRows

_log = logging.getLogger(__name__)
_GATHER_S = 0.05
"""Answers of so long travel together."""
_MOST_ANSWERS = 512
_LOOK_S = 2.0


class RayNode:
    """Answers rows with a model on this node.  `begin` comes first, and once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: deque[RowRequest] = deque()
        self._answers: list[Answer] = []
        self._said: list[NodeEvent] = []
        self._gone: NodeGone | None = None
        self._is_dry = self._is_closing = False
        self._thread: threading.Thread | None = None
        self._model: ModelRows | None = None
        self._self = "", 0

    def begin(self, node: str, life: int, asked_by: str, line: bytes) -> None:
        """Begins to load the model and to plan.

        Args:
            asked_by: the version of whoever asks: only its own kind can read its lines.
            line: a `StartNode`.
        """
        self._self = node, life
        self._thread = threading.Thread(target=self._work, args=(asked_by, line), name="engine", daemon=True)
        self._thread.start()

    def tell(self, line: bytes) -> None:
        message = decode(line)
        with self._changed:
            if isinstance(message, GiveRows):
                self._rows.extend(message.rows)
            elif isinstance(message, DropRows):
                gone = set(message.tickets)
                self._rows = deque(row for row in self._rows if row.row not in gone)
            self._changed.notify_all()

    def events(self, wait_s: float) -> tuple[list[bytes], bool]:
        """What has happened since the last call, after waiting for something, and whether that was the last of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._said or self._answers or self._gone, wait_s)
            if self._answers:
                self._changed.wait_for(lambda: len(self._answers) >= _MOST_ANSWERS, _GATHER_S)
            said, self._said = self._said, []
            if self._model is not None:
                answers, self._answers = tuple(self._answers), []
                said.append(NodeAnswers(*self._self, answers, self._model.under_way))
            if self._gone is not None:
                said.append(self._gone)
            return [encode(event) for event in said], self._gone is not None

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _say(self, event: NodeEvent) -> None:
        with self._changed:
            self._said.append(event)
            self._changed.notify_all()

    def _work(self, asked_by: str, line: bytes) -> None:
        try:
            with contextlib.ExitStack() as held:
                if (here := version()) != asked_by:
                    raise _refused(f"it has Switchyard {here}, and the one that asks is {asked_by}")
                command = decode(line)
                assert isinstance(command, StartNode)
                model = self._opened(command.asked, held)
                while not self._is_closing:
                    self._answer_rows(model)
        except BaseException as error:
            if not isinstance(error, EngineError):
                _log.exception("the engine of a node has failed")
            why = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._gone = NodeGone(*self._self, why, refuses=self._model is None)
                self._changed.notify_all()

    def _opened(self, asked: ClusterJob, held: contextlib.ExitStack) -> ModelRows:
        from engine.process.lifetime import quiet_libraries

        quiet_libraries()
        found = _found(asked.models, asked.digest)
        from engine.runtime.engine import Engine  # after the model was looked for: it takes seconds
        from engine.tuning.untuned import measure_untuned

        engine = Engine()
        held.callback(engine.unload)
        config = replace(asked.config, model=str(found))
        measure_untuned(config, lambda: self._does("measures itself"), lambda: self._is_closing)
        self._does("loads the model")
        info = engine.load(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        plan, rows = engine.open_rows(asked.job, list(asked.sample))
        held.callback(rows.close)
        at_once = 1 if rows.note else plan.policy.rows
        rows_per_s = plan.prediction.tokens_per_s / plan.rows.generated_tokens if plan.prediction else 0.0
        self._say(NodeReady(*self._self, _digest(found), info.precision, at_once, rows_per_s))
        self._model = rows
        return rows

    def _does(self, what: str) -> None:
        self._say(NodeDoes(*self._self, what))

    def _waiting_rows(self) -> Iterator[RowRequest]:
        while True:
            with self._changed:
                if not self._rows:
                    self._is_dry = True
                    return
                row = self._rows.popleft()
            yield row

    def _has_more(self) -> bool:
        """Asked between layers: rows that came after the others were read join them."""
        return self._is_dry and bool(self._rows)

    def _answered(self, answer: Answer) -> None:
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()

    def _answer_rows(self, model: ModelRows) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._is_closing)
        self._is_dry = False  # before the rows are read: that waits for the end of a sweep, which must go on
        model.run(self._waiting_rows(), self._answered, self._has_more, lambda: self._is_closing)


class NodeActor(RayNode):
    """The same as an actor: its process ends with its node, or an engine that Ray lost sight of would keep memory."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=_end_with, args=(os.getppid(),), name="node-watch", daemon=True).start()


def _end_with(raylet: int) -> None:
    process = psutil.Process(raylet)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(_LOOK_S)
    os._exit(1)


def _refused(why: str) -> EngineError:
    return EngineError(ErrorCode.DEVICE_UNAVAILABLE, why)


def _found(models: tuple[str, ...], digest: str) -> Path:
    from engine.checkpoint.library import resolve

    other = why = ""
    for name in models:
        try:
            path = resolve(name)
            if not digest or _digest(path) == digest:
                return path
            other = other or f"its files of {name} ({path}) are not those of the computer that asks"
        except EngineError as error:
            why = why or error.message
    raise _refused(other or f"it does not have the model: {why}")


def _digest(path: Path) -> str:
    from engine.checkpoint.shards import content_digest

    return content_digest(path)
