"""One engine process and its pipes, from start to end.  `engine_client` interprets the messages."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QProcessEnvironment, QTimer, Signal

from app.services.background import timer
from engine.common import installed
from engine.common.errors import EngineError
from engine.common.files import private_file, private_folder
from engine.common.installed import give_up_damaged
from engine.common.paths import log_dir
from engine.protocol import HEARTBEAT_S, Command, LineReader, LoadModel, Ready, Shutdown, decode, encode

translate = QCoreApplication.translate


MAX_LOG_BYTES = 2 * 2**20


_USERS_TO_MEND = 2
"""Exit code of an engine that lost a mapped file: see `engine.experts.file_image`."""
_IN_PAGE_ERROR = 0xC0000006 - 2**32
"""The same on Windows, where such an access is an exception: STATUS_IN_PAGE_ERROR."""


def death_sentence(code: int, *, crashed: bool, model: str = "") -> str:
    """One sentence on a worker that ended unexpectedly.

    Args:
        code: QProcess's exit code; if `crashed`, the signal's number on POSIX and an NTSTATUS on Windows.
        model: what it was last told to open.
    """
    if code == (_IN_PAGE_ERROR if crashed else _USERS_TO_MEND) and model:
        return translate(
            "EngineClient",
            "A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then "
            "restart the engine.",
        ).format(model)
    if not crashed:
        return translate("EngineClient", "The engine exited unexpectedly (code {0}); see its log for details.").format(
            code
        )
    if sys.platform == "win32":
        return translate("EngineClient", "The engine crashed (status {0}).").format(f"0x{code & 0xFFFFFFFF:08X}")
    if code == signal.SIGKILL:
        return translate("EngineClient", "The engine was killed (signal 9), perhaps for lack of memory.")
    if code == signal.SIGILL:
        return translate(
            "EngineClient", "The engine crashed (signal 4): this processor lacks an instruction that it used."
        )
    try:
        name = signal.strsignal(code) or "?"
    except ValueError:
        name = "?"
    return translate("EngineClient", "The engine crashed (signal {0}: {1}).").format(code, name)


def is_packaged() -> bool:
    try:
        return installed.bundle() is not None
    except EngineError:
        return False


def engine_damage() -> str:
    """What to say if the engine has lost files, which keeps it from starting; it is not used any more then."""
    part = installed.current_engine()
    damage = give_up_damaged(part.folder) if part is not None else None
    return damage.message if damage is not None else ""


def keep_log_small(log: Path) -> bool:
    """Create the log's folder, and rotate a log that has grown too large; returns whether it can be written."""
    try:
        private_folder(log.parent)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
        private_file(log)
        with log.open("ab"):
            return True
    except OSError:
        return False


READ_BYTES = 16 * 1024
"""Bytes read per event loop turn, so that a backlog of tokens never delays a key press."""

SHUTDOWN_S = 2.0
MAX_STRAY_LINES = 100


