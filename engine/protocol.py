"""What the processes of this program say to each other: frozen dataclasses, one codec, a version.

One message is one line of UTF-8 JSON: `{"type": "Generate", ...fields}`.  The window writes commands to the
worker's stdin, the worker writes events to a private copy of its stdout.  Every `Request` is answered by exactly one
`TerminalEvent` with the same id; if the worker dies, the client synthesises that event.  Events are lossless and
ordered, but for each `Sample` and what is `Droppable`.

The HTTP server's process speaks the same: to the window over its stdin and stdout, and over a local socket to each
engine that answers its clients, with the window's words for progress, text, endings and failures.  So do the process
that makes embeddings for it, the one that speaks to a Ray cluster, and the engine on each of the cluster's nodes.
"""

from __future__ import annotations

import importlib
import json
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, dataclass_transform

from engine.batch_files.job_watcher import Pace
from engine.batch_files.rows import Answer, Constraint, RowRequest
from engine.common.channel import MAX_LINE_BYTES as MAX_LINE_BYTES
from engine.common.chat import ChatMessage as ChatMessage
from engine.common.chat import FinishReason as FinishReason
from engine.common.chat import PromptEnd, Tool, ToolCall, ToolChoice
from engine.common.chat import Role as Role
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import from_fields
from engine.common.model_info import ModelInfo
from engine.common.model_info import PredictorRate as PredictorRate
from engine.planner.batch_prediction import JobPrediction
from engine.remote.endpoint import RemoteModel

if TYPE_CHECKING:
    from engine.hardware.measured import Measurements
    from engine.planner.plan_parts import Plan
    from engine.tuning.result import Contestant, Timed, TuningKind, TuningResult

_LATER = {
    "Measurements": "engine.hardware.measured",
    "Plan": "engine.planner.plan_parts",
    **dict.fromkeys(("Contestant", "Timed", "TuningKind", "TuningResult"), "engine.tuning.result"),
}
"""Modules that only messages about tuning need: every start of window and worker would wait for them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


PROTOCOL_VERSION = 9
WAITS = "--waits"
"""The engine process's option to import the engine, which takes memory, with the first request that needs one."""
HEARTBEAT_S = 1.0
"""Interval of `Heartbeat`, also while the worker computes; several missing ones mean that it hangs."""

LoadPhase = Literal["loading", "reading", "converting"]
"""Of loading: opening files, reading weights, making records of them, and writing what later starts read instead."""

