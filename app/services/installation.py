"""A process that puts a part of Switchyard in place, and says in lines of JSON how it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from PySide6.QtCore import QObject, QProcess, Signal

from app.services.child_process import ask_to_end, child, delete_child, end_child
from engine.common.paths import python_module

TERMINATE_MS = 3000


class Installation(QObject):
    """One at a time; every `start` ends in exactly one `ended`, unless `close` stopped it.

    Signals:
        step_changed: `step` is another.
        ended(dict): the last that it said; empty if it was stopped, or died.
    """

    step_changed = Signal()
    ended = Signal(object)

    def __init__(self, module: str, parent: QObject | None = None, *, command: Sequence[str] | None = None) -> None:
        super().__init__(parent)
        own, self._variables = python_module(module)
        self._command = list(command or own)
        self._process: QProcess | None = None
        self._said = b""
        self._is_stopped = self._closing = False
        self.step = ""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, *arguments: str) -> None:
        if self._process is not None or self._closing:
            return
        command = [*self._command, *arguments]
        self._process = child(
            self,
            command,
            self._variables,
            ended=lambda *_: self._on_ended(),
            not_started=self._on_not_started,
            reads=self._read,
        )
        self._said, self.step, self._is_stopped = b"", "", False
        self._process.start()

    def stop(self) -> None:
        """Stops it; what it has done so far is done again the next time."""
        self._is_stopped = True
        if self._process is not None:
            ask_to_end(self._process)

    def close(self) -> None:
        self._closing = True
        self._is_stopped = True
        if self._process is not None:
            end_child(self._process, TERMINATE_MS)

    def _read(self) -> None:
        if self._process is not None:
            self._said += bytes(self._process.readAllStandardOutput().data())
            step = str(self._last().get("step", self.step))
            if step != self.step:
                self.step = step
                self.step_changed.emit()

    def _last(self) -> dict[str, object]:
        """The last whole line that it said."""
        for line in reversed(self._said.split(b"\n")[:-1]):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return {}

    def _on_not_started(self) -> None:
        self._forget({"error": self.tr("The installation could not be started: install Switchyard again.")})

    def _on_ended(self) -> None:
        self._read()
        last = self._last()
        self._forget({} if self._is_stopped or "step" in last else last)

    def _forget(self, last: dict[str, object]) -> None:
        if self._process is not None:
            delete_child(self._process)
            self._process = None
            if not self._closing:
                self.ended.emit(last)
