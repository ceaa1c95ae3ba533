"""Continuous batching: rows join between sweeps through the layers, and leave as soon as they are answered."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.batch.request import AnswerCallback, Check, Outcome, PreparedRow
from engine.runtime.batch.row import PagedRow, PagePool
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


class ContinuousBatch:
    """Rows under way in one model; kept while somebody else has priority.

    Args:
        most_pages: for tests, fewer pages than the policy's bytes have room for.
    """

    def __init__(self, model: PackedModel, policy: BatchPolicy, most_pages: int | None = None) -> None:
        self._model, self._policy = model, policy
        pages = min(model.pages, most_pages or model.pages)
        model.allocate(pages)
        self.pool = PagePool(pages)
        self.rows: list[PagedRow] = []
        self._waiting: PreparedRow | None = None
        self._sweep: Generator[None, None, torch.Tensor] | None = None
        self._work: list[Work] = []
        self.most_rows = 0
        """Rows that have been under way together at most."""

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> Outcome:
        """Answers rows until there are no more; see `BatchExecutor.run`."""
        if RECORDER.on:
            RECORDER.begin_request()
        try:
            with self._model.threads():
                return self._run(prepared, on_row, should_yield, cancelled)
        finally:
            if RECORDER.on:
                RECORDER.end_request()

    def _run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> Outcome:
        while True:
            if self._sweep is None:
                self._admit(prepared, on_row)
                if not self.rows:
                    return Outcome.FINISHED
                self._work = self._next_work()
                self._sweep = self._model.sweep(self._work)
            outcome = self._go_on(on_row, should_yield, cancelled)
            if outcome is not None:
                return outcome

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep now, and the tokens that have been generated for them."""
        return len(self.rows), sum(len(row.sequence.ids) for row in self.rows)

    def time_parts(self) -> PartsTimer | None:
        """See `BatchExecutor.time_parts`."""
        return self._model.time_parts()

    def close(self) -> None:
        """Lets go of all rows and their pages."""
        if self._sweep is not None:
            self._sweep.close()
            self._sweep = None
        for row in self.rows:
            row.close()
        self.rows = []
        self._waiting = None

    def free(self) -> None:
        """As `close`, and the device has its memory back: no further run."""
        self.close()
        self._model.close()

    def _go_on(self, on_row: AnswerCallback, should_yield: Check, cancelled: Check) -> Outcome | None:
        """The sweep under way, to its end unless somebody wants it to stop between two layers."""
        assert self._sweep is not None
        while True:
            if cancelled():
                self.close()
                return Outcome.CANCELLED
            if should_yield():
                return Outcome.YIELDED
            try:
                next(self._sweep)
            except StopIteration as end:
                self._sweep = None
                self._take(end.value, on_row)
                return None
            except BaseException:
                # What was computed lies where the next try will write it again: no row has moved on.
                self._sweep = None
                raise

    def _admit(self, prepared: Iterator[PreparedRow], on_row: AnswerCallback) -> None:
        """New rows, in order, while there are pages for all that they may need."""
        while len(self.rows) < self._policy.rows:
            new = self._waiting or next(prepared, None)
            self._waiting = None
            if new is None:
                return
            needed = PagedRow.pages_needed(len(new.prompt), new.limits.max_tokens)
            if needed > self.pool.capacity:
                on_row(new.refused(_too_long(new, self.pool.capacity)))
            elif self.pool.reserve(needed):
                row = PagedRow(new.request, new.prompt, new.begin(), new.limits.max_tokens, self.pool)
                self.rows.append(row)
                self.most_rows = max(self.most_rows, len(self.rows))
            else:
                self._waiting = new
                return

    def _next_work(self) -> list[Work]:
        """Every row that decodes, and of those that read their prompts as many tokens as a sweep takes."""
        work, left = list[Work](), self._policy.sweep_tokens
        being_read: set[bytes] = set()
        for row in self.rows:
            if not row.is_reading:
                work.append(Work(row, 1))
                continue
            row.share_pages()
            if left <= 0 or row.following in being_read:
                continue  # another row is computing the very page that this one will share
            if row.following is not None:
                being_read.add(row.following)
            tokens = min(left, len(row.prompt) - row.held)
            work.append(Work(row, tokens))
            left -= tokens
        return work

    def _take(self, logits: torch.Tensor, on_row: AnswerCallback) -> None:
        """The sweep is over: each row that wants a token chooses it, and leaves if it was the last."""
        work, self._work = self._work, []
        choosing = [each.row for each in work if each.wants_logits]
        for each in work:
            each.row.has_read(each.tokens)
        tokens = _choose(choosing, logits)
        if RECORDER.on:
            RECORDER.phase(lanes.BATCH_STEP, sum(each.tokens for each in work))
        for row, token in zip(choosing, tokens, strict=True):
            _text, reason = row.sequence.take(token)
            if reason is not None:
                self.rows.remove(row)
                row.close()
                on_row(row.answer(reason))


def _choose(rows: list[PagedRow], logits: torch.Tensor) -> list[int]:
    """The next token of each row, from logits [R, V]."""
    # Numpy's argmax is vectorised, torch's is not.
    likeliest = logits.float().numpy().argmax(axis=-1).tolist() if rows else []
    return [
        token if row.sequence.is_greedy else int(row.sequence.choose(row_logits[None]))
        for row, row_logits, token in zip(rows, logits, likeliest, strict=True)
    ]


def _too_long(new: PreparedRow, pages: int) -> EngineError:
    return EngineError(
        ErrorCode.PROMPT_TOO_LONG,
        f"The row needs room for {len(new.prompt) + new.limits.max_tokens:,} tokens, but the batch has memory for "
        f"{pages * PAGE_TOKENS:,}: shorten it, lower the limit of tokens or allow more memory with --ram.",
    )
