"""What worker and window say to each other about batch jobs; part of `engine.protocol`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.config import BatchJob
from engine.planner.batch_prediction import JobPrediction

# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartBatch:
    """Answer a file of rows with the loaded model.  Ends in `BatchFinished` (also when stopped) or `Failed`.

    Chats that are asked meanwhile come first; a model that is to be loaded stops the job, which can be resumed.
    """

    request_id: str
    job: BatchJob


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Answer the first `rows` rows of a job and keep nothing.  Each comes as a `BatchRows`; ends in `BatchFinished`."""

    request_id: str
    job: BatchJob
    rows: int


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a job is; see `engine.batch_files.pace.Pace`.

    Attributes:
        total: rows in all; -1 while nobody knows.
        remaining_low_s, remaining_high_s: seconds until the end; -1 while there is nothing to tell by.
        blocked: why nothing goes on, as a sentence; empty if it does.
        under_way: rows that share each sweep through the weights now.
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


@dataclass(frozen=True, slots=True)
class BatchPlanned:
    """How a job is going to be run, before its first answer; after a sample, with what the sample has shown.

    See `engine.planner.batch_prediction.JobPrediction`.

    Attributes:
        rows_together: rows that share each weight load.
        micro_batches: pieces in which they go through a layer.
        schedule: the order of a layer's work on a card; empty on the CPU.
        rows: in all, as the beginning of the input lets expect.
        tokens_per_row: that answers were assumed to have.
        tokens_per_s_low, tokens_per_s_high: generated.
        seconds_low, seconds_high: for all rows.
        bottleneck: `arithmetic`, `weights`, `attention`, `disk`, `link` or `card`.
        is_measured: whether answers of this job have been timed for it.
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
        """What was predicted, as a message."""
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
    """A row that has ended.

    Attributes:
        row: its index in the input.
        prompt, answer: their beginnings, for people to look at; all of it is in the journal.
        finish_reason, generated_tokens, problem: see `engine.batch_files.answer.Answer`.
    """

    row: int
    prompt: str
    answer: str
    finish_reason: str
    generated_tokens: int
    problem: str


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows that have ended since the last such event; of a fast job only the latest."""

    request_id: str
    rows: tuple[BatchRow, ...]


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """Terminal event of `StartBatch` and `SampleBatch`.

    Attributes:
        finished: whether every row has had its ending; else the job was stopped and can be resumed.
        done, failed: rows that have ended in all runs of the job, and those of them that failed.
        written: rows in the output.
        tokens: generated in this run, in `seconds` of computing.
        note: a word about how rows were run, or where the result is if that is not where it was to be.
        output, errors: where the result is, and the failures of OpenAI requests; empty where nothing was written.
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
