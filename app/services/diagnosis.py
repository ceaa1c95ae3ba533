"""Writes the file that people attach to a report of a fault, in a process of its own: it looks at all of this PC."""

from __future__ import annotations

import sys
from pathlib import Path

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, Signal

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
        """`command` replaces the installed command line."""
        super().__init__(parent)
        self._command = command
        self._process: QProcess | None = None
        self._path = Path()

    def write(self, path: Path) -> None:
        """Writes the report there; no effect while one is written."""
        if self._process is not None:
            return
        try:
            own, variables = command_line()
        except EngineError as error:
            self.problem.emit(error.message)
            return
        command = [*(self._command or own), "doctor", "--json", "--report", str(path)]
        process = QProcess(self)
        environment = QProcessEnvironment.systemEnvironment()
        for name, value in variables.items():
            environment.insert(name, value)
        process.setProcessEnvironment(environment)
        process.setStandardOutputFile(QProcess.nullDevice())
        process.setStandardErrorFile(QProcess.nullDevice())
        process.finished.connect(self._on_ended)
        process.errorOccurred.connect(self._on_error)
        self._process, self._path = process, path
        path.unlink(missing_ok=True)
        process.start(command[0], command[1:])

    def close(self) -> None:
        """Stops one that is being written."""
        process = self._process
        if process is not None:
            self._process = None
            if sys.platform == "win32":
                process.kill()
            else:
                process.terminate()
            if not process.waitForFinished(_KILL_MS):
                process.kill()
                process.waitForFinished(_KILL_MS)

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart:
            self._on_ended()

    def _on_ended(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.deleteLater()
        if self._path.is_file():  # whatever the exit code says of this PC
            self.written.emit(self._path)
        else:
            words = self.tr("The report could not be written to {0}: choose another folder.")
            self.problem.emit(words.format(self._path.parent))
