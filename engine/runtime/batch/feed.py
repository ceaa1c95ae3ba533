"""Rows between the input and the executor: requests out, and outcomes or retries back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.batch_files.fingerprint import RowCount
from engine.batch_files.rows import Answer, RowRequest, failed
from engine.common.errors import EngineError
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.split_answer import SplitAnswer
from engine.runtime.schedule.request import BatchAnswer, BatchRequest, Check


@dataclass(frozen=True, slots=True)
class _UnderWay:
    asked: RowRequest
    tries: int
    constraint: ConstrainedAnswer | None
    split: SplitAnswer


class Asking:
    """The rows in progress.

    Args:
        tries: how often to try a row whose sampled answer is cut before it satisfies its constraint.
        make_constrained: creates what enforces schemas; called once, if a row needs it.
        family: the model's, whose answers are told apart from its reasoning.
    """

    def __init__(self, tries: int, make_constrained: Callable[[], ConstrainedAnswers], family: str = "") -> None:
        self._tries, self._family = tries, family
        self._make_constrained = make_constrained
        self._constrained: ConstrainedAnswers | None = None
        self._under_way: dict[int, _UnderWay] = {}
        self._again: deque[_UnderWay] = deque()

    @property
    def waiting(self) -> bool:
        """Whether rows are waiting for another try."""
        return bool(self._again)

    @property
    def under_way(self) -> int:
        """Rows that were requested and have no outcome yet."""
        return len(self._under_way) + len(self._again)

    def ask(self, asked: RowRequest) -> BatchRequest | Answer:
        """The request to run, or the row's outcome if it is invalid."""
        return self._ask(asked, tries=1)

    def again(self) -> Iterator[BatchRequest | Answer]:
        """Requests for the rows that need another try."""
        while self._again:
            last = self._again.popleft()
            sampling = last.asked.sampling
            # With the same seed the same tokens would be sampled again.
            seed = None if sampling.seed is None else sampling.seed + last.tries
            yield self._ask(replace(last.asked, sampling=replace(sampling, seed=seed)), last.tries + 1)

    def ended(self, answer: BatchAnswer) -> tuple[Answer, str] | None:
        """A row's outcome and the message it answers; None if the row is tried again, or was cancelled."""
        if answer.finish_reason == "cancelled":
            return None
        row = self._under_way.pop(answer.row)
        problem = ""
        if answer.error is not None:
            problem = f"could not be answered: {answer.error.message}"
        elif row.constraint is not None and not row.constraint.complete:
            if row.asked.sampling.temperature > 0 and row.tries < self._tries:
                self._again.append(row)
                return None
            problem = f"has an answer that was cut after {answer.generated_tokens:,} tokens, before it was complete"
        row.split.take(answer.text, answer.generated_tokens)
        row.split.end()
        ending = Answer(
            answer.row,
            row.split.text,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.generated_tokens,
            problem,
            row.split.reasoning,
        )
        return ending, question_of(row.asked)

    def _ask(self, asked: RowRequest, tries: int) -> BatchRequest | Answer:
        constraint = None
        if asked.constraint is not None:
            try:
                if self._constrained is None:
                    self._constrained = self._make_constrained()
                constraint = self._constrained.begin(asked.constraint)
            except EngineError as error:
                return failed(asked.row, f"cannot be answered: {error.message}")
        split = SplitAnswer(self._family)
        self._under_way[asked.row] = _UnderWay(asked, tries, constraint, split)
        return BatchRequest(
            asked.row, asked.messages, sampling=asked.sampling, constraint=constraint, on_prepared=split.begin
        )


def question_of(asked: RowRequest) -> str:
    """The message to answer."""
    return asked.messages[-1].content if asked.messages else ""


class RowFeed:
    """The rows of one run of a job.

    Args:
        asked: rows, each with the share of the input read so far, 0 to 1.
        has_ending: whether the row of this number is done already and skipped.
        count: records how far the input has been read.
        keep: takes outcomes of rows that never reach the executor, with the message to answer.
        must_pause: called for every row read: a resumed job may have to skip a million rows before the next one to run,
            and a chat must not wait for that.
    """

    def __init__(
        self,
        asked: Iterator[tuple[float, RowRequest | Answer]],
        has_ending: Callable[[int], bool],
        asking: Asking,
        count: RowCount,
        keep: Callable[[Answer, str], None],
        must_pause: Check,
    ) -> None:
        self._asked, self._has_ending = asked, has_ending
        self._asking, self._count = asking, count
        self._keep, self._must_pause = keep, must_pause
        self._read = 0
        self._is_read = False
        self.paused = False
        """Whether the last `rows` stopped before its end."""

    @property
    def is_over(self) -> bool:
        """Whether every row has been handed out or kept, and none needs another try."""
        return self._is_read and not self._asking.waiting

    def rows(self) -> Iterator[BatchRequest]:
        """The rows to run next, continuing where the previous iterator stopped."""
        self.paused = False
        while not self._is_read or self._asking.waiting:
            for again in self._asking.again():
                yield from self._runnable(again, "")
            if self._must_pause():
                self.paused = True
                return
            if not self._is_read:
                yield from self._next()

    def _next(self) -> Iterator[BatchRequest]:
        entry = next(self._asked, None)
        if entry is None:
            self._is_read = True
            self._count.ended(self._read)
            return
        share, asked = entry
        self._read += 1
        self._count.read(self._read, share)
        if self._has_ending(asked.row):
            return
        if isinstance(asked, Answer):
            self._keep(asked, "")
        else:
            yield from self._runnable(self._asking.ask(asked), question_of(asked))

    def _runnable(self, request: BatchRequest | Answer, question: str) -> Iterator[BatchRequest]:
        if isinstance(request, Answer):
            self._keep(request, question)
        else:
            yield request
