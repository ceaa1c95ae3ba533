"""A batch job, as the window represents it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.journal import journal_path
from engine.batch_files.messages import BatchPlanned
from engine.common.config import HERE, BatchJob


class JobState(Enum):
    """A job's state."""

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
"""It has unanswered rows, and is not running."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job.  There is one per output, as there is one journal.

    Attributes:
        key: the name of its journal.
        job: as it will be started next.
        created_s: seconds since 1970.
        model: name of the model that answers it; empty before it has run.
        done, failed, cut_off: finished rows, how many of them failed, and how many ended at their limit of tokens.
        total: all rows; None while unknown.
        tokens_per_s: recent rate; 0 while unknown.
        ends_low_s, ends_high_s: expected end, seconds since 1970; None while unknown.
        plan: the plan at its last start; None if there was none.
        under_way: rows that currently share each sweep through the weights; 0 while unknown.
        beside_chat: it runs, but shares the engine with a chat.
        beside_jobs: how many other jobs share it, too.
        turn: its place in the queue, 1 for the next; 0 if it is not queued.
        ran_tokens, ran_s: tokens generated in the last run, and its seconds.
        blocked: why it runs without making progress, as a sentence.
        reason: why it does not run, as a sentence; empty if the user paused it.
        note: a remark about how its rows were run, or where its result is.
        result, errors: paths of the result, and of failed OpenAI requests; empty while unknown.
        places: where its rows are answered, if not on this PC alone.
        begun_model, begun_precision: path of the model and precision of its existing answers; empty without any.
    """

    key: str
    job: BatchJob
    state: JobState
    created_s: float
    model: str = ""
    done: int = 0
    failed: int = 0
    cut_off: int = 0
    total: int | None = None
    tokens_per_s: float = 0.0
    ends_low_s: float | None = None
    ends_high_s: float | None = None
    plan: BatchPlanned | None = None
    under_way: int = 0
    beside_chat: bool = False
    beside_jobs: int = 0
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
    places: tuple[PlacePace, ...] = ()

    @property
    def needs_model(self) -> bool:
        """Whether this PC's model answers its rows, or some of them."""
        return not self.job.is_remote or HERE in self.job.endpoints

    @property
    def input(self) -> Path:
        return Path(self.job.input)

    @property
    def output(self) -> Path:
        return Path(self.job.output)

    @property
    def result_file(self) -> Path:
        """Where its result is or will be: beside the output, if that name is taken by another file."""
        return Path(self.result) if self.result else self.output

    @property
    def journal(self) -> Path:
        return journal_path(self.output)

    @property
    def share(self) -> float | None:
        """Its progress, 0 to 1; None while unknown."""
        if self.state is JobState.FINISHED:
            return 1.0
        return min(1.0, self.done / self.total) if self.total else None


def key_of(output: str) -> str:
    return journal_path(Path(output)).name
