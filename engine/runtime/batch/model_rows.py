"""A job's rows as requests to a loaded model, and the model's answers as the job's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.rows import Answer, RowRequest, failed
from engine.common.falls import FALLS, passed_over
from engine.jobs.rows import BatchOutcome, Check, RowCallback
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import SequenceError, of_one
from engine.runtime.schedule.background import JobRows
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest

Elsewhere = Callable[[Exception], "ModelRows | None"]


def nowhere(_error: Exception) -> None:
    """Rows do not go on after an error."""


class ModelRows:
    """A `RowExecutor` over a loaded model.

    Args:
        executor: closed with this.
        make_constrained: creates what enforces schemas; called once, if a row needs it.
        elsewhere: told what went wrong; what rows go on with, or None if they do not.
    """

    def __init__(
        self,
        executor: BatchExecutor | JobRows,
        make_constrained: Callable[[], ConstrainedAnswers],
        elsewhere: Elsewhere = nowhere,
    ) -> None:
        self._executor, self._make_constrained, self._elsewhere = executor, make_constrained, elsewhere
        self._constrained: ConstrainedAnswers | None = None
        self._under_way: dict[int, tuple[RowRequest, ConstrainedAnswer | None]] = {}

    @property
    def note(self) -> str:
        """Of `BatchExecutor`, and what gave way."""
        return " ".join(filter(None, (self._executor.note, FALLS.note)))

    @property
    def under_way(self) -> tuple[int, int]:
        return self._executor.under_way

    @property
    def waits(self) -> str:
        """Nothing: a model that is there goes on."""
        return ""

    @property
    def places(self) -> tuple[PlacePace, ...]:
        """None but this machine."""
        return ()

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:

        def answered(answer: GenerationResult) -> None:
            on_row(self._answer(answer))

        while True:
            try:
                return self._executor.run(self._requests(rows, on_row), answered, should_yield, cancelled)
            except Exception as error:
                with passed_over("Rows of a job could not be given up"):  # the card that they are on may be gone
                    self._executor.close()
                if (other := self._elsewhere(error)) is None:
                    raise
                rows = chain([asked for asked, _ in self._under_way.values()], rows)
                self._under_way, self._constrained = {}, None
                self._executor, self._elsewhere = other._executor, other._elsewhere
                self._make_constrained = other._make_constrained

    def close(self) -> None:
        """Frees what the executor holds."""
        self._executor.close()

    def _requests(self, rows: Iterator[RowRequest], on_row: RowCallback) -> Iterator[BatchRequest]:
        for asked in rows:
            try:
                with of_one():
                    constraint = self._begun(asked)
            except SequenceError as error:
                on_row(failed(asked.row, error.message))
                continue
            self._under_way[asked.row] = asked, constraint
            yield BatchRequest(asked.row, asked.messages, sampling=asked.sampling, constraint=constraint, splits=True)

    def _begun(self, asked: RowRequest) -> ConstrainedAnswer | None:
        if asked.constraint is None:
            return None
        if self._constrained is None:
            self._constrained = self._make_constrained()
        return self._constrained.begin(asked.constraint)

    def _answer(self, answer: GenerationResult) -> Answer:
        _, constraint = self._under_way.pop(answer.row)
        error, is_complete = answer.error, False
        try:
            with of_one():
                is_complete = constraint is None or constraint.complete
        except SequenceError as unreadable:
            error = error or unreadable
        return Answer(
            answer.row,
            answer.text,
            answer.finish_reason if error is None else "failed",
            answer.prompt_tokens,
            answer.generated_tokens,
            error.message if error is not None else "",
            answer.reasoning,
            is_complete=is_complete,
        )
