"""Processes that run once: to install a part of Switchyard, get the starter model, or write a report of this PC."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QObject, QProcess, QTimer, Signal

from app.services.child_process import ask_to_end, child, delete_child, end_child
from engine.common.errors import EngineError
from engine.common.installed import command_line
from engine.common.paths import python_module

_PERCENT = re.compile(rb"(\d{1,3}) ?%")


class StarterDownload(QObject):
    """Runs `switchyard models pull starter --json`.

    Every `start` ends in exactly one `ended`.

    Signals:
        began: it runs.
        progress(int): percent.
        ended(bool, str): whether the starter is there now; if not, a sentence, empty if it was cancelled.
    """

    began = Signal()
    progress = Signal(int)
    ended = Signal(bool, str)

    def __init__(self, parent: QObject | None = None, *, command: list[str] | None = None) -> None:
        super().__init__(parent)
        self._command = command
        self._process: QProcess | None = None
        self._said = b""
        self._cancelled = False

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        if self._process is not None:
            return
        try:
            own, variables = command_line()  # asked each time: the engine, which it is built with, may have come since
        except EngineError as error:
            self.ended.emit(False, error.message)
            return
        command = self._command or [*own, "models", "pull", "starter", "--json"]
        not_started = self.tr("The download could not be started: reinstall Switchyard.")
        self._process = child(
            self,
            command,
            variables,
            ended=self._on_finished,
            not_started=lambda: self._end(False, not_started),
            reads=lambda: None,  # its answer, at the end
        )
        self._process.setStandardErrorFile("")
        self._process.readyReadStandardError.connect(self._on_progress)
        self._said, self._cancelled = b"", False
        self.began.emit()
        self._process.start()

    def cancel(self) -> None:
        if self._process is not None:
            self._cancelled = True
            self._process.terminate()
            QTimer.singleShot(TERMINATE_MS, self._process, self._process.kill)

    def close(self) -> None:
        process = self._process
        if process is not None:
            self._cancelled = True
            end_child(process, TERMINATE_MS)

    def _on_progress(self) -> None:
        if self._process is not None:
            self._said = (self._said + bytes(self._process.readAllStandardError().data()))[-2000:]
            found = _PERCENT.findall(self._said)
            if found:
                self.progress.emit(min(100, int(found[-1])))

    def _on_finished(self, code: int, status: QProcess.ExitStatus) -> None:
        if self._process is None:
            return
        answer = bytes(self._process.readAllStandardOutput().data())
        if self._cancelled:
            self._end(False, "")
        elif code == 0 and status == QProcess.ExitStatus.NormalExit:
            self._end(True, "")
        else:
            self._end(False, _sentence(answer) or self.tr("The starter model could not be built; try again."))

    def _end(self, built: bool, sentence: str) -> None:
        if self._process is not None:
            delete_child(self._process)
            self._process = None
            self.ended.emit(built, sentence)


def _sentence(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


_KILL_MS = 3000


class Diagnosis(QObject):
    """Signals:
    written(Path): the report is there.
    problem(str): it is not, in a sentence.
    """

    written = Signal(object)
    problem = Signal(str)

    def __init__(self, parent: QObject | None = None, *, command: list[str] | None = None) -> None:
        super().__init__(parent)
        self._command = command
        self._process: QProcess | None = None
        self._path = Path()

    def write(self, path: Path) -> None:
        if self._process is not None:
            return
        try:
            own, variables = command_line()
        except EngineError as error:
            self.problem.emit(error.message)
            return
        command = [*(self._command or own), "doctor", "--json", "--report", str(path)]
        self._path = path
        self._process = child(self, command, variables, ended=lambda *_: self._on_ended(), not_started=self._on_ended)
        path.unlink(missing_ok=True)
        self._process.start()

    def close(self) -> None:
        process = self._process
        if process is not None:
            self._process = None
            end_child(process, _KILL_MS)

    def _on_ended(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        delete_child(process)
        if self._path.is_file():  # whatever the exit code says of this PC
            self.written.emit(self._path)
        else:
            words = self.tr("The report could not be written to {0}: choose another folder.")
            self.problem.emit(words.format(self._path.parent))


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
