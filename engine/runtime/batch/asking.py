"""What a row asks becomes what the executor runs; what comes of it becomes the row's ending, or another try."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.batch_files.answer import Answer, failed
from engine.batch_files.request import RowRequest
from engine.common.errors import EngineError
from engine.runtime.batch.request import BatchAnswer, BatchRequest
from engine.runtime.constrained import ConstrainedAnswer, ConstrainedAnswers


@dataclass(frozen=True, slots=True)
class _UnderWay:
    asked: RowRequest
    tries: int
    constraint: ConstrainedAnswer | None


class Asking:
    """The rows that are under way.

    Args:
        tries: how often a row is asked whose sampled answer was cut before it was what it had to be.
        make_constrained: what holds answers to schemas; called once, if a row needs it.
    """

    def __init__(self, tries: int, make_constrained: Callable[[], ConstrainedAnswers]) -> None:
        self._tries = tries
        self._make_constrained = make_constrained
        self._constrained: ConstrainedAnswers | None = None
        self._under_way: dict[int, _UnderWay] = {}
        self._again: deque[_UnderWay] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there are rows to be asked once more."""
        return bool(self._again)

    @property
    def under_way(self) -> int:
        """Rows that have been asked and have no ending yet."""
        return len(self._under_way) + len(self._again)

    def ask(self, asked: RowRequest) -> BatchRequest | Answer:
        """What to run, or the row's ending if it cannot be asked."""
        return self._ask(asked, tries=1)

    def again(self) -> Iterator[BatchRequest | Answer]:
        """The rows that are to be asked once more."""
        while self._again:
            last = self._again.popleft()
            sampling = last.asked.sampling
            # Another seed, or the same tokens would be drawn again.
            seed = None if sampling.seed is None else sampling.seed + last.tries
            yield self._ask(replace(last.asked, sampling=replace(sampling, seed=seed)), last.tries + 1)

    def ended(self, answer: BatchAnswer) -> tuple[Answer, str] | None:
        """A row's ending and the message that it answers; None if the row is asked once more, or was cancelled."""
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
            problem = f"has an answer that was cut after {answer.generated_tokens:,} tokens, before it fitted"
        ending = Answer(
            answer.row, answer.text, answer.finish_reason, answer.prompt_tokens, answer.generated_tokens, problem
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
        self._under_way[asked.row] = _UnderWay(asked, tries, constraint)
        return BatchRequest(asked.row, asked.messages, sampling=asked.sampling, constraint=constraint)


def question_of(asked: RowRequest) -> str:
    """The message that is answered."""
    return asked.messages[-1].content if asked.messages else ""