Phase = Literal["loading", "reading", "converting", "prefill", "decode"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Fields:
    """What is a frozen dataclass because it inherits from this: a message, or a part of one."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


MESSAGES: dict[str, type[Message]] = {}
"""By the names under which they are sent."""


class Message(Fields):
    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        MESSAGES[cls.__name__] = cls
        for kind in cls.__bases__:  # which is only inherited from
            MESSAGES.pop(kind.__name__, None)


class OfRequest(Message):
    request_id: str


class Command(Message):
    """The window says it to the worker."""


class Request(Command, OfRequest):
    """A command that ends in exactly one `TerminalEvent`."""


class Event(Message):
    """The worker says it to the window."""


class RequestEvent(Event, OfRequest):
    pass


class TerminalEvent(RequestEvent):
    pass


class Sample(Event):
    """Latest-wins: a newer one takes the place of one that was not sent yet."""


class Droppable(Event):
    """Dropped, and counted, while the pipe is slow."""


# --- models and chats: the window to the worker ---------------------------------------------------


class LoadModel(Request):
    """Load this model, replacing the current one.  Ends in `ModelLoaded`, `Failed` or `Cancelled`."""

    config: EngineConfig


class UnloadModel(Request):
    """Free the model's memory.  Ends in `ModelUnloaded` (also when none was loaded)."""


class Generate(Request):
    """Answer the last message.  Ends in `Finished` (also when cancelled midway) or `Failed`.

    With `remote`, an endpoint's model answers, whatever is loaded or going on here.  What is computed may be kept on
    disk as that `chat`'s, from `keep_chat` until `forget_chat`.  An answer ends behind its calls of `tools`, which come
    in a `Called`, for the window to run.
    """

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    remote: RemoteModel | None = None
    chat: str = ""
    tools: tuple[Tool, ...] = ()


class Cancel(Command, OfRequest):
    """Stop that request within one token, or before it starts.  Has no terminal event."""


class Shutdown(Command):
    """Cancel everything and exit 0."""


class ServeOthers(Command):
    """From now on answer what other programs ask at the server behind this link; an empty address ends that.

    Has no terminal event.
    """

    address: str
    secret: str = ""


# --- and back -------------------------------------------------------------------------------------


class Ready(Event):
    """A worker's first event: it accepts commands.  The client refuses another protocol version."""

    protocol_version: int
    pid: int


class Heartbeat(Event):
    """The worker is alive; `monotonic_s` is its own clock."""

    monotonic_s: float


class Progress(RequestEvent):
    """Progress of a phase: `done` of `total` (bytes of all phases of loading together, prompt tokens in prefill)."""

    phase: Phase
    done: int
    total: int


class NamedToken(Fields):
    """A token and how likely it was; `raw` are its bytes, which may be a part of a character only."""

    text: str
    logprob: float
    raw: tuple[int, ...]


class NamedChances(Fields):
    """`Chances` with the tokens' texts."""

    token: NamedToken
    likeliest: tuple[NamedToken, ...]


class Token(RequestEvent):
    """Newly visible text and reasoning of an answer; may be empty while a character or a stop string is incomplete.

    `generated_tokens` are those of the answer so far.  A client of the server may ask for the new tokens' `chances`.
    """

    text: str
    generated_tokens: int
    reasoning: str = ""
    chances: tuple[NamedChances, ...] = ()


class Called(RequestEvent):
    """An answer calls these tools; its terminal event follows."""

    calls: tuple[ToolCall, ...]


class ModelLoaded(TerminalEvent):
    """Terminal event of `LoadModel`."""

    info: ModelInfo
    load_s: float


class ModelMoved(Event):
    """The loaded model runs elsewhere now, because its card no longer responds, or with less memory; answers go on."""

    info: ModelInfo


class ModelUnloaded(TerminalEvent):
    """Terminal event of `UnloadModel`."""


class Finished(TerminalEvent):
    """Terminal event of `Generate` and `Submit`; most fields are those of `GenerationResult`.

    Attributes:
        gave_way: sentences on what is not done as it was planned; empty if all is.
    """

    finish_reason: FinishReason
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    gave_way: str = ""
    pictures: int = 0
    pictures_kept: int = 0
    pictures_s: float = 0.0
    stopped_by: str = ""

    @classmethod
    def of(cls, result: Any, request_id: str = "", gave_way: str = "") -> Finished:
        """Of a `GenerationResult`."""
        own = (each.name for each in fields(cls) if each.name not in ("request_id", "gave_way"))
        return cls(request_id, gave_way=gave_way, **{name: getattr(result, name) for name in own})


class Cancelled(TerminalEvent):
    """Terminal event of a `LoadModel` that was cancelled."""


class Failed(TerminalEvent):
    """Terminal event of any request that failed: `message` is one sentence for the user."""

    code: ErrorCode
    message: str

    @classmethod
    def of(cls, error: EngineError, request_id: str = "") -> Failed:
        return cls(request_id, error.code, error.message)

    @property
    def error(self) -> EngineError:
        return EngineError(self.code, self.message)


# --- jobs: commands, then events ------------------------------------------------------------------


class EndpointKey(Fields):
    """The key of the endpoint of this name."""

    name: str
    key: str = field(repr=False)


class StartBatch(Request):
    """Answer a file of rows with the loaded model.  Ends in `BatchFinished` (even if stopped) or `Failed`.

    Chats take priority; loading another model stops the job, which can be resumed.  A job that names endpoints is
    answered by them; the loaded model matters only if it is one of them.

    Attributes:
        keys: where nothing else keeps them.
        config: of the engine on each node, if a Ray cluster answers.
    """

    job: BatchJob
    keys: tuple[EndpointKey, ...] = ()
    config: EngineConfig | None = None


class SampleBatch(Request):
    """Answer the first `rows` rows of a job and save nothing.  Each comes as a `BatchRows`; ends in `BatchFinished`.

    A job that names endpoints is tried at those, and `BatchSampled` says what that took.  That of a Ray cluster is
    tried with the loaded model: it is the same one.
    """

    job: BatchJob
    rows: int
    keys: tuple[EndpointKey, ...] = ()


class BatchProgress(RequestEvent):
    """Progress of a job; `blocked` says why it is, as a sentence, and is empty if it is not."""

    pace: Pace
    blocked: str = ""


class BatchSampled(RequestEvent):
    """What a sample at endpoints says of each row of the job: measured, since endpoints are not modelled.

    Attributes:
        row_s: for one row at one place, while few are asked.
        cost: of a row; None if no place has a price.
    """

    rows: int
    prompt_tokens: float
    generated_tokens: float
    row_s: float
    cost: float | None
    currency: str


class BatchPlanned(RequestEvent):
    """How a job will run, before its first answer; after a sample, corrected by its timing."""

    prediction: JobPrediction


class BatchRow(Fields):
    """The beginnings of a completed row's texts, for display; see `engine.batch_files.rows.Answer`."""

    row: int
    prompt: str
    answer: str
    finish_reason: str
    generated_tokens: int
    problem: str
    reasoning: str = ""


class BatchRows(RequestEvent):
    """Rows completed since the previous such event; for fast jobs only the latest."""

    rows: tuple[BatchRow, ...]


class BatchFinished(TerminalEvent):
    """Terminal event of `StartBatch` and `SampleBatch`; unless it is `finished` the job can be resumed.

    Attributes:
        done, failed, cut_off: rows of all runs of the job; see `Pace`.
        tokens: generated in this run, in `seconds` of computing.
        note: a remark on how rows were run, or on the result's path if it differs from the requested one.
        output, errors: files of the result and of failed OpenAI requests; empty if not written.
    """

    finished: bool = False
    done: int = 0
    failed: int = 0
    written: int = 0
    tokens: int = 0
    seconds: float = 0.0
    note: str = ""
    output: str = ""
    errors: str = ""
    cut_off: int = 0


# --- tuning: a command, then events ---------------------------------------------------------------


# A run goes through the stages of `STAGES`. The first three parts each send their result: `TuningMeasured`,
# `TuningPlans`, then a `TuningTimed` for every contestant. With `until` it ends after one of them, so that a wizard can
# stop there and continue with the next command: measurements are not repeated.
#
# While other programs keep the CPU busy, a run waits for a moment (`waiting`) and then goes on anyway; its results are
# then not saved unless requested.

Stage = Literal["probing", "waiting", "measuring", "planning", "loading", "timing", "restoring"]
STAGES: tuple[Stage, ...] = ("probing", "waiting", "measuring", "planning", "loading", "timing", "restoring")
Until = Literal["measured", "planned", "timed"]
Measured = Literal[
    "ram", "cpu_flops", "cpu_experts", "gpu_flops", "gpu_memory", "gpu_experts", "h2d", "d2h", "disk", "decode"
]
Unit = Literal["bytes/s", "flop/s", "tokens/s"]


class StartTuning(Request):
    """Tune this machine for a model.  Ends in `TuningFinished` (also when cancelled) or `Failed`.

    Attributes:
        config: the model and current settings: those that are `auto` or None are tuned.
        until: the last part to run.
        even_if_busy: results are saved even if other programs were busy.
    """

    config: EngineConfig
    kind: TuningKind = "quick"
    until: Until = "timed"
    measure_again: bool = False
    even_if_busy: bool = False


class TuningNumber(Fields):
    """A number just measured, with a detail such as `8 threads`; `decode` is of the contestant that is being timed."""

    what: Measured
    detail: str
    value: float
    unit: Unit


class TuningProgress(RequestEvent):
    """How much of a stage is done, 0 to 1; `name` is that of the measurement, or of the contestant."""

    stage: Stage
    name: str
    done: float
    number: TuningNumber | None = None


class TuningMeasured(RequestEvent):
    """The machine is measured: `engine.hardware.measured.load_measurements(probe(), device)` returns the
    results, unless other programs were busy.

    Attributes:
        taken_at: ISO 8601, UTC; `kept`: earlier measurements that are still valid.
        skipped: what could not be measured and why, as sentences.
        others: CPU share of other programs meanwhile.
    """

    device: str
    kind: TuningKind
    taken_at: str
    kept: bool
    notes: tuple[str, ...]
    skipped: tuple[str, ...]
    others: float = 0.0


class TuningPlans(RequestEvent):
    """The contestants in order of timing; `plan` is the planner's first choice, for roofline and memory."""

    plan: Plan
    contestants: tuple[Contestant, ...]


class TuningTimed(RequestEvent):
    """A contestant was timed, or failed; sent again when repeats change its median."""

    timed: Timed


class TuningFinished(TerminalEvent):
    """Terminal event of `StartTuning`.

    Attributes:
        finished: if not, it was cancelled or failed, and no result is saved.
        result: None if it did not finish, or was limited by `until`.
        reloaded: whether models were unloaded or loaded; otherwise the earlier model is untouched.
        loaded: if `reloaded`, the model loaded now: the earlier one, with tuned settings if it is the tuned model; None
            if there was none, or if it could not be reloaded, which the note says.
        problem: why it failed, as a sentence.
        saved: not if other programs were busy, unless requested.
        others: the largest CPU share of other programs.
        unsaved: measurements of this run that were not saved.
    """

    finished: bool = False
    result: TuningResult | None = None
    reloaded: bool = False
    loaded: ModelInfo | None = None
    note: str = ""
    problem: str = ""
    saved: bool = True
    others: float = 0.0
    unsaved: Measurements | None = None


# --- telemetry: commands, then events -------------------------------------------------------------


CacheTier = Literal["vram", "ram"]


class WatchTelemetry(Command):
    """Selects what is recorded and sent, at first nothing: spans, counters and cache reports, and an `ExpertMap`."""

    on: bool
    expert_map: bool = False


class ResizeCache(Command):
    """Resizes a tier to so many experts, if there is room; the next `CacheReport` has the actual number."""

    tier: CacheTier
    slots: int


class Telemetry(Sample):
    """The engine's memory use, and its speed over the last second of decoding.

    Attributes:
        rss_bytes: resident memory of the worker; the next three are parts of it.
        device_total_bytes, device_used_bytes: budget and use of device memory by the model; 0 on the CPU.
    """

    rss_bytes: int
    weights_bytes: int
    experts_bytes: int
    kv_bytes: int
    kv_tokens: int
    tokens_per_s: float
    device_total_bytes: int = 0
    device_used_bytes: int = 0
    device_experts_bytes: int = 0


class TelemetrySpans(Droppable):
    """Spans that ended since the previous message.

    Attributes:
        clock_ns, wall_s: the same moment on the spans' clock and in seconds since 1970.
        packed: `SPAN` records, not sorted (see `engine.telemetry.records.unpack`).
        dropped: since recording started.
    """

    clock_ns: int
    wall_s: float
    count: int
    packed: str
    dropped: int


class TelemetryCounters(Droppable):
    """Steps ended since the previous message: packed `STEP` records, in order; `dropped` as in `TelemetrySpans`."""

    count: int
    packed: str
    dropped: int


class TelemetryRequest(Event):
    """Maps the `number` in spans to a `request_id`."""

    number: int
    request_id: str
    clock_ns: int


class RequestPlace(Event):
    """Which endpoint answers the request of this number in the requests' lane."""

    number: int
    place: str


class ExpertMap(Sample):
    """Use and location of all experts, [layers, experts] in row-major order.

    Attributes:
        experts: per row; rows with fewer are padded with experts in no place.
        heat: packed uint8: decayed use counts, scaled so that 255 is `hottest`.
        places: packed uint8: bits of `IN_VRAM`, `IN_RAM`, `ON_DISK`, `ARRIVING`.
        uses, hits, last_step: packed uint32: since the model was loaded; steps count from 1, 0 is never.
        record_bytes: of each row's experts.
    """

    layers: tuple[int, ...]
    experts: int
    step: int
    hottest: float
    heat: str
    places: str
    uses: str
    hits: str
    last_step: str
    record_bytes: tuple[int, ...]


IN_VRAM, IN_RAM, ON_DISK, ARRIVING = 1, 2, 4, 8


class PolicyRate(Fields):
    """The recent hit rate of a policy had it been used alone."""

    name: str
    hit_rate: float


class TierReport(Fields):
    """One tier of the expert cache.

    Attributes:
        slots, most_slots: capacity in experts, and the most that are useful.
        record_bytes: of one expert, on average.
        hits, lookups: since the model was loaded, as the other counts, but of decode steps only.
        recent_hit_rate: over the last seconds; -1 without lookups.
        is_adaptive: the policy was chosen among `shadows`.
        miss_s: extra seconds of an expert in the tier below; 0 if unknown.
    """

    tier: CacheTier
    slots: int
    most_slots: int
    record_bytes: int
    hits: int
    lookups: int
    recent_hit_rate: float
    policy: str
    is_adaptive: bool
    shadows: tuple[PolicyRate, ...]
    arriving: int
    evictions: int
    prefetched: int
    prefetches_used: int
    prefetches_wasted: int
    note: str = ""
    miss_s: float = 0.0


class MemoryPart(Fields):
    """Bytes of one purpose in one place (`ram`, or the name of a device); `total` and `free` are parts too.

    The other parts of a place sum to its `total`.
    """

    place: str
    purpose: str
    nbytes: int


class CacheReport(Sample):
    """State of the expert cache, once a second while computing.

    Attributes:
        tiers: fastest first; empty if all experts are in RAM without a cache.
        curve_slots, curve_hit_rates: hit rate of an LRU cache of that size on the recent routing (Mattson et al.
            1970), for the top tier; empty until there is enough data.
        steps_per_s: over the last seconds of decoding.
        hit_s, miss_s: 0 if unknown.
        adopted: the predictor in use, empty if none; ahead: its lookahead in layers.
    """

    tiers: tuple[TierReport, ...]
    curve_slots: tuple[int, ...]
    curve_hit_rates: tuple[float, ...]
    steps_per_s: float
    lookups_per_step: float
    hit_s: float
    miss_s: float
    adopted: str
    ahead: int
    predictors: tuple[PredictorRate, ...]
    memory: tuple[MemoryPart, ...]
    note: str = ""


# --- the HTTP server's process, and what answers its clients --------------------------------------


class Ask(Fields):
    """One answer that a client wants.

    Attributes:
        model: its path.
        messages, tools: a conversation, and how its prompt is to `end`; or `text` or `ids`, tokens, as they stand.
        choice: which of the tools may, or must, be called.
        special: with what the tokenizer adds at the ends of a text.
        sampling: fields of `SamplingParams` that differ from what the model's makers suggest.
        top_chances: how many likely tokens to name for each token; `None` logs nothing.
        ignores_end: the answer goes on to its limit, past where the model would end it.
        wants: the prompt's length, or the prompt itself, if nothing is to be generated.
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


class Submit(OfRequest):
    """A client asks; the id is the server's.  Ends in `Finished` or `Failed`, after a `Began`, `Progress` of a long
    prompt and `Token`s; a `Cancel` says that nobody waits for it any more."""

    ask: Ask


class Release(Message):
    """Free it once nobody has asked for it for so long; see `Answerer.release`."""

    model: Path
    after_s: float


class Prompt(Fields):
    """A prompt, for clients that want to see it: its text, and the ids and the bytes of its tokens."""

    text: str
    ids: tuple[int, ...]
    raw: tuple[tuple[int, ...], ...]


class Began(OfRequest):
    """The prompt is known; `thinks` if it ends by opening the model's reasoning; `family` is that model's.

    With `is_call` all but the reasoning is one call as JSON, in no family's form.
    """

    prompt_tokens: int
    thinks: bool
    family: str = ""
    prompt: Prompt | None = None
    is_call: bool = False


class ModelIs(Message):
    """What is loaded now, or what is being loaded, if that is known."""

    model: Path | None
    loading: Path | None = None


class Remark(Message):
    """Something for people; a note `about` something, be it "", is not repeated, whichever engine says it."""

    text: str
    about: str | None = None


class ServeModels(Message):
    """What an engine's process beside the window's is to do, on its stdin: how models are run, where the server is,
    and as which chat's what is computed is kept on disk, if at all."""

    address: str
    secret: str
    config: EngineConfig
    idle_s: float | None
    chat: str


# --- the HTTP server's process and the window, which says the first three -------------------------


class Listen(Message):
    """Where the server is to listen; the fields are those of `engine.serving.server.Address`."""

    host: str
    port: int
    key: str


class Rules(Message):
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


class FreeOthers(Message):
    """The window needs the memory: the model beside its own is freed, unless it is answering."""


Outcome = Literal["answered", "refused", "left", "failed"]


class Served(Message):
    """One request that is over.

    Attributes:
        began_s: since 1970.
        program: as it names itself.
        model: empty if the request was refused before that.
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


class Beside(Message):
    """The model beside the window's: its name, empty if there is none, and whether it is being loaded."""

    model: str
    is_loading: bool = False


class Wants(Message):
    """A program asks for the window's model, which was put aside, or for the room that it takes."""

    what: Literal["model", "room"]


class Listening(Message):
    """The server listens at this port; the engine finds it at `link`."""

    port: int
    link: str
    secret: str


class Embed(OfRequest):
    """Make vectors of texts, or of their tokens, with all dimensions or fewer.  Ends in `Vectors` or `Failed`."""

    model: Path
    texts: tuple[Any, ...]
    dimensions: int | None
    truncates: bool


class Vectors(OfRequest):
    """Terminal event of `Embed`: float32 in little-endian order, one vector behind the other, in base64."""

    packed: str
    tokens: int


# --- a job, the process that speaks to its Ray cluster, and the engine on each node ---------------


class OfNode(Message):
    """About the engine that was started on a node as its `life`th."""

    node: str
    life: int


class NodeCommand(OfNode):
    pass


class NodeEvent(OfNode):
    pass


class ClusterJob(Fields):
    """What a cluster is to run.

    Attributes:
        models: names and paths under which nodes may have the model, the likeliest first.
        digest: see `content_digest`; empty for that of the first node, which decides about an `auto` precision, too.
        job: its paths are of no use to nodes.
        sample: its first rows, each with the share of the input read so far.
    """

    models: tuple[str, ...]
    digest: str
    config: EngineConfig
    job: BatchJob
    sample: tuple[tuple[float, RowRequest], ...]


class StartNode(NodeCommand):
    """Start an engine there, which takes these of the node's processors and cards."""

    cpus: float
    gpus: float
    asked: ClusterJob


class GiveRows(NodeCommand):
    """More rows.  The number of each is its ticket here: a row that was asked twice has two answers."""

    rows: tuple[RowRequest, ...]


class DropRows(NodeCommand):
    """Others have answered the rows of these tickets: those that were not begun are left out."""

    tickets: tuple[int, ...]


class ClusterNode(Fields):
    """A node that is in the cluster; `ident` is Ray's."""

    ident: str
    name: str
    host: str
    cpus: float
    gpus: float
    memory: int


class ClusterNodes(Message):
    """All nodes, every two seconds: a sign of life, too.  A `Failed` says that the cluster cannot be used."""

    nodes: tuple[ClusterNode, ...]


class NodeDoes(NodeEvent):
    """What it does before it can answer rows, as what follows its name in a sentence."""

    what: str


class NodeReady(NodeEvent):
    """It answers rows from now on, `at_once` at the same time; its plan predicts `rows_per_s`, 0 if unknown."""

    digest: str
    precision: str
    at_once: int
    rows_per_s: float


class NodeAnswers(NodeEvent):
    """Answers, by their tickets, and what it has under way: rows, and the tokens generated for them."""

    answers: tuple[Answer, ...]
    under_way: tuple[int, int]


class NodeGone(NodeEvent):
    """It has ended: `why`, as the end of a sentence.  With `refuses` another one there would do no better."""

    why: str
    refuses: bool = False


ClusterEvent = ClusterNodes | NodeEvent | Failed


# --- the codec ------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One message as one line of JSON, newline included."""
    text = _ENCODER.encode({"type": type(message).__name__, **_known(message)})
    # A lone surrogate (half an emoji, say) is not valid UTF-8: replace it instead of breaking the stream.
    return text.encode("utf-8", errors="replace") + b"\n"


def _known(value: Any) -> Any:
    """What JSON knows in the place of a value; nothing is copied, as `asdict` would."""
    return {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_known)


def decode(line: bytes) -> Message:
    """The message on one line.

    Raises:
        EngineError: `PROTOCOL`, if the line is not a message of this version.
    """
    try:
        raw = json.loads(line)
        return typing.cast(Message, from_fields(MESSAGES[raw.pop("type")], raw))
    except EngineError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # Neither the line nor the error's text is quoted: both can contain user text.
        message = f"A line of {len(line)} bytes is not a message of this version ({type(error).__name__})."
        raise EngineError(ErrorCode.PROTOCOL, message) from None


def request_id_of(line: bytes) -> str | None:
    """The `request_id` on a line that `decode` rejected, if any: its sender needs a terminal event."""
    try:
        request_id = json.loads(line)["request_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return request_id if isinstance(request_id, str) else None


def node_of(line: bytes) -> tuple[str, int]:
    """The node and the life that a line is about, without reading all the rows on it."""
    raw = json.loads(line)
    return raw["node"], raw["life"]


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
