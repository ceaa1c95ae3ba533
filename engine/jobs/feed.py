"""Rows between the input and the executor: requests out, and outcomes or retries back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine.batch_files.fingerprint import RowCount
from engine.batch_files.rows import Answer, RowRequest
from engine.jobs.rows import Check, RowAnswer


@dataclass(frozen=True, slots=True)
class _UnderWay:
    asked: RowRequest
    tries: int


class Asking:
    """The rows in progress.

    Args:
        tries: how often to try a row whose sampled answer is cut before it satisfies its constraint.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
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

    def ask(self, asked: RowRequest) -> RowRequest:
        """Notes that a row is being asked."""
        self._under_way[asked.row] = _UnderWay(asked, tries=1)
        return asked

    def again(self) -> Iterator[RowRequest]:
        """The rows that need another try."""
        while self._again:
            last = self._again.popleft()
            sampling = last.asked.sampling
            # With the same seed the same tokens would be sampled again.
            seed = None if sampling.seed is None else sampling.seed + last.tries
            again = replace(last.asked, sampling=replace(sampling, seed=seed))
            self._under_way[again.row] = _UnderWay(again, last.tries + 1)
            yield again

    def ended(self, answer: RowAnswer) -> tuple[Answer, str] | None:
        """A row's outcome and the message it answers; None if the row is tried again, or was cancelled."""
        if answer.finish_reason == "cancelled":
            return None
        row = self._under_way.pop(answer.row)
        problem = ""
        if answer.error:
            problem = f"could not be answered: {answer.error}"
        elif not answer.is_complete:
            # This machine gives the same greedy answer every time; others need not.
            if (answer.by or not row.asked.sampling.is_greedy) and row.tries < self._tries:
                self._again.append(row)
                return None
            is_cut = answer.finish_reason == "length" or not answer.by
            cut = f"was cut after {answer.generated_tokens:,} tokens, before it was complete"
            problem = f"has an answer that {cut if is_cut else 'does not satisfy its schema or choices'}"
        ending = Answer(
            answer.row,
            answer.text,
            answer.finish_reason,
            answer.prompt_tokens,
            answer.generated_tokens,
            problem,
            answer.reasoning,
            answer.by,
            answer.tool_calls,
        )
        return ending, question_of(row.asked)


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

    def rows(self) -> Iterator[RowRequest]:
        """The rows to run next, continuing where the previous iterator stopped."""
        self.paused = False
        while not self._is_read or self._asking.waiting:
            yield from self._asking.again()
            if self._must_pause():
                self.paused = True
                return
            if not self._is_read:
                yield from self._next()

    def _next(self) -> Iterator[RowRequest]:
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
            yield self._asking.ask(asked)
