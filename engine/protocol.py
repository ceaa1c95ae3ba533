"""Commands and events between the window and the engine process: frozen dataclasses, one codec, a version.

One message is one line of UTF-8 JSON: `{"type": "Generate", ...fields}`.  The window writes commands to the
worker's stdin, the worker writes events to a private copy of its stdout.  Every command that carries a
`request_id` is answered by exactly one terminal event (`TERMINAL`) with the same id; if the worker dies, the
client makes that event up.  `Token`, `Progress` and terminal events are lossless and ordered; `Telemetry` is a
latest-wins sample that may be dropped, and so are the others of `SAMPLES`; `DROPPABLE` ones are dropped, and counted,
while the pipe is slow.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Literal, get_args

from engine.batch_files.messages import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRows,
    SampleBatch,
    StartBatch,
)
from engine.common.chat import ChatMessage as ChatMessage
from engine.common.chat import FinishReason as FinishReason
from engine.common.chat import Role as Role
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import from_fields
from engine.common.model_info import ModelInfo
from engine.telemetry.messages import (
    CacheReport,
    ExpertMap,
    ResizeCache,
    Telemetry,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    WatchTelemetry,
)
from engine.tuning.messages import StartTuning, TuningFinished, TuningMeasured, TuningPlans, TuningProgress, TuningTimed

PROTOCOL_VERSION = 2
HEARTBEAT_S = 1.0
"""The worker sends `Heartbeat` this often, also while it computes; silence for several of them means it hangs."""

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is nonsense, not a message: both sides refuse it rather than collect it."""

Phase = Literal["loading", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load this model, in place of the one loaded.  Ends in `ModelLoaded`, `Failed` or `Cancelled`."""

    request_id: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Free the model's memory.  Ends in `ModelUnloaded` (also when none was loaded)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer the last message.  Ends in `Finished` (also when cancelled in mid-answer) or `Failed`."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop that request within one token, or before it starts.  Has no answer of its own."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Cancel everything and exit 0."""


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
)


# --- events: worker -> window ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """First event of a worker: it listens.  The client refuses another protocol version."""

    protocol_version: int
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker is alive; `monotonic_s` is its own clock."""

    monotonic_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is: `done` of `total` (bytes while loading, prompt tokens in prefill)."""

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
    """

    request_id: str
    text: str
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Terminal event of `LoadModel`."""

    request_id: str
    info: ModelInfo
    load_s: float


@dataclass(frozen=True, slots=True)
class ModelUnloaded:
    """Terminal event of `UnloadModel`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Terminal event of `Generate`.

    Attributes:
        prompt_tokens: length of the whole prompt; `reused_tokens` of them were still in the KV.
        ttft_s: seconds from the start of the request to its first token; 0 if there was none.
        tokens_per_s: decode rate after the first token; 0 if fewer than two tokens came.
    """

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Terminal event of a `LoadModel` that was cancelled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal event of any request that could not be done: `message` is one sentence for a person."""

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
    | ModelLoaded
    | ModelUnloaded
    | Finished
    | BatchPlanned
    | BatchProgress
    | BatchRows
    | BatchFinished
    | TuningProgress
    | TuningMeasured
    | TuningPlans
    | TuningTimed
    | TuningFinished
    | Cancelled
    | Failed
    | TelemetryRequest
    | Sample
    | Droppable
)
TerminalEvent = ModelLoaded | ModelUnloaded | Finished | BatchFinished | TuningFinished | Cancelled | Failed
TERMINAL: tuple[type, ...] = get_args(TerminalEvent)
SAMPLES: tuple[type, ...] = get_args(Sample)
DROPPABLE: tuple[type, ...] = get_args(Droppable)

Message = Command | Event
_BY_NAME: dict[str, type] = {cls.__name__: cls for cls in (*get_args(Command), *get_args(Event))}


# --- the codec ------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One message as one line of JSON, newline included."""
    fields = dataclasses.asdict(message)
    text = json.dumps({"type": type(message).__name__, **fields}, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate (half an emoji, say) cannot be UTF-8: replace it rather than kill the stream.
    return text.encode("utf-8", errors="replace") + b"\n"


def decode(line: bytes) -> Message:
    """The message on one line.

    Raises:
        EngineError: `PROTOCOL`, if the line is not a message of this version.
    """
    try:
        raw = json.loads(line)
        cls = _BY_NAME[raw.pop("type")]
        return typing.cast(Message, from_fields(cls, raw))
    except EngineError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # Neither the line nor the error's own text is quoted: both can hold what somebody typed.
        message = f"A line of {len(line)} bytes is not a message of this version ({type(error).__name__})."
        raise EngineError(ErrorCode.PROTOCOL, message) from None


def request_id_of(line: bytes) -> str | None:
    """The `request_id` on a line that `decode` refused, if it has one: its sender is owed a terminal event."""
    try:
        request_id = json.loads(line)["request_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return request_id if isinstance(request_id, str) else None


class LineReader:
    """Turns a stream of bytes, cut anywhere, into the lines of it that are not blank."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Every line completed by `data`, in order, without its newline.

        Raises:
            EngineError: `PROTOCOL`, at a line that has no end in sight; the stream is of no use then.
        """
        *ended, rest = data.split(b"\n")
        lines = []
        for piece in ended:
            self._rest += piece
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MAX_LINE_BYTES:
            raise EngineError(ErrorCode.PROTOCOL, f"A protocol line has no end after {MAX_LINE_BYTES} bytes.")
        return [line for line in lines if line.strip()]
