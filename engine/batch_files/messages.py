"""What worker and window say to each other about batch jobs; part of `engine.protocol`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.batch_files.job_watcher import PlacePace
from engine.common.config import BatchJob, EngineConfig
from engine.planner.batch_prediction import JobPrediction

# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndpointKey:
    """The key of the endpoint of this name."""

    name: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Answer a file of rows with the loaded model.  Ends in `BatchFinished` (even if stopped) or `Failed`.

    Chats take priority; loading another model stops the job, which can be resumed.  A job that names endpoints is
    answered by them; the loaded model matters only if it is one of them.

    Attributes:
        keys: of endpoints, where nothing else keeps them.
        config: of the engine on each node, if a Ray cluster answers.
    """

    request_id: str
    job: BatchJob
    keys: tuple[EndpointKey, ...] = ()
    config: EngineConfig | None = None


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Answer the first `rows` rows of a job and save nothing.  Each comes as a `BatchRows`; ends in `BatchFinished`.

    A job that names endpoints is tried at those, and `BatchSampled` says what that took.  That of a Ray cluster is
    tried with the loaded model: it is the same one.
    """

    request_id: str
    job: BatchJob
    rows: int
    keys: tuple[EndpointKey, ...] = ()


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Progress of a job; see `engine.batch_files.job_watcher.Pace`.

    Attributes:
        total: total rows; -1 while unknown.
        remaining_low_s, remaining_high_s: seconds until the end; -1 while unknown.
        cut_off: completed rows whose answers ended at their limit of tokens; some may have failed for that.
        blocked: why the job is blocked, as a sentence; empty if it is not.
        under_way: rows that currently share each sweep over the weights.
        places: where rows are answered, if not on this machine alone.
    """

    request_id: str
    done: int
    failed: int
    total: int
    tokens_per_s: float
    remaining_low_s: float
    remaining_high_s: float
    blocked: str
    under_way: int = 0
    places: tuple[PlacePace, ...] = ()
    cut_off: int = 0


@dataclass(frozen=True, slots=True)
class BatchSampled:
    """What a sample at endpoints says of the whole job; see `engine.remote.job.RemoteSample`."""

    request_id: str
    rows: int
    prompt_tokens: float
    generated_tokens: float
    row_s: float
    cost: float | None
    currency: str


@dataclass(frozen=True, slots=True)
class BatchPlanned:
    """How a job will run, before its first answer; after a sample, corrected by its timing.

    See `engine.planner.batch_prediction.JobPrediction`.

    Attributes:
        rows_together: rows that share each weight load.
        micro_batches: chunks in which they pass a layer.
        schedule: the order of a layer's work on a card; empty on the CPU.
        rows: total, extrapolated from the beginning of the input.
        tokens_per_row: assumed tokens per answer.
        tokens_per_s_low, tokens_per_s_high: generated.
        seconds_low, seconds_high: for all rows.
        bottleneck: `arithmetic`, `weights`, `attention`, `disk`, `link` or `card`.
        is_measured: whether it is based on timed answers of this job.
    """

    request_id: str
    rows_together: int
    micro_batches: int
    schedule: str
    rows: int
    tokens_per_row: float
    tokens_per_s_low: float
    tokens_per_s_high: float
    seconds_low: float
    seconds_high: float
    bottleneck: str
    is_measured: bool

    @classmethod
    def of(cls, request_id: str, prediction: JobPrediction) -> BatchPlanned:
        """The prediction as a message."""
        return cls(
            request_id=request_id,
            rows_together=prediction.rows_together,
            micro_batches=prediction.micro_batches,
            schedule=prediction.schedule,
            rows=prediction.job.rows,
            tokens_per_row=prediction.job.generated_tokens,
            tokens_per_s_low=prediction.low,
            tokens_per_s_high=prediction.high,
            seconds_low=prediction.seconds_low,
            seconds_high=prediction.seconds_high,
            bottleneck=str(prediction.bottleneck),
            is_measured=prediction.is_measured,
        )


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
class BatchRows:
    """Rows completed since the previous such event; for fast jobs only the latest."""

    request_id: str
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """Terminal event of `StartBatch` and `SampleBatch`.

    Attributes:
        finished: whether all rows are complete; otherwise the job was stopped and can be resumed.
        done, failed, cut_off: rows completed in all runs of the job; see `BatchProgress`.
        written: rows in the output.
        tokens: generated in this run, in `seconds` of computing.
        note: a remark on how rows were run, or on the result's path if it differs from the requested one.
        output, errors: files of the result and of failed OpenAI requests; empty if not written.
    """

    request_id: str
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
