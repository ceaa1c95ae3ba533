"""Callbacks of a running job, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.batch_files.answer import Answer
from engine.batch_files.pace import Pace
from engine.planner.batch_prediction import JobPrediction


def _nobody(_prediction: JobPrediction) -> None:
    """For callers that ignore predictions."""


@dataclass(frozen=True, slots=True)
class JobWatcher:
    """Callbacks of a running job.

    Attributes:
        on_pace: called with the progress, and the reason if the job is blocked.
        on_answer: called with each answer and its last user message (empty if the row was never sent).
        should_yield: whether a chat has priority; `give_way` then returns when it is done.
        cancelled: whether to stop.
        on_plan: called with the predicted speed before the first answer.
        patience_s: how long to wait while the disk is full; None: until there is room or the job is cancelled.
    """

    on_pace: Callable[[Pace, str], None]
    on_answer: Callable[[Answer, str], None]
    should_yield: Callable[[], bool]
    give_way: Callable[[], None]
    cancelled: Callable[[], bool]
    on_plan: Callable[[JobPrediction], None] = _nobody
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobEnding:
    """The outcome of a run of a job.

    Attributes:
        finished: all rows are complete; otherwise the job was cancelled and can be resumed.
        written: rows in the result file.
        tokens: generated in this run, without discarded attempts.
        computing_s: duration of this run, without waiting for chats, files or a full disk.
        note: a remark on how rows were run, or on the result's path if it differs from the requested one.
        output, errors: files of the result and of failed OpenAI requests; None if not written.
        unkept: answers lost because the disk was full until the job was cancelled; resuming generates them again.
    """

    finished: bool
    pace: Pace
    written: int
    tokens: int = 0
    computing_s: float = 0.0
    note: str = ""
    output: Path | None = None
    errors: Path | None = None
    unkept: int = 0
