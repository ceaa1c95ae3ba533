"""The engine process as a Qt object: requests in, signals out, and never a wait on the GUI thread.

The client owns one worker (`python -m engine.worker`) at a time.  Whatever happens to that process, every request
id that `load`, `unload` or `generate` returned gets exactly one terminal event through `finished`: if the worker
dies, the client makes it up as `Failed(ENGINE_DIED)`.  A dead worker is never restarted by itself, so nothing can
spin: the window offers `restart()`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from enum import Enum

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QProcessEnvironment, QTimer, Signal

from app.services.engine_death import death_sentence, keep_log_small
from engine.config import EngineConfig, SamplingParams
from engine.errors import EngineError, ErrorCode
from engine.paths import log_dir, python_module
from engine.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    TERMINAL,
    Cancel,
    ChatMessage,
    Command,
    Failed,
    Generate,
    LineReader,
    LoadModel,
    Message,
    ModelInfo,
    ModelLoaded,
    Progress,
    Ready,
    Shutdown,
    Telemetry,
    TerminalEvent,
    Token,
    UnloadModel,
    decode,
    encode,
)

READ_BYTES = 16 * 1024
"""Read per turn of the event loop, so that a backlog of tokens never holds up a key press."""

NOT_RESPONDING_S = 10.0
SHUTDOWN_S = 2.0
MAX_STRAY_LINES = 100


class EngineState(Enum):
    """What the engine is doing, as the window shows it."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    LOADING = "loading"
    BUSY = "busy"
    DIED = "died"


