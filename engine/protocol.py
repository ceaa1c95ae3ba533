"""What the processes of this program say to each other: frozen dataclasses, one codec, a version.

One message is one line of UTF-8 JSON: `{"type": "Generate", ...fields}`.  The window writes commands to the
worker's stdin, the worker writes events to a private copy of its stdout.  Every command that carries a
`request_id` is answered by exactly one terminal event (`TERMINAL`) with the same id; if the worker dies, the client
synthesises that event.  `Token`, `Progress` and terminal events are lossless and ordered; `Telemetry` and the other
`SAMPLES` are latest-wins and may be dropped; `DROPPABLE` events are dropped, and counted, while the pipe is slow.

The HTTP server's process speaks the same: to the window over its stdin and stdout, and over a local socket to each
engine that answers its clients, with the window's words for progress, text, endings and failures.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engine.batch_files.messages import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRows,
    BatchSampled,
    SampleBatch,
    StartBatch,
)
from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage as ChatMessage
from engine.common.chat import FinishReason as FinishReason
from engine.common.chat import PromptEnd, Tool, ToolCall, ToolChoice
from engine.common.chat import Role as Role
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import MessageLines, OfRequest
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

PROTOCOL_VERSION = 8
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
class LoadModel(OfRequest):
    """Load this model, replacing the current one.  Ends in `ModelLoaded`, `Failed` or `Cancelled`."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class UnloadModel(OfRequest):
    """Free the model's memory.  Ends in `ModelUnloaded` (also when none was loaded)."""


@dataclass(frozen=True, slots=True)
class Generate(OfRequest):
    """Answer the last message.  Ends in `Finished` (also when cancelled midway) or `Failed`.

    With `remote`, an endpoint's model answers, whatever is loaded or going on here; nobody else does in its place.

    Attributes:
        chat: of which it is a turn.  What is computed of it may be kept on disk, if `keep_chat` was told so and until
            `forget_chat`; of no chat nothing is.
        tools: what the answer may call. It ends behind its calls, which come in a `Called`, for the window to run.
    """

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    remote: RemoteModel | None = None
    chat: str = ""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel(OfRequest):
    """Stop that request within one token, or before it starts.  Has no terminal event."""


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
class Progress(OfRequest):
    """Progress of a phase: `done` of `total` (bytes of all phases of loading together, prompt tokens in prefill)."""

    phase: Phase
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token and how likely it was; `raw` are its bytes, which may be a part of a character only."""

    text: str
    logprob: float
    raw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NamedChances:
    """`Chances` with the tokens' texts."""

    token: NamedToken
    likeliest: tuple[NamedToken, ...]


@dataclass(frozen=True, slots=True)
class Token(OfRequest):
    """Newly visible text of an answer; may be empty while a character or a stop string is incomplete.

    Attributes:
        text: what to append.
        generated_tokens: how many tokens have been generated so far in this answer.
        reasoning: what to append to what the model thinks before it answers; it is no part of the text.
        chances: of the new tokens, where a client of the server asked for them.
    """

    text: str
    generated_tokens: int
    reasoning: str = ""
    chances: tuple[NamedChances, ...] = ()


@dataclass(frozen=True, slots=True)
class Called(OfRequest):
    """An answer calls these tools; its terminal event follows."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ModelLoaded(OfRequest):
    """Terminal event of `LoadModel`."""

    info: ModelInfo
    load_s: float


@dataclass(frozen=True, slots=True)
class ModelMoved:
    """The loaded model runs elsewhere now, because its card no longer responds, or with less memory; answers go on."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class ModelUnloaded(OfRequest):
    """Terminal event of `UnloadModel`."""


