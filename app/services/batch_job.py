"""A batch job as the window knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.batch_files.journal import journal_path
from engine.batch_files.messages import BatchPlanned
from engine.common.config import BatchJob


class JobState(Enum):
    """What a job is doing."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    ELSEWHERE = "elsewhere"


UNDER_WAY = frozenset({JobState.RUNNING, JobState.STOPPING})
"""The engine works on it."""

RESUMABLE = frozenset({JobState.PAUSED, JobState.STOPPED, JobState.FAILED})
"""It has rows that are not answered, and nobody works on it."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job.  There is one for every output, as there is one journal.

    Attributes:
        key: the name of its journal.
        job: as it is to be started next.
        created_s: seconds since 1970.
        model: name of the model that answers it; empty before it has run.
        done, failed: rows that have ended, and those of them that failed.
        total: rows in all; None while nobody knows.
        tokens_per_s: generated lately; 0 while there is nothing to tell by.
        ends_low_s, ends_high_s: when it will be done, seconds since 1970; None while there is nothing to tell by.
        plan: how it was going to be run when it last began; None where that was not said.
        under_way: rows that share each sweep through the weights now; 0 while nobody knows.
        gives_way: it runs, and waits while a chat is answered.
        turn: its place in the queue, 1 for the next; 0 if it does not wait.
        ran_tokens, ran_s: what was generated in the last run, and the seconds that it took.
        blocked: why nothing goes on though it runs, as a sentence.
        reason: why it does not run, as a sentence; empty if the user wished so.
        note: a word about how its rows were run, or where its result is.
        result, errors: where the result is, and the failures of OpenAI requests; empty where that is not known.
        begun_model, begun_precision: path of the model and precision that its answers were made with; empty without
            answers.
    """

    key: str
    job: BatchJob
    state: JobState
    created_s: float
    model: str = ""
    done: int = 0
    failed: int = 0
    total: int | None = None
    tokens_per_s: float = 0.0
    ends_low_s: float | None = None
    ends_high_s: float | None = None
    plan: BatchPlanned | None = None
    under_way: int = 0
    gives_way: bool = False
    turn: int = 0
    ran_tokens: int = 0
    ran_s: float = 0.0
    blocked: str = ""
    reason: str = ""
    note: str = ""
    result: str = ""
    errors: str = ""
    begun_model: str = ""
    begun_precision: str = ""

    @property
    def input(self) -> Path:
        return Path(self.job.input)

    @property
    def output(self) -> Path:
        return Path(self.job.output)

    @property
    def result_file(self) -> Path:
        """Where its result is, or will be: beside the output, if a file of somebody else was in the way."""
        return Path(self.result) if self.result else self.output

    @property
    def journal(self) -> Path:
        return journal_path(self.output)

    @property
    def share(self) -> float | None:
        """How much of it is done, 0 to 1; None while nobody knows."""
        if self.state is JobState.FINISHED:
            return 1.0
        return min(1.0, self.done / self.total) if self.total else None


def key_of(output: str) -> str:
    """The key of the job with this output."""
    return journal_path(Path(output)).name
