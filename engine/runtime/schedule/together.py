"""Sequences that share every sweep through the layers: they join between sweeps, and leave once they are answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.kept.prefixes import KeptPrefixes
from engine.runtime.schedule.moving import can_move, move, move_back
from engine.runtime.schedule.request import AnswerCallback, BatchOutcome, Check, PreparedRow, never
from engine.runtime.schedule.row import PagedRow, PagePool
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


class ContinuousBatch:
    """Rows in progress in one model; kept while another request has priority.

    Args:
        most_pages: for tests, a page limit below what the policy's bytes allow.
        kept: where the beginnings of prompts are found.
        keeps: whether what rows leave is kept there too.
    """

    def __init__(
        self,
        model: PackedModel,
        policy: BatchPolicy,
        most_pages: int | None = None,
        *,
        kept: KeptPrefixes | None = None,
        keeps: bool = False,
    ) -> None:
        self._model, self._policy = model, policy
        # With a window of its own a row holds other values than a chat.
        self._kept = kept if not policy.window else None
        self._keeps = keeps
        pages = min(model.pages, most_pages or model.pages)
        model.allocate(pages)
        self.pool = PagePool(pages)
        self.rows: list[PagedRow] = []
        self._waiting: PreparedRow | None = None
        self._aside: deque[PagedRow] = deque()
        """Rows that gave up their pages for older ones, the oldest first."""
        self._sweep: Generator[None, None, torch.Tensor] | None = None
        self._work: list[Work] = []
        self._request = 0
        self.most_rows = 0
        """Most rows in progress at the same time so far."""

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """Answers rows until there are no more; see `BatchExecutor.run`."""
        with self._recorded(), self._model.threads():
            while self._is_sweeping(prepared, on_row):
                outcome = self._continue(on_row, should_yield, cancelled)
                if outcome is not None:
                    return outcome
        return BatchOutcome.FINISHED

    def sweep(self, prepared: Iterator[PreparedRow], on_row: AnswerCallback) -> None:
        """Admits rows and takes all of them through the layers once."""
        with self._recorded(), self._model.threads():
            if self._is_sweeping(prepared, on_row):
                self._continue(on_row, never, never)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """What is recorded inside belongs to these rows, as long as there are any."""
        if RECORDER.on and self._request:
            RECORDER.resume_request(self._request)
        elif RECORDER.on:
            RECORDER.begin_request()
            self._request = RECORDER.request
        try:
            yield
        finally:
            RECORDER.end_request()
            if not self.rows:
                self._request = 0

    def _is_sweeping(self, prepared: Iterator[PreparedRow], on_row: AnswerCallback) -> bool:
        """Whether a sweep is under way; begins one if there are rows."""
        if self._sweep is None:
            self._drop_cancelled(on_row)
            self._admit(prepared, on_row)
            if not self.rows:
                return False
            self._work = self._next_work()
            self._sweep = self._model.sweep(self._work)
        return True

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep now, and the tokens generated for them."""
        return len(self.rows), sum(len(row.sequence.ids) for row in self.rows)

    def has_room_for(self, new: PreparedRow, *, whole: bool = False) -> bool:
        """Whether a request finds enough pages once the others leave: for all of it; unless `whole`, it also does with
        as much room for its answer as for its prompt, and the answer may end there."""
        room = self.pool.capacity * PAGE_TOKENS - len(new.prompt)
        return new.limits.max_tokens <= room or (not whole and room >= len(new.prompt))

    def take_over(self, new: PreparedRow, sequence: AnswerSequence, cache: Any, tokens: int) -> bool:
        """Goes on with an answer whose first `tokens` tokens, prompt included, are in a cache of its own.

        Returns:
            False, and nothing was done, if that cannot be moved, or if there is no room for it now, or for all that may
            come of it.
        """
        layers = self._model.layer_pages()
        has_place = len(self.rows) < self._policy.rows and self.has_room_for(new, whole=True)
        if not has_place or not layers or not can_move(cache, layers, tokens):
            return False
        row = PagedRow(new.request, new.prompt, sequence, new.limits.max_tokens, self.pool, self._policy.ahead)
        if not row.take_over(tokens, lambda pages: move(cache, layers, pages, tokens)):
            return False
        self.rows.append(row)
        self.most_rows = max(self.most_rows, len(self.rows))
        return True

    def hand_over(self, cache: KvSession) -> PagedRow | None:
        """Lets the only row go on in a cache of its own, if it has begun to answer; nobody may be waiting."""
        layers = self._model.layer_pages()
        if len(self.rows) != 1 or self._aside or self._waiting is not None or self._sweep is not None or not layers:
            return None
        row = self.rows[0]
        if row.is_reading or not row.sequence.ids:
            return None
        if not cache.take_over(row.read, lambda empty: move_back(empty, layers, row.pages, row.held)):
            return None
        self.rows.remove(row)
        row.close()
        return row

    @property
    def held_bytes(self) -> int:
        """Bytes of the pages that rows hold now."""
        return self.pool.held * self._model.page_bytes

    def time_parts(self) -> PartsTimer | None:
        """See `BatchExecutor.time_parts`."""
        return self._model.time_parts()

    def close(self) -> None:
        """Drops all rows and their pages."""
        if self._sweep is not None:
            self._sweep.close()
            self._sweep = None
        for row in self.rows:
            row.close()
        self.rows = []
        self._aside.clear()
        self._waiting = None

    def free(self) -> None:
        """As `close`, and also releases the device memory: no further run is possible."""
        self.close()
        self._model.close()

    def _continue(self, on_row: AnswerCallback, should_yield: Check, cancelled: Check) -> BatchOutcome | None:
        """Continues the current sweep to its end, or until it has to stop between two layers."""
        assert self._sweep is not None
        while True:
            if cancelled():
                self.close()
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            try:
                next(self._sweep)
            except StopIteration as end:
                self._sweep = None
                self._take(end.value, on_row)
                return None
            except BaseException:
                # No row has advanced: the next try overwrites what was computed.
                self._sweep = None
                raise

    def _drop_cancelled(self, on_row: AnswerCallback) -> None:
        for row in [*self.rows, *self._aside]:
            if row.request.cancelled():
                row.sequence.end("cancelled")
                row.close()
                (self.rows if row in self.rows else self._aside).remove(row)
                on_row(row.answer("cancelled"))

    def _admit(self, prepared: Iterator[PreparedRow], on_row: AnswerCallback) -> None:
        """Admits rows in order while there are pages: first those that stepped aside, then new ones."""
        while len(self.rows) < self._policy.rows:
            if self._aside:
                if not self._aside[0].reserve():
                    return
                self.rows.append(self._aside.popleft())
                continue
            new = self._waiting or next(prepared, None)
            self._waiting = None
            if new is None:
                return
            if new.request.cancelled():
                on_row(new.ended("cancelled"))
                continue
            room = self.pool.capacity * PAGE_TOKENS - len(new.prompt)
            if self._policy.ahead is not None and 1 <= room < new.limits.max_tokens:
                new = new.within(room)
            if new.limits.max_tokens > room:
                on_row(new.ended("failed", _too_long(new, self.pool.capacity)))
                continue
            row = PagedRow(new.request, new.prompt, new.begin(), new.limits.max_tokens, self.pool, self._policy.ahead)
            if not row.reserve():
                self._waiting = new
                return
            self.rows.append(row)
            self.most_rows = max(self.most_rows, len(self.rows))

    def _make_room(self) -> None:
        """Reserves a page for each next token of an answer; where there is none left the newest rows step aside."""
        for row in list(self.rows):
            while row in self.rows and not row.is_reading and not row.reserve_next():
                newest = self.rows.pop()
                newest.step_aside()
                self._aside.appendleft(newest)

    def _next_work(self) -> list[Work]:
        """One token of every decoding row, and prompt tokens of the other rows up to the limit of a sweep."""
        self._make_room()
        work, left = list[Work](), self._policy.sweep_tokens
        being_read: set[bytes] = set()
        for row in self.rows:
            if not row.is_reading:
                work.append(Work(row, 1))
                continue
            row.share_pages()
            if self._kept is not None and (layers := self._model.layer_pages()):
                row.bring_kept(self._kept, layers)
            if left <= 0 or row.following in being_read:
                continue  # another row is computing the page that this one will share
            if row.following is not None:
                being_read.add(row.following)
            tokens = min(left, len(row.prompt) - row.held)
            work.append(Work(row, tokens))
            left -= tokens
        return work

    def _take(self, logits: torch.Tensor, on_row: AnswerCallback) -> None:
        """After a sweep: samples a token for each row that needs one; rows leave after their last token."""
        work, self._work = self._work, []
        choosing = [each.row for each in work if each.wants_logits]
        for each in work:
            if each.row.is_reading and not each.row.sequence.ids:
                each.row.request.on_progress(each.row.held + each.tokens, len(each.row.prompt))
            each.row.has_read(each.tokens)
        tokens = _choose(choosing, logits)
        if RECORDER.on:
            RECORDER.phase(lanes.BATCH_STEP, sum(each.tokens for each in work))
        for row, token in zip(choosing, tokens, strict=True):
            text, reason = row.sequence.take(token)
            row.request.on_text(text, len(row.sequence.ids))
            if reason is not None:
                self.rows.remove(row)
                if self._kept is not None and self._keeps:
                    row.offer(self._kept, self._model.layer_pages())
                row.close()
                on_row(row.answer(reason))


def _choose(rows: list[PagedRow], logits: torch.Tensor) -> list[int]:
    """The next token of each row, from logits [R, V]."""
    # Numpy's argmax is vectorised, torch's is not.
    most_likely = logits.float().numpy().argmax(axis=-1).tolist() if rows else []
    return [
        token if row.sequence.is_greedy else int(row.sequence.choose(row_logits[None]))
        for row, row_logits, token in zip(rows, logits, most_likely, strict=True)
    ]


def _too_long(new: PreparedRow, pages: int) -> EngineError:
    return EngineError(
        ErrorCode.PROMPT_TOO_LONG,
        f"The row needs room for {len(new.prompt) + new.limits.max_tokens:,} tokens, but the batch has memory for "
        f"{pages * PAGE_TOKENS:,}: shorten it, lower the token limit or allow more memory with --ram.",
    )
