"""Writes the file that people attach to a report of a fault, in a process of its own: it looks at all of this PC."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject, QProcess, Signal

from app.services.child_process import child, delete_child, end_child
from engine.common.errors import EngineError
from engine.common.installed import command_line

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
