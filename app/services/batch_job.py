"""A batch job, as the window represents it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.journal import Ended, KnownJob, journal_path, known_jobs, read_answers
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import HERE, BatchJob, SamplingParams
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.paths import jobs_dir
from engine.planner.batch_prediction import JobPrediction
from engine.protocol import BatchRow

translate = QCoreApplication.translate


PAGE_ROWS = 200
_MOST_CHARACTERS = 400


class JobAnswers:
    """Pages of one job's answers.  Slow: for background threads, one call at a time.

    Prompts come from the input, which is read sequentially from page to page; they are empty if it cannot be read.
    """

    def __init__(self, entry: JobEntry) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        self._asked: Iterator[tuple[int, str]] = iter(())
        self._next = -1

    def page(self, after: int, *, ended: Ended = "any", limit: int = PAGE_ROWS) -> list[BatchRow]:
        with self._lock:
            answers = read_answers(self._entry.journal, after=after, limit=limit, ended=ended)
            return [_row(answer, self._prompt(answer.row), _MOST_CHARACTERS) for answer in answers]

    def whole(self, row: int) -> BatchRow | None:
        with self._lock:
            answers = read_answers(self._entry.journal, after=row - 1, limit=1)
            if not answers or answers[0].row != row:
                return None
            return _row(answers[0], self._prompt(row))

    def _prompt(self, row: int) -> str:
        if self._next < 0 or self._next > row:
            self._asked, self._next = _prompts(self._entry), 0
        try:
            for index, prompt in self._asked:
                self._next = index + 1
                if index == row:
                    return prompt
        except (EngineError, OSError):
            pass
        self._next = row + 1
        return ""


def _prompts(entry: JobEntry) -> Iterator[tuple[int, str]]:
    prepared = prepare(replace(entry.job, start="resume"))
    for _share, asked in prepared.asked():
        yield asked.row, asked.messages[-1].content if isinstance(asked, RowRequest) else ""


def _row(answer: Answer, prompt: str, most: int | None = None) -> BatchRow:
    asked, text, thought = (each[:most] for each in (prompt, answer.shown, answer.reasoning))
    return BatchRow(answer.row, asked, text, answer.finish_reason, answer.generated_tokens, answer.problem, thought)


def save_jobs(entries: Iterable[JobEntry]) -> None:
    """Saves what journals do not contain."""
    content = [
        {
            "job": asdict(entry.job),
            "state": entry.state.value,
            "created_s": entry.created_s,
            "model": entry.model,
            "total": entry.total,
            "reason": entry.reason,
        }
        for entry in entries
    ]
    write_private(_path(), json.dumps({"jobs": content}, ensure_ascii=False, indent=1))


def load_jobs() -> list[JobEntry]:
    """All jobs, newest first; slow with many journals: not for the GUI thread."""
    noted = {entry.key: entry for entry in _noted()}
    entries: dict[str, JobEntry] = {}
    for known in known_jobs():
        entry = _from_journal(known, noted.get(known.journal.name))
        if entry is not None:
            entries[entry.key] = entry
    for key, entry in noted.items():
        entries.setdefault(key, _at_rest(entry))
    return sorted(entries.values(), key=lambda entry: -entry.created_s)


def job_of(values: Any) -> BatchJob | None:
    if not isinstance(values, Mapping):
        return None
    try:
        sampling = dict(values.get("sampling") or {})
        sampling["stop"] = tuple(sampling.get("stop") or ())
        fields = {**values, "sampling": SamplingParams(**sampling), "choices": tuple(values.get("choices") or ())}
        fields["endpoints"] = tuple(values.get("endpoints") or ())
        return BatchJob(**fields)
    except (TypeError, ValueError, EngineError):
        return None


def _from_journal(known: KnownJob, noted: JobEntry | None) -> JobEntry | None:
    job = job_of(known.settings.get("job"))
    if job is None or key_of(job.output) != known.journal.name:
        return None
    entry = JobEntry(
        key=known.journal.name,
        job=replace(job, start="resume"),
        state=JobState.PAUSED,
        created_s=known.begun_s if noted is None else noted.created_s,
        model=str(known.settings.get("model", "")),
        done=known.done,
        failed=known.failed,
        cut_off=known.cut_off,
        result=known.output,
        errors=known.errors,
        begun_model=str(known.settings.get("model", "")) if known.kept else "",
        begun_precision=known.precision if known.kept else "",
    )
    if known.running:
        return replace(entry, state=JobState.ELSEWHERE, total=noted.total if noted else None)
    if known.finished_s is not None:
        return replace(entry, state=JobState.FINISHED, total=known.done)
    if noted is None:
        return entry
    rested = _at_rest(noted)
    return replace(entry, state=rested.state, reason=rested.reason, total=noted.total)


def _at_rest(entry: JobEntry) -> JobEntry:
    """The job's state when a window opens: none starts automatically."""
    if entry.state not in _WAS_WAITING:
        return entry
    if entry.state is JobState.QUEUED:
        reason = translate("BatchJobs", "Switchyard was closed before the job started.")
    else:
        reason = translate("BatchJobs", "Switchyard was closed while the job ran; no answered row is lost.")
    return replace(entry, state=JobState.PAUSED, reason=reason)


def _noted() -> list[JobEntry]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        listed = content["jobs"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [entry for values in listed if (entry := _entry(values)) is not None] if isinstance(listed, list) else []


def _entry(values: Any) -> JobEntry | None:
    job = job_of(values.get("job")) if isinstance(values, Mapping) else None
    if job is None:
        return None
    total = values.get("total")
    try:
        return JobEntry(
            key=key_of(job.output),
            job=job,
            state=JobState(values.get("state")),
            created_s=float(values.get("created_s", 0.0)),
            model=str(values.get("model", "")),
            total=total if isinstance(total, int) else None,
            reason=str(values.get("reason", "")),
        )
    except (ValueError, TypeError):
        return None


def _path() -> Path:
    return jobs_dir() / "window.json"


class JobState(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    ELSEWHERE = "elsewhere"


_WAS_WAITING = frozenset({JobState.QUEUED, JobState.RUNNING, JobState.STOPPING, JobState.ELSEWHERE})


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
    plan: JobPrediction | None = None
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
        if self.state is JobState.FINISHED:
            return 1.0
        return min(1.0, self.done / self.total) if self.total else None


def key_of(output: str) -> str:
    return journal_path(Path(output)).name