class EngineClient(QObject):
    """Starts the engine process, sends it requests and reports what it says.

    Signals:
        state_changed(EngineState), responding_changed(bool), model_loaded(ModelInfo),
        progress(Progress), token(Token), telemetry(Telemetry),
        finished(ModelLoaded | ModelUnloaded | Finished | Cancelled | Failed): one for every request.
    """

    state_changed = Signal(object)
    responding_changed = Signal(bool)
    model_loaded = Signal(object)
    progress = Signal(object)
    token = Signal(object)
    telemetry = Signal(object)
    finished = Signal(object)

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        command: Sequence[str] | None = None,
        not_responding_s: float = NOT_RESPONDING_S,
    ) -> None:
        """`command` starts another worker than the installed one."""
        super().__init__(parent)
        own, self._variables = python_module("engine.worker")
        self._command = list(command or own)
        self._process: QProcess | None = None
        self._retired: set[QProcess] = set()
        self._state = EngineState.STOPPED
        self._open: dict[str, Command] = {}
        self._outbox: deque[Command] = deque()
        self._lines = LineReader()
        self._unread: deque[bytes] = deque()
        self._ready = False
        self._stopping = False
        self._stray_lines = 0
        self._model: ModelInfo | None = None
        self._last_config: EngineConfig | None = None
        self._last_error = ""
        self._responding = True
        self._silent_ticks = 0
        self._patience_ticks = max(2, round(not_responding_s / HEARTBEAT_S))
        self._watchdog = QTimer(self, interval=int(HEARTBEAT_S * 1000))
        self._watchdog.timeout.connect(self._on_watchdog)
        application = QCoreApplication.instance()
        if application is not None:
            application.aboutToQuit.connect(self.close_now)

    # --- what is known ----------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def model(self) -> ModelInfo | None:
        """The model that is loaded and where it runs; None while none is."""
        return self._model

    @property
    def last_error(self) -> str:
        """One sentence on why the engine died or does not respond; empty if it does neither."""
        return self._last_error

    @property
    def is_responding(self) -> bool:
        """False while a running worker has been silent for several heartbeats: offer `restart()`."""
        return self._responding

    @property
    def worker_pid(self) -> int:
        """The worker's process id; 0 while none runs."""
        return int(self._process.processId()) if self._process is not None else 0

    # --- the process ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker; without effect while one runs."""
        if self._process is not None:
            return
        process = QProcess(self)
        environment = QProcessEnvironment.systemEnvironment()
        for name, value in self._variables.items():
            environment.insert(name, value)
        process.setProcessEnvironment(environment)
        # The worker's stderr goes straight to a file: what it says while dying must not depend on us.
        log = log_dir() / "engine-stderr.log"
        if keep_log_small(log):
            process.setStandardErrorFile(str(log), QProcess.OpenModeFlag.Append)
        else:
            process.setStandardErrorFile(QProcess.nullDevice())
        process.readyReadStandardOutput.connect(lambda: self._read(process))
        process.finished.connect(lambda code, status: self._on_exit(process, code, status))
        process.errorOccurred.connect(lambda error: self._on_process_error(process, error))
        self._process = process
        self._lines = LineReader()
        self._unread.clear()
        self._ready = self._stopping = False
        self._stray_lines = self._silent_ticks = 0
        self._last_error = ""
        self._set_responding(True)
        self._update_state()
        self._watchdog.start()
        process.start(self._command[0], self._command[1:])

    def restart(self) -> str | None:
        """End the worker at once, start another and load the last model again.

        Returns:
            The request id of that load, or None if there was no model.
        """
        config = self._last_config
        self._abandon(self.tr("The engine was restarted before this request was done."))
        self.start()
        return self.load(config) if config is not None else None

    def shutdown(self) -> None:
        """Ask the worker to exit, and end it if it does not within a moment; `state` becomes STOPPED."""
        process = self._process
        if process is None or self._stopping:
            return
        self._stopping = True
        self._write(Shutdown())
        process.closeWriteChannel()
        QTimer.singleShot(int(SHUTDOWN_S * 1000), process, process.kill)

    def close_now(self) -> None:
        """`shutdown`, but finished when it returns: for when the event loop is about to end."""
        self.shutdown()
        for process in (self._process, *self._retired):
            if process is not None and not process.waitForFinished(int(SHUTDOWN_S * 1000)):
                process.kill()
                process.waitForFinished(int(SHUTDOWN_S * 1000))

    # --- requests ---------------------------------------------------------------------------------

    def load(self, config: EngineConfig) -> str:
        """Load a model in place of the one loaded; returns the request id."""
        self._last_config = config
        return self._request(LoadModel(_new_id(), config))

    def unload(self) -> str:
        """Free the model's memory; returns the request id."""
        self._last_config = None
        return self._request(UnloadModel(_new_id()))

    def generate(self, messages: Sequence[ChatMessage], sampling: SamplingParams) -> str:
        """Answer the last of `messages`; returns the request id that its events will carry."""
        return self._request(Generate(_new_id(), tuple(messages), sampling))

    def cancel(self, request_id: str) -> None:
        """Stop a request, running or waiting; its terminal event still comes.  Without effect once it has ended."""
        if request_id in self._open:
            self._send(Cancel(request_id))

    def _request(self, command: LoadModel | UnloadModel | Generate) -> str:
        self._open[command.request_id] = command
        if self._process is None or self._stopping:
            reason = self._last_error or self.tr("The engine is not running; start it first.")
            # Told on a later turn: the caller does not know the id yet.
            QTimer.singleShot(0, self, lambda: self._fail(command.request_id, reason))
        else:
            self._send(command)
            self._update_state()
        return command.request_id

    def _send(self, command: Command) -> None:
        if self._ready:
            self._write(command)
        else:
            self._outbox.append(command)

    def _write(self, command: Command) -> None:
        if self._process is not None:
            self._process.write(encode(command))

    # --- what the worker says ---------------------------------------------------------------------

    def _read(self, process: QProcess, *, everything: bool = False) -> None:
        while process is self._process:
            data = bytes(process.read(READ_BYTES).data())
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
                self._give_up(self.tr("The engine sent something that is not understood: {0}").format(error.message))
                return
            if not everything:
                if process.bytesAvailable():
                    QTimer.singleShot(0, process, lambda: self._read(process))
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
        self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Token):
            if message.request_id in self._open:
                self.token.emit(message)
        elif isinstance(message, Progress):
            if message.request_id in self._open:
                self.progress.emit(message)
        elif isinstance(message, TERMINAL):
            self._finish(message)  # type: ignore[arg-type]
        elif isinstance(message, Telemetry):
            self.telemetry.emit(message)
        elif isinstance(message, Ready):
            self._on_ready(message)

    def _on_ready(self, ready: Ready) -> None:
        if ready.protocol_version != PROTOCOL_VERSION:
            self._give_up(
                self.tr(
                    "The engine speaks version {0} of the protocol and this window version {1}: "
                    "parts of two installations are mixed, so install Switchyard again."
                ).format(ready.protocol_version, PROTOCOL_VERSION)
            )
            return
        self._ready = True
        while self._outbox:
            self._write(self._outbox.popleft())
        self._update_state()

    def _finish(self, event: TerminalEvent) -> None:
        command = self._open.pop(event.request_id, None)
        if command is None:
            return
        if isinstance(event, ModelLoaded):
            self._model = event.info
        elif isinstance(command, LoadModel | UnloadModel):
            self._model = None  # a load frees the model before it, however it ends
        self._update_state()
        if isinstance(event, ModelLoaded):
            self.model_loaded.emit(event.info)
        self.finished.emit(event)

    def _fail(self, request_id: str, reason: str) -> None:
        if request_id in self._open:
            self._finish(Failed(request_id, ErrorCode.ENGINE_DIED, reason))

    # --- the end of a worker ----------------------------------------------------------------------

    def _on_exit(self, process: QProcess, code: int, status: QProcess.ExitStatus) -> None:
        if process in self._retired:
            self._retired.discard(process)
            process.deleteLater()
            return
        if process is not self._process:
            return
        self._read(process, everything=True)  # what it said before it ended still counts
        if process is not self._process:
            return
        if self._stopping:
            self._bury("", self.tr("The engine was stopped before this request was done."))
        else:
            sentence = death_sentence(code, crashed=status == QProcess.ExitStatus.CrashExit)
            self._bury(sentence, sentence)

    def _on_process_error(self, process: QProcess, error: QProcess.ProcessError) -> None:
        if process is self._process and error == QProcess.ProcessError.FailedToStart:
            sentence = self.tr("The engine could not be started ({0}): install Switchyard again.").format(
                process.errorString()
            )
            self._bury(sentence, sentence)

    def _give_up(self, sentence: str) -> None:
        """End a worker that cannot be talked to."""
        self._retire()
        self._bury(sentence, sentence)

    def _abandon(self, reason: str) -> None:
        """End the worker at once, whatever it is doing, for another to take its place."""
        if self._process is not None:
            self._retire()
            self._bury("", reason)

    def _retire(self) -> None:
        process = self._process
        if process is not None and process.state() != QProcess.ProcessState.NotRunning:
            self._retired.add(process)
            self._process = None
            process.kill()

    def _bury(self, error: str, reason: str) -> None:
        """Forget the worker and end every open request for `reason`."""
        if self._process is not None:
            self._process.deleteLater()
            self._process = None
        self._watchdog.stop()
        self._unread.clear()
        self._ready = self._stopping = False
        self._outbox.clear()
        self._model = None
        self._last_error = error
        ended = list(self._open)
        self._update_state()
        self._set_responding(True)
        for request_id in ended:
            self._fail(request_id, reason)

    def _on_watchdog(self) -> None:
        # Ticks, not seconds: after a suspended laptop or a stall of our own the worker gets its full time again.
        self._silent_ticks += 1
        if self._silent_ticks >= self._patience_ticks and self._responding:
            self._last_error = self.tr("The engine has not answered for {0} seconds; wait, or restart it.").format(
                round(self._patience_ticks * HEARTBEAT_S)
            )
            self._set_responding(False)

    def _set_responding(self, responding: bool) -> None:
        if responding != self._responding:
            self._responding = responding
            if responding and self._process is not None:
                self._last_error = ""
            self.responding_changed.emit(responding)

    def _update_state(self) -> None:
        state = self._state_now()
        if state != self._state:
            self._state = state
            self.state_changed.emit(state)

    def _state_now(self) -> EngineState:
        if self._process is None:
            return EngineState.DIED if self._last_error else EngineState.STOPPED
        if not self._ready:
            return EngineState.STARTING
        if any(isinstance(command, LoadModel) for command in self._open.values()):
            return EngineState.LOADING
        return EngineState.BUSY if self._open else EngineState.READY


def _new_id() -> str:
    return uuid.uuid4().hex
