"""What worker and window say to each other about batch jobs; part of `engine.protocol`."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import BatchJob

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
        tokens: generated in this run, in `seconds`.
        note: a word about how rows were run, if there is one.
    """

    request_id: str
    finished: bool
    done: int
    failed: int
    written: int
    tokens: int
    seconds: float
    note: str
