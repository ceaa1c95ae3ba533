"""Stands for model and window in tests of jobs: answers at once in any order, looks on, and comes first when told."""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, PlacePace
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob
from engine.jobs.job import JobRun
from engine.jobs.rows import BatchOutcome, Check, RowCallback


class ShuffledExecutor:
    """Says the question in capitals; holds some rows at a time, ends them in any order, yields when asked.

    Args:
        cut: rows whose answers are cut by their limit of tokens, so many times.
    """

    def __init__(self, seed: int = 0, room: int = 5, cut: dict[int, int] | None = None) -> None:
        self._chance = random.Random(seed)
        self._room = room
        self._cut = dict(cut or {})
        self._held: list[RowRequest] = []
        self.asked: list[tuple[int, int | None]] = []

    @property
    def under_way(self) -> tuple[int, int]:
        return len(self._held), 0

    @property
    def waits(self) -> str:
        return ""

    @property
    def places(self) -> tuple[PlacePace, ...]:
        return ()

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        while True:
            while len(self._held) < self._room and (request := next(rows, None)) is not None:
                self._held.append(request)
                self.asked.append((request.row, request.sampling.seed))
            if not self._held:
                return BatchOutcome.FINISHED
            if cancelled():
                for request in self._held:
                    on_row(Answer(request.row, "", "cancelled"))
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            request = self._held.pop(self._chance.randrange(len(self._held)))
            on_row(self._answer(request))

    def _answer(self, request: RowRequest) -> Answer:
        question = request.messages[-1].content
        if "too long" in question:
            return Answer(request.row, "", "failed", problem="The prompt is too long.")
        is_cut = bool(self._cut.get(request.row))
        if request.constraint is not None and not is_cut:
            return Answer(request.row, "yes", "stop", 3, 2)
        self._cut[request.row] = self._cut.get(request.row, 1) - 1
        return Answer(request.row, question.upper(), "length", 3, 2, is_complete=request.constraint is None)


class Watch:
    """A window that looks on; `interrupt` says how often somebody else comes first."""

    def __init__(self, yields: int = 0, cancel_after: int | None = None) -> None:
        self.paces: list[tuple[Pace, str]] = []
        self.answers: list[tuple[Answer, str]] = []
        self._yields = yields
        self._cancel_after = cancel_after
        self.gave_way = 0

    def watcher(self) -> JobWatcher:
        return JobWatcher(
            on_pace=lambda pace, blocked: self.paces.append((pace, blocked)),
            on_answer=lambda answer, question: self.answers.append((answer, question)),
            should_yield=lambda: self.gave_way < self._yields,
            give_way=self._give_way,
            cancelled=lambda: self._cancel_after is not None and len(self.answers) >= self._cancel_after,
        )

    def _give_way(self) -> None:
        self.gave_way += 1


def write_rows(path: Path, count: int) -> None:
    """Rows to be answered; the fourth has no text, the sixth is too long."""
    special = {3: "", 5: "too long"}
    path.write_text("".join(json.dumps({"text": special.get(i, f"row {i}"), "id": i}) + "\n" for i in range(count)))


def run_job(job: BatchJob, executor: ShuffledExecutor, watch: Watch) -> JobEnding:
    """One run of a job, as the engine does it."""
    prepared = prepare(job)
    manifest = prepared.manifest("model", "bf16")
    with closing(prepared.open_journal(manifest, "tiny")) as journal:
        return JobRun(prepared, manifest, journal, executor, watch.watcher()).run()


def results_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file."""
    return [dict(row.fields) for row in open_source(path).rows()]
