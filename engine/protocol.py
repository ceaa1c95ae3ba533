"""Commands and events between the window and the engine process: frozen dataclasses, one codec, a version.

One message is one line of UTF-8 JSON: `{"type": "Generate", ...fields}`.  The window writes commands to the
worker's stdin, the worker writes events to a private copy of its stdout.  Every command that carries a
`request_id` is answered by exactly one terminal event (`TERMINAL`) with the same id; if the worker dies, the client
synthesises that event.  `Token`, `Progress` and terminal events are lossless and ordered; `Telemetry` and the other
`SAMPLES` are latest-wins and may be dropped; `DROPPABLE` events are dropped, and counted, while the pipe is slow.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass
from typing import Literal, get_args

from engine.batch_files.messages import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRows,
    BatchSampled,
    SampleBatch,
    StartBatch,
)
from engine.common.chat import ChatMessage as ChatMessage
from engine.common.chat import FinishReason as FinishReason
from engine.common.chat import Role as Role
from engine.common.chat import Tool, ToolCall
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import MessageLines
from engine.common.model_info import ModelInfo
from engine.remote.endpoint import RemoteModel
from engine.telemetry.messages import (
    CacheReport,
    ExpertMap,
    RequestPlace,
    ResizeCache,
    Telemetry,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    WatchTelemetry,
)
from engine.tuning.messages import StartTuning, TuningFinished, TuningMeasured, TuningPlans, TuningProgress, TuningTimed

PROTOCOL_VERSION = 6
WAITS = "--waits"
"""The engine process's option to import the engine, which takes memory, with the first request that needs one."""
HEARTBEAT_S = 1.0
"""Interval of `Heartbeat`, also while the worker computes; several missing ones mean that it hangs."""

MAX_LINE_BYTES = 64 * 2**20
"""Both sides reject a longer line instead of buffering it."""

LoadPhase = Literal["loading", "reading", "converting"]
"""Of loading: opening files, reading weights, making records of them, and writing what later starts read instead."""

Phase = Literal["loading", "reading", "converting", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load this model, replacing the current one.  Ends in `ModelLoaded`, `Failed` or `Cancelled`."""

    request_id: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Free the model's memory.  Ends in `ModelUnloaded` (also when none was loaded)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer the last message.  Ends in `Finished` (also when cancelled midway) or `Failed`.

    With `remote`, an endpoint's model answers, whatever is loaded or going on here; nobody else does in its place.

    Attributes:
        chat: of which it is a turn.  What is computed of it may be kept on disk, if `keep_chat` was told so and until
            `forget_chat`; of no chat nothing is.
        tools: what the answer may call. It ends behind its calls, which come in a `Called`, for the window to run.
    """

    request_id: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    remote: RemoteModel | None = None
    chat: str = ""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop that request within one token, or before it starts.  Has no terminal event."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Cancel everything and exit 0."""


@dataclass(frozen=True, slots=True)
class ServeOthers:
    """From now on answer what other programs ask at the server behind this link; an empty address ends that.

    Has no terminal event.
    """

    address: str
    secret: str = ""


Command = (
    LoadModel
    | UnloadModel
    | Generate
    | StartBatch
    | SampleBatch
    | StartTuning
    | Cancel
    | Shutdown
    | WatchTelemetry
    | ResizeCache
    | ServeOthers
)


# --- events: worker -> window ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker's first event: it accepts commands.  The client refuses another protocol version."""

    protocol_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker is alive; `monotonic_s` is its own clock."""

    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a phase: `done` of `total` (bytes of all phases of loading together, prompt tokens in prefill)."""

    request_id: str
    phase: Phase
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """Newly visible text of an answer; may be empty while a character or a stop string is incomplete.

    Attributes:
        text: what to append.
        generated_tokens: how many tokens have been generated so far in this answer.
        reasoning: what to append to what the model thinks before it answers; it is no part of the text.
    """

    request_id: str
    text: str
    generated_tokens: int
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Called:
    """An answer calls these tools; its terminal event follows."""

    request_id: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Terminal event of `LoadModel`."""

    request_id: str
    info: ModelInfo
    load_s: float


@dataclass(frozen=True, slots=True)
class ModelMoved:
    """The loaded model runs elsewhere now, because its card no longer responds, or with less memory; answers go on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """Terminal event of `UnloadModel`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal event of `Generate`.

    Attributes:
        prompt_tokens: length of the whole prompt; `reused_tokens` of them were still in the KV cache.
        ttft_s: seconds from the start of the request to its first token; 0 if there was none.
        tokens_per_s: decode rate after the first token; 0 if fewer than two tokens came.
        guessed_tokens: tokens that were tried ahead; the answer went on with `accepted_tokens` of them.
        gave_way: sentences on what is not done as it was planned; empty if all is.
        pictures: in the prompt; `pictures_kept` of them had been read before, the others took `pictures_s` seconds.
    """

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    ttft_s: float
    tokens_per_s: float
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    gave_way: str = ""
    pictures: int = 0
    pictures_kept: int = 0
    pictures_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Terminal event of a `LoadModel` that was cancelled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal event of any request that failed: `message` is one sentence for the user."""

    request_id: str
    code: ErrorCode
    message: str


Sample = Telemetry | ExpertMap | CacheReport
Droppable = TelemetrySpans | TelemetryCounters
Event = (
    Ready
    | Heartbeat
    | Progress
    | Token
    | Called
    | ModelLoaded
    | ModelMoved
    | ModelUnloaded
    | Finished
    | BatchPlanned
    | BatchProgress
    | BatchRows
    | BatchSampled
    | BatchFinished
    | TuningProgress
    | TuningMeasured
    | TuningPlans
    | TuningTimed
    | TuningFinished
    | Cancelled
    | Failed
    | TelemetryRequest
    | RequestPlace
    | Sample
    | Droppable
)
TerminalEvent = ModelLoaded | ModelUnloaded | Finished | BatchFinished | TuningFinished | Cancelled | Failed
TERMINAL: tuple[type, ...] = get_args(TerminalEvent)
SAMPLES: tuple[type, ...] = get_args(Sample)
DROPPABLE: tuple[type, ...] = get_args(Droppable)

Message = Command | Event
_LINES = MessageLines((*get_args(Command), *get_args(Event)))


# --- the codec ------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One message as one line of JSON, newline included."""
    return _LINES.encode(message)


def decode(line: bytes) -> Message:
    """The message on one line.

    Raises:
        EngineError: `PROTOCOL`, if the line is not a message of this version.
    """
    return typing.cast(Message, _LINES.decode(line))


def request_id_of(line: bytes) -> str | None:
    """The `request_id` on a line that `decode` rejected, if any: its sender needs a terminal event."""
    try:
        request_id = json.loads(line)["request_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return request_id if isinstance(request_id, str) else None


class LineReader:
    """Splits a byte stream, received in arbitrary chunks, into its non-blank lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by `data`, in order, without newlines.

        Raises:
            EngineError: `PROTOCOL`, if a line exceeds `MAX_LINE_BYTES`; the stream is then unusable.
        """
        *ended, rest = data.split(b"\n")
        lines = []
        for line in ended:
            self._rest += line
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            raise EngineError(ErrorCode.PROTOCOL, f"A protocol line is longer than {MAX_LINE_BYTES} bytes.")
        return [line for line in lines if line.strip()]
