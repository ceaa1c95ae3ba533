"""One who has the model alone takes part in sweeps of jobs as well.

Keys and values stay in the sequence's own cache, which is the fastest, and are in pages, too.  What is new in the one
is brought to the other when it is needed there: a few tokens at a time, and all of them once.
"""

from __future__ import annotations

from typing import Any

from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.kv.moving import append, can_move, move
from engine.runtime.schedule.alone import AloneAnswer
from engine.runtime.schedule.request import PreparedRow
from engine.runtime.schedule.row import PagedRow
from engine.runtime.schedule.together import ContinuousBatch

_MOST_BYTES = 256 * 2**20
"""Of keys and values that are brought to pages at once: nobody is answered meanwhile."""


class Loan:
    """The row of an answer that somebody else goes on with now and then.

    Args:
        ahead: tokens of an answer for which it reserves pages at a time.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._row: PagedRow | None = None
        self._of: ContinuousBatch | None = None

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended, and nobody has been told."""
        return self._row is not None and (self._row.over is not None or self._row.error is not None)

    def lend(self, answer: AloneAnswer, to: ContinuousBatch) -> PagedRow | None:
        """A row in these pages that goes on with the answer, if there can be one now; `bring_back` ends that."""
        row = self._row
        if row is not None and row.held + 1 == len(row.prompt) + len(row.sequence.ids):  # nobody else has gone on
            ready = not self.is_over and not row.request.cancelled() and row.reserve_next()
            return row if ready else None
        if self._of is not to:
            self.end()
        layers = to.model.layer_pages()

        def follow(asked: PreparedRow, sequence: AnswerSequence, cache: Any, tokens: int) -> PagedRow | None:
            row, most = self._row, _MOST_BYTES * PAGE_TOKENS // to.model.page_bytes
            new = tokens - (row.held if row is not None else 0)
            if not layers or new > most or asked.request.cancelled() or not can_move(cache, layers, tokens):
                return None
            if row is None:
                row = PagedRow(asked.request, asked.prompt, sequence, asked.limits.max_tokens, to.pool, self._ahead)
                self._row, self._of = row, to
            if row.follow(tokens, lambda pages, first: move(cache, layers, pages, tokens, first)):
                return row
            self.end()
            return None

        return answer.lend(follow)

    def bring_back(self, answer: AloneAnswer) -> None:
        """The answer goes on alone, behind what has been written for it meanwhile.

        Raises:
            EngineError: it has come to a bad end there.
            LookupError, MemoryError, RuntimeError: it cannot.
        """
        row, of = self._row, self._of
        if row is not None and row.error is not None:
            raise row.error
        if row is not None and of is not None:
            layers = of.model.layer_pages()
            answer.bring_back(row, lambda cache, first: append(cache, layers, row.pages, row.held, first))

    def end(self) -> None:
        """Returns the pages; what has not been brought back is lost."""
        row, self._row, self._of = self._row, None, None
        if row is not None:
            row.close()
