"""The engine on one node of a Ray cluster: takes rows, gives answers, and plans for its own machine alone.

It is what the actors of `engine.process.ray_driver` hold.  All messages are plain values; a row goes by its ticket
here, so that a row that was asked twice has two answers.  One thread of its own has the engine; the methods are called
on others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from engine.batch_files.rows import RowRequest
from engine.common.config import BatchJob, EngineConfig
from engine.common.errors import EngineError
from engine.common.installed import version
from engine.common.json_fields import from_fields
from engine.jobs.rows import RowAnswer

if TYPE_CHECKING:
    from engine.runtime.batch.model_rows import ModelRows

_log = logging.getLogger(__name__)
_GATHER_S = 0.05
"""Answers of so long travel together."""
_MOST_ANSWERS = 512
_LOOK_S = 2.0


class RayNode:
    """Answers rows with a model on this node.  `open` comes first, and once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: deque[RowRequest] = deque()
        self._answers: list[list[Any]] = []
        self._about: dict[str, Any] | None = None
        self._broken = ""
        self._doing = "starts"
        self._is_dry = self._is_closing = False
        self._thread: threading.Thread | None = None
        self._model: ModelRows | None = None

    def open(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Loads the model and plans.

        Args:
            spec: `version`, `models` (names and paths under which it may be found, the likeliest first), `digest` of
                the model ("" for any), `config` (fields of `EngineConfig`), `job` (fields of `BatchJob`), and
                `sample`: the share of the input and the fields of `RowRequest`, of the job's first rows.

        Returns:
            what it does and can do, or under `refused` a sentence: why this node cannot.
        """
        self._thread = threading.Thread(target=self._work, args=(spec,), name="engine", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._about is not None)
            assert self._about is not None
            return self._about

    def doing(self, known: str) -> str:
        """What it does before it can answer rows, as the end of a sentence, once that is not `known`; then empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._doing != known)
            return self._doing

    def give(self, rows: list[list[Any]]) -> None:
        """More rows: (ticket, fields of `RowRequest`)."""
        given = [replace(from_fields(RowRequest, fields), row=ticket) for ticket, fields in rows]
        with self._changed:
            self._rows.extend(given)
            self._changed.notify_all()

    def drop(self, tickets: list[int]) -> None:
        """Others have answered these: those that were not begun are left out."""
        with self._changed:
            gone = set(tickets)
            self._rows = deque(row for row in self._rows if row.row not in gone)

    def take(self, wait_s: float) -> dict[str, Any]:
        """The answers since the last call, after waiting for some.

        Returns:
            `answers`: (ticket, fields of `RowAnswer`); `under_way`: rows and tokens generated for them; `broken`: why
            nothing is answered any more, empty if it is.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._broken, wait_s)
            if self._answers:
                self._changed.wait_for(lambda: len(self._answers) >= _MOST_ANSWERS, _GATHER_S)
            answers, self._answers = self._answers, []
            under_way = self._model.under_way if self._model is not None else (0, 0)
            return {"answers": answers, "under_way": list(under_way), "broken": self._broken}

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self, spec: dict[str, Any]) -> None:
        try:
            with contextlib.ExitStack() as held:
                about = self._opened(spec, held)
                with self._changed:
                    self._about, self._doing = about, ""
                    self._changed.notify_all()
                while self._model is not None and not self._is_closing:
                    self._answer_rows(self._model)
        except BaseException as error:
            if not isinstance(error, EngineError):
                _log.exception("the engine of a node has failed")
            why = error.message if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            with self._changed:
                if self._about is None:
                    self._about = {"refused": why}
                self._broken, self._doing = why, ""
                self._changed.notify_all()

    def _opened(self, spec: dict[str, Any], held: contextlib.ExitStack) -> dict[str, Any]:
        here = version()
        if here != spec["version"]:
            return {"refused": f"it has Switchyard {here}, and the one that asks is {spec['version']}"}
        from engine.process.lifetime import quiet_libraries

        quiet_libraries()
        found = _found(spec["models"], spec["digest"])
        if isinstance(found, str):
            return {"refused": found}
        from engine.runtime.engine import Engine  # after the model was looked for: it takes seconds
        from engine.tuning.untuned import measure_untuned

        engine = Engine()
        held.callback(engine.unload)
        config: EngineConfig = replace(from_fields(EngineConfig, spec["config"]), model=str(found))
        has_measured = measure_untuned(config, lambda: self._does("measures itself"), lambda: self._is_closing)
        self._does("loads the model")
        info = engine.load(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
        sample = [(share, from_fields(RowRequest, fields)) for share, fields in spec["sample"]]
        plan, rows = engine.open_rows(from_fields(BatchJob, spec["job"]), sample)
        held.callback(rows.close)
        self._model = rows
        return {
            "pid": os.getpid(),
            "digest": _digest(found),
            "precision": info.precision,
            "device": info.device,
            "threads": info.threads,
            "at_once": 1 if rows.note else plan.policy.rows,
            "measured": has_measured,
            "rows_per_s": plan.prediction.tokens_per_s / plan.rows.generated_tokens if plan.prediction else 0.0,
            "note": " ".join(filter(None, (info.device_note, rows.note))),
        }

    def _does(self, what: str) -> None:
        with self._changed:
            self._doing = what
            self._changed.notify_all()

    def _answer_rows(self, model: ModelRows) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._is_closing)
        self._is_dry = False  # before the rows are read: that waits for the end of a sweep, which must go on
        model.run(self._waiting_rows(), self._answered, self._has_more, lambda: self._is_closing)

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

    def _answered(self, answer: RowAnswer) -> None:
        with self._changed:
            self._answers.append([answer.row, asdict(answer)])
            self._changed.notify_all()


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


def _found(models: list[str], digest: str) -> Path | str:
    """The model's files on this node, or why they cannot be used."""
    from engine.checkpoint.library import resolve

    other = ""
    why = ""
    for name in models:
        try:
            path = resolve(name)
            if not digest or _digest(path) == digest:
                return path
            other = other or f"its files of {name} ({path}) are not those of the computer that asks"
        except EngineError as error:
            why = why or error.message
    return other or f"it does not have the model: {why}"


def _digest(path: Path) -> str:
    from engine.checkpoint.shards import content_digest

    return content_digest(path)
