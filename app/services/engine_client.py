"""The engine process as a Qt object: requests in, signals out, without blocking the GUI thread.

The client owns one worker (`python -m engine.worker`) at a time.  Whatever happens to that process, every `Request`
that the client returned emits `finished` exactly once: if the worker dies, the client emits `Failed(ENGINE_DIED)`
itself.  A dead worker is never restarted automatically, so there is no crash loop: the window offers `restart()`.
"""

from __future__ import annotations

import importlib.util
import uuid
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from PySide6.QtCore import QCoreApplication, QObject, QTimer, Signal

from app.services.background import LatestTask
from app.services.engine_request import BatchRun, ChatAnswer, LoadingPace, Request, TuningRun
from app.services.worker_process import WorkerProcess, engine_damage, is_packaged
from engine.common.chat import Tool
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.installed import module_command, needs_engine
from engine.common.kept_context import keep_chat
from engine.common.model_info import ModelInfo
from engine.protocol import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    WAITS,
    CacheReport,
    CacheTier,
    Cancel,
    ChatMessage,
    Command,
    EndpointKey,
    ExpertMap,
    Failed,
    Finished,
    Generate,
    LoadModel,
    Message,
    ModelLoaded,
    ModelMoved,
    Progress,
    Ready,
    RequestPlace,
    ResizeCache,
    SampleBatch,
    ServeOthers,
    StartBatch,
    StartTuning,
    Telemetry,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    TerminalEvent,
    TuningFinished,
    UnloadModel,
    Until,
    WatchTelemetry,
)
from engine.remote.endpoint import Endpoint, RemoteModel, key_of_this_run, saved_endpoints
from engine.tuning.result import TuningKind


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def on_each_node(config: EngineConfig | None, job: BatchJob) -> EngineConfig | None:
    """How a cluster runs a job's model; limits of this PC are not those of its nodes."""
    if config is None or not job.ray:
        return None
    return EngineConfig(config.model, precision=config.precision, kv_precision=config.kv_precision)


def offered_endpoints() -> tuple[Endpoint, ...]:
    """Those that people added; none if the list cannot be read, which Settings explains."""
    try:
        return saved_endpoints()
    except EngineError:
        return ()


def keys_for(job: BatchJob) -> tuple[EndpointKey, ...]:
    """Keys that were given to this window and are kept nowhere, of the endpoints that a job names."""
    if not job.is_remote:
        return ()
    named = [endpoint for endpoint in offered_endpoints() if endpoint.name in job.endpoints]
    return tuple(EndpointKey(each.name, key) for each in named if (key := key_of_this_run(each)))


NOT_RESPONDING_S = 10.0
RECORDED = (TelemetrySpans, TelemetryCounters, TelemetryRequest, RequestPlace, ExpertMap, CacheReport)

_R = TypeVar("_R", bound=Request)


