"""One engine process: started, spoken to, listened to, ended.  What requests mean is for `engine_client` to know."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, QTimer, Signal

from app.services.engine_death import death_sentence, keep_log_small
from engine.common.errors import EngineError
from engine.common.paths import log_dir
from engine.protocol import HEARTBEAT_S, Command, LineReader, Ready, Shutdown, decode, encode

READ_BYTES = 16 * 1024
"""Read per turn of the event loop, so that a backlog of tokens never holds up a key press."""

SHUTDOWN_S = 2.0
MAX_STRAY_LINES = 100


class WorkerProcess(QObject):
    """A worker from start to end; it is used once.

    Signals:
        message(Message): what the worker says, in order.
        responding_changed(bool): false after several heartbeats' silence, true when it speaks again.
        ended(str): once, unless `kill` was called: why, as a sentence, or "" if it had been asked to.
    """

    message = Signal(object)
    responding_changed = Signal(bool)
    ended = Signal(str)

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], patience_ticks: int, parent: QObject
    ) -> None:
        """`patience_ticks` heartbeats without a word mean that it does not respond."""
        super().__init__(parent)
        self._command = list(command)
        self._patience_ticks = patience_ticks
        self._silent_ticks = 0
        self._responding = True
        self._lines = LineReader()
        self._unread: deque[bytes] = deque()
        self._stray_lines = 0
        self._ready = self._stopping = self._is_over = False
        self._process = QProcess(self)
        environment = QProcessEnvironment.systemEnvironment()
        for name, value in variables.items():
            environment.insert(name, value)
        self._process.setProcessEnvironment(environment)
        # Its stderr goes straight to a file: what it says while dying must not depend on us.
        log = log_dir() / "engine-stderr.log"
        if keep_log_small(log):
            self._process.setStandardErrorFile(str(log), QProcess.OpenModeFlag.Append)
        else:
            self._process.setStandardErrorFile(QProcess.nullDevice())
        self._process.readyReadStandardOutput.connect(self._read)
        self._process.finished.connect(self._on_finished)
        self._process.errorOccurred.connect(self._on_error)
        self._watchdog = QTimer(self, interval=int(HEARTBEAT_S * 1000))
        self._watchdog.timeout.connect(self._on_watchdog)

    @property
    def pid(self) -> int:
        """Its process id; 0 before it runs and after it has ended."""
        return int(self._process.processId())

    @property
    def is_stopping(self) -> bool:
        """Whether it has been asked to exit."""
        return self._stopping

    def start(self) -> None:
        """Start it; the rest is told by signals."""
        self._watchdog.start()
        self._process.start(self._command[0], self._command[1:])

    def send(self, command: Command) -> None:
        """Write a command; it is buffered, so this never waits."""
        self._process.write(encode(command))

    def shutdown(self) -> None:
        """Ask it to exit, and end it if it does not within a moment."""
        if self._stopping:
            return
        self._stopping = True
        self.send(Shutdown())
        self._process.closeWriteChannel()
        QTimer.singleShot(int(SHUTDOWN_S * 1000), self._process, self._process.kill)

    def kill(self) -> None:
        """End it at once and say nothing more; the object goes when the process has gone."""
        self._is_over = True
        self._watchdog.stop()
        self._unread.clear()
        if self._process.state() == QProcess.ProcessState.NotRunning:
            self.deleteLater()
        else:
            self._process.kill()

    def wait_until_gone(self) -> None:
        """Block until the process is gone, ending it if it takes long: for when the event loop is about to end."""
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
                # A slot may run an event loop of its own (a dialog), and so this method: order is kept by the queue.
                self._unread.extend(self._lines.feed(data))
                while self._unread:
                    self._on_line(self._unread.popleft())
            except EngineError as error:
                self._process.kill()
                self._end(self.tr("The engine sent something that is not understood: {0}").format(error.message))
                return
            if not everything:
                if self._process.bytesAvailable():
                    QTimer.singleShot(0, self._process, self._read)
                return

    def _on_line(self, line: bytes) -> None:
        try:
            message = decode(line)
        except EngineError:
            # Something on the machine may print as Python starts, before the worker has its stream to itself.
            self._stray_lines += 1
            if self._ready or self._stray_lines > MAX_STRAY_LINES:
                raise
            return
        self._ready = self._ready or isinstance(message, Ready)
        self.message.emit(message)

    def _on_finished(self, code: int, status: QProcess.ExitStatus) -> None:
        if not self._is_over:
            self._read(everything=True)  # what it said before it ended still counts
        if not self._is_over:
            self._end("" if self._stopping else death_sentence(code, crashed=status == QProcess.ExitStatus.CrashExit))
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
        # Ticks, not seconds: after a suspended laptop or a stall of our own the worker gets its full time again.
        self._silent_ticks += 1
        if self._silent_ticks >= self._patience_ticks:
            self._set_responding(False)

    def _set_responding(self, responding: bool) -> None:
        if responding != self._responding:
            self._responding = responding
            self.responding_changed.emit(responding)