class WorkerProcess(QObject):
    """A worker from start to end; not reusable.

    Signals:
        message(Message): the worker's messages, in order.
        responding_changed(bool): False after several missed heartbeats, True when there is a message again.
        ended(str): once, unless `kill` was called: the reason as a sentence, "" if it was asked to exit.
    """

    message = Signal(object)
    responding_changed = Signal(bool)
    ended = Signal(str)

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], patience_ticks: int, parent: QObject
    ) -> None:
        """It counts as not responding after `patience_ticks` missed heartbeats."""
        super().__init__(parent)
        self._command = list(command)
        self._patience_ticks = patience_ticks
        self._silent_ticks = 0
        self._responding = True
        self._lines = LineReader()
        self._unread: deque[bytes] = deque()
        self._stray_lines = 0
        self._ready = self.is_stopping = self._is_over = False
        self._model = ""
        self._process = QProcess(self)
        environment = QProcessEnvironment.systemEnvironment()
        for name, value in variables.items():
            environment.insert(name, value)
        self._process.setProcessEnvironment(environment)
        # Its stderr goes straight to a file: its last output must not depend on this process.
        log = log_dir() / "engine-stderr.log"
        if keep_log_small(log):
            self._process.setStandardErrorFile(str(log), QProcess.OpenModeFlag.Append)
        else:
            self._process.setStandardErrorFile(QProcess.nullDevice())
        self._process.readyReadStandardOutput.connect(self._read)
        self._process.finished.connect(self._on_finished)
        self._process.errorOccurred.connect(self._on_error)
        self._watchdog = timer(self, self._on_watchdog, int(HEARTBEAT_S * 1000))

    @property
    def pid(self) -> int:
        return int(self._process.processId())

    def start(self) -> None:
        self._watchdog.start()
        self._process.start(self._command[0], self._command[1:])

    def send(self, command: Command) -> None:
        """Write a command; it is buffered, so this never waits."""
        if isinstance(command, LoadModel):
            self._model = command.config.model
        self._process.write(encode(command))

    def shutdown(self) -> None:
        """Ask it to exit, and kill it after a timeout."""
        if self.is_stopping:
            return
        self.is_stopping = True
        self.send(Shutdown())
        self._process.closeWriteChannel()
        QTimer.singleShot(int(SHUTDOWN_S * 1000), self._process, self._process.kill)

    def kill(self) -> None:
        self._is_over = True
        self._watchdog.stop()
        self._unread.clear()
        if self._process.state() == QProcess.ProcessState.NotRunning:
            self.deleteLater()
        else:
            self._process.kill()

    def wait_until_gone(self) -> None:
        """Block until the process has ended, killing it after a timeout: for when the event loop is about to end."""
        if not self._process.waitForFinished(int(SHUTDOWN_S * 1000)):
            self._process.kill()
            self._process.waitForFinished(int(SHUTDOWN_S * 1000))

    def _read(self, *, everything: bool = False) -> None:
        while not self._is_over:
            data = bytes(self._process.read(READ_BYTES).data())
            if not data:
                return
            self._silent_ticks = 0
            self._set_responding(True)
            try:
                # A slot may run a nested event loop (a dialog), and so re-enter this method: the queue keeps the order.
                self._unread.extend(self._lines.feed(data))
                while self._unread:
                    self._on_line(self._unread.popleft())
            except EngineError as error:
                self._process.kill()
                self._end(self.tr("The engine sent an invalid message: {0}").format(error.message))
                return
            if not everything:
                if self._process.bytesAvailable():
                    QTimer.singleShot(0, self._process, self._read)
                return

    def _on_line(self, line: bytes) -> None:
        try:
            message = decode(line)
        except EngineError:
            # Other software may print while Python starts, before the worker takes over its stdout.
            self._stray_lines += 1
            if self._ready or self._stray_lines > MAX_STRAY_LINES:
                raise
            return
        self._ready = self._ready or isinstance(message, Ready)
        self.message.emit(message)

    def _on_finished(self, code: int, status: QProcess.ExitStatus) -> None:
        if not self._is_over:
            self._read(everything=True)  # its last messages still count
        if not self._is_over:
            crashed = status == QProcess.ExitStatus.CrashExit
            self._end("" if self.is_stopping else death_sentence(code, crashed=crashed, model=self._model))
        self.deleteLater()

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart and not self._is_over:
            reason = self._process.errorString()
            self._end(self.tr("The engine could not be started ({0}): reinstall Switchyard.").format(reason))
            self.deleteLater()

    def _end(self, sentence: str) -> None:
        self._is_over = True
        self._watchdog.stop()
        self._unread.clear()
        self.ended.emit(sentence)

    def _on_watchdog(self) -> None:
        # Ticks, not seconds: after a suspend, or a stall of this process, the worker gets its full time again.
        self._silent_ticks += 1
        if self._silent_ticks >= self._patience_ticks:
            self._set_responding(False)

    def _set_responding(self, responding: bool) -> None:
        if responding != self._responding:
            self._responding = responding
            self.responding_changed.emit(responding)