class EngineState(Enum):
    """The engine's state, as the window shows it.  A batch job does not make it busy: chats are answered beside it."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    LOADING = "loading"
    BUSY = "busy"
    DIED = "died"


class EngineClient(QObject):
    """Starts the engine process and sends it requests.  Its signals are about the engine; a `Request` has its own.

    Signals:
        state_changed(EngineState), responding_changed(bool), telemetry(Telemetry).
        loading_changed: `loading` has changed.
        model_loaded(ModelInfo): by any request, or in another place because a card no longer responds or does again.
        answered(Finished): an answer of the model here is complete, for any requester.
        batch_began(BatchRun): a job or a sample was requested.
        recorded(one of `RECORDED`): while watched.
    """

    state_changed = Signal(object)
    responding_changed = Signal(bool)
    loading_changed = Signal()
    model_loaded = Signal(object)
    answered = Signal(object)
    batch_began = Signal(object)
    telemetry = Signal(object)
    recorded = Signal(object)

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        command: Sequence[str] | None = None,
        not_responding_s: float = NOT_RESPONDING_S,
    ) -> None:
        """`command` starts a worker other than the installed one."""
        super().__init__(parent)
        self._command = list(command) if command is not None else None
        self._patience_ticks = max(2, round(not_responding_s / HEARTBEAT_S))
        self._worker: WorkerProcess | None = None
        self._ready = self._lacks_engine = False
        self.is_responding = True
        self.state = EngineState.STOPPED
        self._open: dict[str, Request] = {}
        self._outbox: deque[Command] = deque()
        self._model: ModelInfo | None = None
        self.loading_pace = LoadingPace()
        self.config: EngineConfig | None = None
        self.last_error = self._why_none = self._damage = ""
        self._watched = WatchTelemetry(on=False)
        self._others = ServeOthers("")
        self._doubts = LatestTask(self)
        application = QCoreApplication.instance()
        if application is not None:
            application.aboutToQuit.connect(self.close_now)

    # --- state ------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        return self._model

    @property
    def loading(self) -> float | None:
        return self.loading_pace.share

    @property
    def answering(self) -> tuple[ChatAnswer, ...]:
        return tuple(request for request in self._open.values() if isinstance(request, ChatAnswer))

    @property
    def worker_pid(self) -> int:
        return self._worker.pid if self._worker is not None else 0

    # --- the process ------------------------------------------------------------------------------

    def start(self, *, at_once: bool = True) -> None:
        """Start the worker; no effect while one runs.  Until an installed package has fetched its engine, it asks other
        servers alone, as it does without `at_once` until a model is needed."""
        if self._worker is not None:
            return
        try:
            own, variables = module_command("engine.worker")
            self._lacks_engine = needs_engine()
        except EngineError as error:
            self._why_none = error.message
            return
        command = [*(self._command or own), *([] if at_once else [WAITS])]
        worker = WorkerProcess(command, variables, self._patience_ticks, self)
        worker.message.connect(self._on_message)
        worker.responding_changed.connect(self._on_responding)
        worker.ended.connect(self._on_ended)
        self._worker = worker
        self.last_error = self._why_none = ""
        self._update_state()
        worker.start()

    def restart(self) -> Request | None:
        """Kill the worker, start another and reload the last model; returns that load, if there is one."""
        config = self.config
        self._drop_worker("", self.tr("The engine was restarted before this request was done."))
        self.start(at_once=config is not None)
        return self.load(config) if config is not None else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    def close_now(self) -> None:
        self.shutdown()
        self._doubts.close()
        for worker in self.findChildren(WorkerProcess):  # including replaced ones that were killed
            worker.wait_until_gone()

    # --- requests ---------------------------------------------------------------------------------

    def load(self, config: EngineConfig) -> Request:
        """Load a model, replacing the loaded one; in another process if a card has failed for this one."""
        if not self._open and self._wants_another():
            self._drop_worker("", "")
            self.start()
        self.config = config
        request = Request(LoadModel(_new_id(), config), self._cancel, self)
        request.progress.connect(self._on_loading)
        return self._accept(request)

    def unload(self) -> Request:
        self.config = None
        return self._accept(Request(UnloadModel(_new_id()), self._cancel, self))

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        remote: RemoteModel | None = None,
        chat: str = "",
        tools: Sequence[Tool] = (),
    ) -> ChatAnswer:
        """Answer the last of `messages`; with `remote`, another server does.  For the rest see `Generate`."""
        if chat:
            keep_chat(chat)  # here, and not by the engine: a chat is deleted here, and this must come before
        command = Generate(_new_id(), tuple(messages), sampling, remote, chat, tuple(tools))
        return self._accept(ChatAnswer(command, self._cancel, self))

    def start_batch(self, job: BatchJob) -> BatchRun:
        return self._begin_batch(StartBatch(_new_id(), job, keys_for(job), on_each_node(self.config, job)))

    def sample_batch(self, job: BatchJob, rows: int) -> BatchRun:
        return self._begin_batch(SampleBatch(_new_id(), job, rows, keys_for(job)))

    def start_tuning(
        self,
        config: EngineConfig,
        kind: TuningKind = "quick",
        until: Until = "timed",
        *,
        measure_again: bool = False,
    ) -> TuningRun:
        return self._accept(TuningRun(StartTuning(_new_id(), config, kind, until, measure_again), self._cancel, self))

    # --- telemetry --------------------------------------------------------------------------------

    def watch_telemetry(self, *, on: bool, expert_map: bool = False) -> None:
        """Turn the engine's recording, delivered by `recorded`, on or off; applies to later workers too."""
        self._watched = WatchTelemetry(on, expert_map)
        if self._ready:
            self._send(self._watched)

    def resize_cache(self, tier: CacheTier, slots: int) -> None:
        """Set how many experts a tier keeps; the next `CacheReport` says how many fit."""
        if self._ready:
            self._send(ResizeCache(tier, slots))

    def serve_others(self, address: str, secret: str) -> None:
        """Have the engine, and later ones, answer other programs at the server behind this link; empty: none."""
        self._others = ServeOthers(address, secret)
        if self._ready:
            self._send(self._others)

    # --- requests, internally ---------------------------------------------------------------------

    def _begin_batch(self, command: StartBatch | SampleBatch) -> BatchRun:
        run = self._accept(BatchRun(command, self._cancel, self))
        self.batch_began.emit(run)
        return run

    def _accept(self, request: _R) -> _R:
        self._open[request.id] = request
        if self._worker is None or self._worker.is_stopping:
            reason = self.last_error or self._why_none or self.tr("The engine is not running; start it first.")
            # Deferred: the caller has not connected to the request yet.
            QTimer.singleShot(0, self, lambda: self._fail(request, reason))
        else:
            self._send(request.command)
            self._update_state()
        return request

    def _cancel(self, request: Request) -> None:
        if request.id in self._open:
            self._send(Cancel(request.id))

    def _send(self, command: Command) -> None:
        if self._worker is not None and self._ready:
            self._worker.send(command)
        else:
            self._outbox.append(command)

    # --- messages of the worker -------------------------------------------------------------------

    def _wants_another(self) -> bool:
        """Whether a model had better be loaded by another worker than the one that runs."""
        needs_restart = self._model is not None and self._model.needs_restart
        return needs_restart or (self._lacks_engine and not needs_engine())

    def _on_message(self, message: Message) -> None:
        request = self._open.get(getattr(message, "request_id", ""))
        if request is not None:
            if isinstance(message, TerminalEvent):
                self._finish(request, message)
            else:
                request.deliver(message)
        elif isinstance(message, Telemetry):
            self.telemetry.emit(message)
        elif isinstance(message, RECORDED):
            self.recorded.emit(message)
        elif isinstance(message, ModelMoved):
            self._model = message.info
            self.model_loaded.emit(message.info)
        elif isinstance(message, Ready):
            self._on_ready(message)

    def _on_loading(self, progress: Progress) -> None:
        self.loading_pace.note(progress)
        self.loading_changed.emit()

    def _on_ready(self, ready: Ready) -> None:
        if ready.protocol_version != PROTOCOL_VERSION:
            sentence = self.tr(
                "The engine uses protocol version {0} and this window version {1}: "
                "two installations are mixed, so reinstall Switchyard."
            ).format(ready.protocol_version, PROTOCOL_VERSION)
            self._drop_worker(sentence, sentence)
            return
        self._ready = True
        self._damage = ""
        if self._watched.on:
            self._send(self._watched)
        if self._others.address:
            self._send(self._others)
        while self._outbox:
            self._send(self._outbox.popleft())
        self._update_state()

    def _finish(self, request: Request, event: TerminalEvent) -> None:
        del self._open[request.id]
        loaded: ModelInfo | None = None
        if isinstance(event, ModelLoaded):
            loaded = self._model = event.info
        elif isinstance(request.command, LoadModel | UnloadModel):
            self._model = None  # a load first frees the previous model, however it ends
        elif isinstance(event, TuningFinished) and event.reloaded:
            loaded = self._model = event.loaded
        self._update_state()
        if loaded is not None:
            self.model_loaded.emit(loaded)
        if isinstance(event, Finished) and not _is_elsewhere(request):
            self.answered.emit(event)
        request.end(event)

    def _fail(self, request: Request, reason: str) -> None:
        if request.id in self._open:
            self._finish(request, Failed(request.id, ErrorCode.ENGINE_DIED, reason))

    # --- the end of a worker ----------------------------------------------------------------------

    def _on_ended(self, sentence: str) -> None:
        if sentence and not self._ready and is_packaged() and not self._doubts.is_busy:
            self._doubts.ask(engine_damage, self._tell_damage)
        self._forget_worker(sentence, sentence or self.tr("The engine was stopped before this request was done."))

    def _tell_damage(self, sentence: str) -> None:
        self._damage = sentence or self._damage  # told once only, and another worker may be starting meanwhile
        if self._damage and self._worker is None:
            self.last_error = self._damage
            self.state_changed.emit(self.state)

    def _drop_worker(self, error: str, reason: str) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._forget_worker(error, reason)

    def _forget_worker(self, error: str, reason: str) -> None:
        """End every open request with `reason`; `error` explains the state DIED, "" means STOPPED."""
        self._worker = None
        self._ready = False
        self._outbox.clear()
        self._model = None
        self.last_error = error
        ended = list(self._open.values())
        self._update_state()
        self._set_responding(True)
        for request in ended:
            self._fail(request, reason)

    def _on_responding(self, responding: bool) -> None:
        self.last_error = (
            ""
            if responding
            else self.tr("The engine has not responded for {0} seconds: wait, or restart it.").format(
                round(self._patience_ticks * HEARTBEAT_S)
            )
        )
        self._set_responding(responding)

    @property
    def is_idle(self) -> bool:
        return self.state is EngineState.READY and not self._open

    @property
    def takes_chats(self) -> bool:
        """Whether a chat would be answered at once: beside others, and beside a job, but not while a model is loaded,
        freed or tuned."""
        return self.state in (EngineState.READY, EngineState.BUSY) and all(
            isinstance(request.command, Generate | StartBatch | SampleBatch) for request in self._open.values()
        )

    def _set_responding(self, responding: bool) -> None:
        if responding != self.is_responding:
            self.is_responding = responding
            self.responding_changed.emit(responding)

    def _update_state(self) -> None:
        state = self._state_now()
        if state != self.state:
            self.state = state
            if state is not EngineState.LOADING:
                self.loading_pace.note(None)
            self.state_changed.emit(state)

    def _state_now(self) -> EngineState:
        if self._worker is None:
            return EngineState.DIED if self.last_error else EngineState.STOPPED
        if not self._ready:
            return EngineState.STARTING
        if any(isinstance(request.command, LoadModel) for request in self._open.values()):
            return EngineState.LOADING
        # A job leaves the engine available: chats are answered beside it.
        waited_for = any(_keeps_busy(request) for request in self._open.values())
        return EngineState.BUSY if waited_for else EngineState.READY


def _keeps_busy(request: Request) -> bool:
    command = request.command
    if isinstance(command, SampleBatch):
        return not command.job.is_remote
    return not (isinstance(command, StartBatch) or _is_elsewhere(request))


def _is_elsewhere(request: Request) -> bool:
    """Whether another server answers a chat: its speed says nothing of the model here."""
    return isinstance(request.command, Generate) and request.command.remote is not None


def _new_id() -> str:
    return uuid.uuid4().hex
