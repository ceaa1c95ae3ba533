"""Downloads the starter model in a separate process that can be followed and cancelled."""

from __future__ import annotations

import json
import re

from PySide6.QtCore import QObject, QProcess, QTimer, Signal

from app.services.child_process import child, delete_child, end_child
from engine.common.errors import EngineError
from engine.common.installed import command_line

TERMINATE_MS = 3000
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
        """Cancels it; fully downloaded files are kept for the next time."""
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
