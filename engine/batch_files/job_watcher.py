"""Who looks on while a job runs, and what has been done when it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.batch_files.answer import Answer
from engine.batch_files.pace import Pace
from engine.planner.batch_prediction import JobPrediction


def _nobody(_prediction: JobPrediction) -> None:
    """For callers that do not ask."""


@dataclass(frozen=True, slots=True)
class JobWatcher:
    """Who is told, and who is asked, while a job runs.

    Attributes:
        on_pace: told the progress, and why nothing goes on, if so.
        on_answer: told each answer, with the last message that was asked (empty if the row could not be asked).
        should_yield: whether somebody else has priority; `give_way` then returns when they are done.
        cancelled: whether to stop.
        on_plan: told how fast the job will be, before its first answer.
        patience_s: how long a full disk is waited for; None is until there is room, or the job is cancelled.
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
    """What has been done.

    Attributes:
        finished: every row has had its ending; else the job was cancelled and can be resumed.
        written: rows in the result file.
        tokens: generated in this run, those of answers that were tried again left out.
        computing_s: what this run took, without the time in which it waited: for chats, for files, for a full disk.
        note: a word about how rows were run, or where the result is if that is not where it was to be.
        output, errors: where the result is, and the failures of OpenAI requests; None of what was not written.
        unkept: answers that a full disk had no room for until the job was cancelled; a resumed job makes them again.
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
