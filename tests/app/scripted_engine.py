"""An engine client without a process: the same signals, moved by the test."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QObject, Signal

from app.services.engine_client import EngineState
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.common.model_info import ModelInfo
from engine.protocol import ChatMessage, Failed, Finished, FinishReason, Progress, Token
from engine.tuning.messages import StartTuning, Until
from engine.tuning.result import TuningKind

STARTER = ModelInfo(
    name="Starter",
    path="",
    family="mixtral",
    device="cpu",
    precision="bf16",
    threads=2,
    parameters=134_000_000,
    layers=30,
    experts=8,
    experts_per_token=7,
    context_tokens=8192,
    weights_bytes=70_000_000,
    experts_bytes=160_000_000,
    kv_bytes_per_token=23_040,
)


class ScriptedEngine(QObject):
    """What `EngineClient` offers to the chat page."""

    state_changed = Signal(object)
    responding_changed = Signal(bool)
    model_loaded = Signal(object)
    progress = Signal(object)
    token = Signal(object)
    telemetry = Signal(object)
    tuning_told = Signal(object)
    batch_told = Signal(object)
    finished = Signal(object)

    def __init__(self, model: ModelInfo | None = STARTER) -> None:
        super().__init__()
        self.model = model
        self.state = EngineState.READY if model is not None else EngineState.STARTING
        self.config: EngineConfig | None = None
        self.last_error = ""
        self.is_responding = True
        self.requests: list[tuple[str, tuple[ChatMessage, ...], SamplingParams]] = []
        self.cancelled: list[str] = []
        self.restarts = 0
        self.loads: list[EngineConfig] = []
        self.knows_a_model = True
        self.tunings: list[StartTuning] = []
        self.answering: tuple[str, ...] = ()
        self._tokens = 0

    # --- what the page calls ---

    def generate(self, messages: Sequence[ChatMessage], sampling: SamplingParams) -> str:
        request_id = f"r{len(self.requests)}"
        self.requests.append((request_id, tuple(messages), sampling))
        self._tokens = 0
        self.set_state(EngineState.BUSY)
        return request_id

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def restart(self) -> str | None:
        self.restarts += 1
        self.set_state(EngineState.STARTING)
        return "load" if self.knows_a_model else None

    def start(self) -> None:
        self.set_state(EngineState.READY)

    def start_tuning(
        self, config: EngineConfig, kind: TuningKind = "quick", until: Until = "timed", *, measure_again: bool = False
    ) -> str:
        request = StartTuning(f"t{len(self.tunings)}", config, kind, until, measure_again)
        self.tunings.append(request)
        self.set_state(EngineState.BUSY)
        return request.request_id

    def load(self, config: EngineConfig) -> str:
        self.loads.append(config)
        return "load"

    # --- what the test makes it do ---

    @property
    def request_id(self) -> str:
        return self.requests[-1][0]

    def set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            self.state_changed.emit(state)

    def start_loading(self, done: int = 0, total: int = 100) -> None:
        self.set_state(EngineState.LOADING)
        self.progress.emit(Progress("load", "loading", done, total))

    def end_loading(self, model: ModelInfo = STARTER) -> None:
        self.model = model
        self.set_state(EngineState.READY)
        self.model_loaded.emit(model)

    def read(self, done: int, total: int) -> None:
        self.progress.emit(Progress(self.request_id, "prefill", done, total))

    def write(self, *texts: str) -> None:
        for text in texts:
            self._tokens += 1
            self.token.emit(Token(self.request_id, text, self._tokens))

    def finish(self, reason: FinishReason = "stop", *, prompt_tokens: int = 40, rate: float = 24.6) -> None:
        event = Finished(self.request_id, reason, prompt_tokens, 0, self._tokens, 0.8, rate)
        self.set_state(EngineState.READY)
        self.finished.emit(event)

    def fail(self, code: ErrorCode, message: str) -> None:
        event = Failed(self.request_id, code, message)
        self.set_state(EngineState.READY)
        self.finished.emit(event)

    def die(self, sentence: str = "The engine was killed (signal 9), perhaps because memory ran out.") -> None:
        busy = self.state is EngineState.BUSY
        self.model = None
        self.last_error = sentence
        self.set_state(EngineState.DIED)
        if busy:
            self.finished.emit(Failed(self.request_id, ErrorCode.ENGINE_DIED, sentence))