@dataclass(frozen=True, slots=True)
class Finished(OfRequest):
    """Terminal event of `Generate` and `Submit`.

    Attributes:
        prompt_tokens: length of the whole prompt; `reused_tokens` of them were still in the KV cache.
        ttft_s: seconds from the start of the request to its first token; 0 if there was none.
        tokens_per_s: decode rate after the first token; 0 if fewer than two tokens came.
        guessed_tokens: tokens that were tried ahead; the answer went on with `accepted_tokens` of them.
        gave_way: sentences on what is not done as it was planned; empty if all is.
        stopped_by: the stop string that ended the answer, if one did.
        pictures: in the prompt; `pictures_kept` of them had been read before, the others took `pictures_s` seconds.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    gave_way: str = ""
    pictures: int = 0
    pictures_kept: int = 0
    pictures_s: float = 0.0
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled(OfRequest):
    """Terminal event of a `LoadModel` that was cancelled."""


@dataclass(frozen=True, slots=True)
class Failed(OfRequest):
    """Terminal event of any request that failed: `message` is one sentence for the user."""

    code: ErrorCode
    message: str

    @classmethod
    def of(cls, error: EngineError, request_id: str = "") -> Failed:
        return cls(request_id, error.code, error.message)

    @property
    def error(self) -> EngineError:
        return EngineError(self.code, self.message)


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

# --- the HTTP server's process and the engines that answer its clients -----------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that a client wants.

    Attributes:
        model: its path.
        messages, tools: a conversation, and how its prompt is to `end`; or `text` or `ids`, tokens, as they stand.
        choice: which of the tools may, or must, be called.
        special: with what the tokenizer adds at the ends of a text.
        sampling: fields of `SamplingParams` that differ from what the model's makers suggest.
        top_chances: how many likely tokens to name for each token; `None` logs nothing.
        ignores_end: the answer goes on to its limit, past where the model would end it.
        wants: the answer, or only the prompt's length, or only the prompt itself; nothing is generated then.
        keep_s: how long the model is kept afterwards, see `Answerer.release`; None leaves that as it is.
    """

    model: Path
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    end: PromptEnd = "answer"
    text: str | None = None
    ids: tuple[int, ...] = ()
    special: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    top_chances: int | None = None
    ignores_end: bool = False
    wants: Literal["answer", "length", "prompt"] = "answer"
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class Submit(OfRequest):
    """A client asks; the id is the server's.  Ends in `Finished` or `Failed`, after a `Began`, `Progress` of a long
    prompt and `Token`s; a `Cancel` says that nobody waits for it any more."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Release:
    """Free it once nobody has asked for it for so long; see `Answerer.release`."""

    model: Path
    after_s: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, for clients that want to see it: its text, and the ids and the bytes of its tokens."""

    text: str
    ids: tuple[int, ...]
    raw: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Began(OfRequest):
    """The prompt is known; `thinks` if it ends by opening the model's reasoning; `family` is that model's.

    With `is_call` all but the reasoning is one call as JSON, in no family's form.
    """

    prompt_tokens: int
    thinks: bool
    family: str = ""
    prompt: Prompt | None = None
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class ModelIs:
    """What is loaded now, or what is being loaded, if that is known."""

    model: Path | None
    loading: Path | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """Something for people."""

    text: str


@dataclass(frozen=True, slots=True)
class ServeModels:
    """What an engine's process beside the window's is to do, on its stdin: how models are run, where the server is,
    and as which chat's what is computed is kept on disk, if at all."""

    address: str
    secret: str
    config: EngineConfig
    idle_s: float | None
    chat: str


# --- the HTTP server's process and the window, which says the first three ---------------------------


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the server is to listen; the fields are those of `engine.serving.server.Address`."""

    host: str
    port: int
    key: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What the window has, and how models are run that programs ask for by name; said again whenever it changes.

    Attributes:
        window: the model that the window has loaded or is loading, by its path; empty if it has none.
        is_loading: it is not there yet.
        config: of the others; its model is not used.
        idle_s: they are freed once nobody has asked for so long; None keeps them.
        wakes: the window has a model that it put aside, and loads it again when a program asks for it.
        gives_way: its model makes room for one that does not fit beside it.
    """

    window: str
    is_loading: bool
    config: EngineConfig
    idle_s: float | None = None
    wakes: bool = False
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class FreeOthers:
    """The window needs the memory: the model beside its own is freed, unless it is answering."""


Outcome = Literal["answered", "refused", "left", "failed"]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that is over.

    Attributes:
        began_s: seconds since 1970.
        program: as it names itself.
        path: which interface, such as `/v1/messages`.
        model: its name; empty if the request was refused before that.
        read_tokens, written_tokens: of the prompt, and of the answers.
        status: of HTTP.
        outcome: `left`, if the client went away before the end.
    """

    began_s: float
    program: str
    path: str
    model: str
    read_tokens: int
    written_tokens: int
    seconds: float
    status: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Beside:
    """The model beside the window's: its name, empty if there is none, and whether it is being loaded."""

    model: str
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class Wants:
    """A program asks for the window's model, which was put aside, or for the room that it takes."""

    what: Literal["model", "room"]


@dataclass(frozen=True, slots=True)
class Listening:
    """The server listens at this port; the engine finds it at `link`."""

    port: int
    link: str
    secret: str


@dataclass(frozen=True, slots=True)
class NotListening:
    """The server cannot listen; `message` is one sentence for the user."""

    message: str


LinkMessage = Submit | Release | Began | ModelIs | Remark | ServeModels
FrontMessage = Listen | Rules | FreeOthers | Listening | NotListening | Served | Beside | Wants
Message = Command | Event | LinkMessage | FrontMessage
_LINES = MessageLines(get_args(Message))


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
