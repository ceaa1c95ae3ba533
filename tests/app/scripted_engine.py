"""An engine client without a process: the same signals, moved by the test."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.services.engine_client import EngineState
from app.services.engine_request import ChatAnswer, LoadingPace, Request, TuningRun
from engine.common.chat import Tool, ToolCall
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.common.model_info import ModelInfo
from engine.protocol import (
    Called,
    ChatMessage,
    Failed,
    Finished,
    FinishReason,
    Generate,
    LoadModel,
    Progress,
    StartTuning,
    Token,
    UnloadModel,
    Until,
)
from engine.remote.endpoint import RemoteModel
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


def seer(folder: Path) -> ModelInfo:
    """A model that sees, of which what says so is in a folder."""
    config = {"model_type": "qwen3_vl_moe", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps({"architectures": ["Q"], **config}), encoding="utf-8")
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    preparing = {"size": size, "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(preparing), encoding="utf-8")
    return replace(STARTER, name="Seer", path=str(folder), sees=True)


class ScriptedEngine(QObject):
    """What `EngineClient` offers to the chat page."""

    state_changed = Signal(object)
    responding_changed = Signal(bool)
    loading_changed = Signal()
    model_loaded = Signal(object)
    answered = Signal(object)
    batch_began = Signal(object)
    telemetry = Signal(object)

    def __init__(self, model: ModelInfo | None = STARTER) -> None:
        super().__init__()
        self.model = model
        self.state = EngineState.READY if model is not None else EngineState.STARTING
        self.config: EngineConfig | None = None
        self.last_error = ""
        self.is_responding = True
        self.loading_pace = LoadingPace()
        self.requests: list[ChatAnswer] = []
        self.cancelled: list[str] = []
        self.restarts = 0
        self.loads: list[Request] = []
        self.knows_a_model = True
        self.tunings: list[TuningRun] = []
        self.answering: tuple[ChatAnswer, ...] = ()
        self._tokens: dict[str, int] = {}
        self._open: list[ChatAnswer] = []
        self.served_at = ""

    # --- what the page calls ---

    def serve_others(self, address: str, _secret: str) -> None:
        self.served_at = address

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        remote: RemoteModel | None = None,
        chat: str = "",
        tools: Sequence[Tool] = (),
    ) -> ChatAnswer:
        command = Generate(f"r{len(self.requests)}", tuple(messages), sampling, remote, chat, tuple(tools))
        answer = ChatAnswer(command, self._cancel, self)
        self.requests.append(answer)
        self._open.append(answer)
        self._now = answer
        self._tokens[answer.id] = 0
        self.set_state(EngineState.BUSY)
        return answer

    @property
    def takes_chats(self) -> bool:
        return self.state is EngineState.READY or (self.state is EngineState.BUSY and not self.tunings)

    def _cancel(self, request: Request) -> None:
        self.cancelled.append(request.id)

    def restart(self) -> Request | None:
        self.restarts += 1
        self.set_state(EngineState.STARTING)
        return self.load(EngineConfig("")) if self.knows_a_model else None

    def start(self, *, at_once: bool = True) -> None:
        self.set_state(EngineState.READY)

    def start_tuning(
        self, config: EngineConfig, kind: TuningKind = "quick", until: Until = "timed", *, measure_again: bool = False
    ) -> TuningRun:
        command = StartTuning(f"t{len(self.tunings)}", config, kind, until, measure_again)
        self.tunings.append(TuningRun(command, self._cancel, self))
        self.set_state(EngineState.BUSY)
        return self.tunings[-1]

    def unload(self) -> Request:
        self.model = None
        self.state_changed.emit(self.state)
        return Request(UnloadModel("u"), self._cancel, self)

    def load(self, config: EngineConfig) -> Request:
        self.loads.append(Request(LoadModel(f"l{len(self.loads)}", config), self._cancel, self))
        return self.loads[-1]

    # --- what the test makes it do ---

    @property
    def request_id(self) -> str:
        return self._now.id

    def turn_to(self, number: int) -> None:
        """What follows is about this answer, and not the last one."""
        self._now = self.requests[number]

    @property
    def loading(self) -> float | None:
        return self.loading_pace.share

    def set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            self.loading_pace.note(None)
            self.state_changed.emit(state)

    def start_loading(self, read: float = 0.0) -> None:
        self.set_state(EngineState.LOADING)
        self.loading_pace.note(Progress("load", "converting", round(read * 6_000_000_000), 6_000_000_000))
        self.loading_changed.emit()

    def end_loading(self, model: ModelInfo = STARTER) -> None:
        self.model = model
        self.set_state(EngineState.READY)
        self.model_loaded.emit(model)

    def read(self, done: int, total: int) -> None:
        self._now.deliver(Progress(self.request_id, "prefill", done, total))

    def think(self, *texts: str) -> None:
        for text in texts:
            self._tokens[self.request_id] += 1
            self._now.deliver(Token(self.request_id, "", self._tokens[self.request_id], text))

    def write(self, *texts: str) -> None:
        for text in texts:
            self._tokens[self.request_id] += 1
            self._now.deliver(Token(self.request_id, text, self._tokens[self.request_id]))

    def call(self, *calls: tuple[str, str]) -> None:
        """Ends the answer with calls of tools: their names and arguments."""
        numbered = enumerate(calls, 10 * len(self.requests))
        made = tuple(ToolCall(f"c{number}", name, arguments) for number, (name, arguments) in numbered)
        self._now.deliver(Called(self.request_id, made))
        self.finish()

    def finish(
        self, reason: FinishReason = "stop", *, prompt_tokens: int = 40, rate: float = 24.6, **more: Any
    ) -> None:
        tokens = self._tokens[self.request_id]
        event = Finished(self.request_id, reason, prompt_tokens, 0, tokens, 0.8, rate, **more)
        self._ends()
        if self._now.command.remote is None:
            self.answered.emit(event)
        self._now.end(event)

    def reply(self, *texts: str, **ends: Any) -> None:
        """The whole answer."""
        self.write(*texts)
        self.finish(**ends)

    def fail(self, code: ErrorCode, message: str) -> None:
        self._ends()
        self._now.end(Failed(self.request_id, code, message))

    def _ends(self) -> None:
        self._open.remove(self._now)
        self.set_state(EngineState.BUSY if self._open else EngineState.READY)

    def die(self, sentence: str = "The engine was killed (signal 9), perhaps for lack of memory.") -> None:
        self.model = None
        self.last_error = sentence
        answers, self._open = self._open, []
        self.set_state(EngineState.DIED)
        for answer in answers:
            answer.end(Failed(answer.id, ErrorCode.ENGINE_DIED, sentence))
