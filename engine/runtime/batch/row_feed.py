"""Rows on their way from the input to the executor: those without an ending, read as there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.batch_files.answer import Answer
from engine.batch_files.journal import Journal
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.row_count import RowCount
from engine.runtime.batch.asking import Asking, question_of
from engine.runtime.batch.request import BatchRequest, Check


class RowFeed:
    """The rows of one run of a job.

    Args:
        count: told how far the input has been read.
        keep: takes the endings of rows that are never asked, with the message that was to be answered.
        must_pause: asked for every row that is read: of a resumed job there may be a million before the next that is
            to be asked, and nobody shall wait for those.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        journal: Journal,
        asking: Asking,
        count: RowCount,
        keep: Callable[[Answer, str], None],
        must_pause: Check,
    ) -> None:
        self._asked = prepared.asked()
        self._journal, self._asking, self._count = journal, asking, count
        self._keep, self._must_pause = keep, must_pause
        self._read = 0
        self._is_read = False
        self.paused = False
        """Whether the last `rows` ended though there are more."""

    @property
    def is_over(self) -> bool:
        """Whether every row has been handed out or kept, and none is to be asked once more."""
        return self._is_read and not self._asking.waiting

    def rows(self) -> Iterator[BatchRequest]:
        """The rows that are to be run next, from where the last such iterator was left."""
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
        if self._journal.has(asked.row):
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
