"""What worker and window say to each other about batch jobs; part of `engine.protocol`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch_files.job_watcher import Pace
from engine.common.config import BatchJob, EngineConfig
from engine.common.json_fields import OfRequest
from engine.planner.batch_prediction import JobPrediction

# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndpointKey:
    """The key of the endpoint of this name."""

    name: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartBatch(OfRequest):
    """Answer a file of rows with the loaded model.  Ends in `BatchFinished` (even if stopped) or `Failed`.

    Chats take priority; loading another model stops the job, which can be resumed.  A job that names endpoints is
    answered by them; the loaded model matters only if it is one of them.

    Attributes:
        keys: of endpoints, where nothing else keeps them.
        config: of the engine on each node, if a Ray cluster answers.
    """

    job: BatchJob
    keys: tuple[EndpointKey, ...] = ()
    config: EngineConfig | None = None


@dataclass(frozen=True, slots=True)
class SampleBatch(OfRequest):
    """Answer the first `rows` rows of a job and save nothing.  Each comes as a `BatchRows`; ends in `BatchFinished`.

    A job that names endpoints is tried at those, and `BatchSampled` says what that took.  That of a Ray cluster is
    tried with the loaded model: it is the same one.
    """

    job: BatchJob
    rows: int
    keys: tuple[EndpointKey, ...] = ()


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchProgress(OfRequest):
    """Progress of a job; `blocked` says why it is, as a sentence, and is empty if it is not."""

    pace: Pace
    blocked: str = ""


@dataclass(frozen=True, slots=True)
class BatchSampled(OfRequest):
    """What a sample at endpoints says of the whole job; see `engine.remote.job.RemoteSample`."""

    rows: int
    prompt_tokens: float
    generated_tokens: float
    row_s: float
    cost: float | None
    currency: str


@dataclass(frozen=True, slots=True)
class BatchPlanned(OfRequest):
    """How a job will run, before its first answer; after a sample, corrected by its timing."""

    prediction: JobPrediction


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A completed row.

    Attributes:
        row: its index in the input.
        prompt, answer, reasoning: their beginnings, for display; the journal has the whole text.
        finish_reason, generated_tokens, problem: see `engine.batch_files.rows.Answer`.
    """

    row: int
    prompt: str
    answer: str
    finish_reason: str
    generated_tokens: int
    problem: str
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class BatchRows(OfRequest):
    """Rows completed since the previous such event; for fast jobs only the latest."""

    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class BatchFinished(OfRequest):
    """Terminal event of `StartBatch` and `SampleBatch`.

    Attributes:
        finished: whether all rows are complete; otherwise the job was stopped and can be resumed.
        done, failed, cut_off: rows completed in all runs of the job; see `Pace`.
        written: rows in the output.
        tokens: generated in this run, in `seconds` of computing.
        note: a remark on how rows were run, or on the result's path if it differs from the requested one.
        output, errors: files of the result and of failed OpenAI requests; empty if not written.
    """

    finished: bool
    done: int
    failed: int
    written: int
    tokens: int
    seconds: float
    note: str
    output: str = ""
    errors: str = ""
    cut_off: int = 0
