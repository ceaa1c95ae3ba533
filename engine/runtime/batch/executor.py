"""Answers thousands of rows with one loaded model, for job files and the worker.

Rows join between sweeps through the layers, and leave as soon as they are answered (continuous batching).  Families
whose layers cannot take many rows at once are answered row by row, as chats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator

import torch

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.policy import BatchPolicy, policy_for, why_not_packed
from engine.runtime.batch.request import (
    AnswerCallback,
    BatchAnswer,
    BatchOutcome,
    BatchRequest,
    Check,
    Preparation,
    PreparedRow,
    never,
)
from engine.runtime.batch.row import PagedRow, PagePool
from engine.runtime.decode.chat_session import ChatSession
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


class ContinuousBatch:
    """Rows in progress in one model; kept while another request has priority.

    Args:
        most_pages: for tests, a page limit below what the policy's bytes allow.
    """

    def __init__(self, model: PackedModel, policy: BatchPolicy, most_pages: int | None = None) -> None:
        self._model, self._policy = model, policy
        pages = min(model.pages, most_pages or model.pages)
        model.allocate(pages)
        self.pool = PagePool(pages)
        self.rows: list[PagedRow] = []
        self._waiting: PreparedRow | None = None
        self._aside: deque[PagedRow] = deque()
        """Rows that gave up their pages for older ones, the oldest first."""
        self._sweep: Generator[None, None, torch.Tensor] | None = None
        self._work: list[Work] = []
        self.most_rows = 0
        """Most rows in progress at the same time so far."""

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
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
    ) -> BatchOutcome:
        while True:
            if self._sweep is None:
                self._drop_cancelled(on_row)
                self._admit(prepared, on_row)
                if not self.rows:
                    return BatchOutcome.FINISHED
                self._work = self._next_work()
                self._sweep = self._model.sweep(self._work)
            outcome = self._continue(on_row, should_yield, cancelled)
            if outcome is not None:
                return outcome

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep now, and the tokens generated for them."""
        return len(self.rows), sum(len(row.sequence.ids) for row in self.rows)

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
            each.row.has_read(each.tokens)
        tokens = _choose(choosing, logits)
        if RECORDER.on:
            RECORDER.phase(lanes.BATCH_STEP, sum(each.tokens for each in work))
        for row, token in zip(choosing, tokens, strict=True):
            text, reason = row.sequence.take(token)
            row.request.on_text(text, len(row.sequence.ids))
            if reason is not None:
                self.rows.remove(row)
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


class OneByOne:
    """See `ContinuousBatch`; an interrupted row starts again from its prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._session = ChatSession(loaded)
        self._interrupted: PreparedRow | None = None

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """See `BatchExecutor.run`."""
        while True:
            if cancelled():
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            new = self._interrupted or next(prepared, None)
            self._interrupted = None
            if new is None:
                return BatchOutcome.FINISHED
            try:
                answer = self._answer(new, lambda: cancelled() or should_yield())
            except EngineError as error:
                on_row(new.ended("failed", error))
                continue
            if answer.finish_reason == "cancelled" and not new.request.cancelled():
                self._interrupted = new
            else:
                on_row(answer)

    @property
    def under_way(self) -> tuple[int, int]:
        """One row, whose tokens only count once it ends."""
        return 1, 0

    def free(self) -> None:
        """Frees the KV cache."""
        self._session.clear()
        self._interrupted = None

    def _answer(self, new: PreparedRow, yields: Check) -> BatchAnswer:
        request = new.request

        def interrupted() -> bool:
            return yields() or request.cancelled()

        sampling, constraint = request.sampling, request.constraint
        if constraint is not None:
            constraint.reset()  # an interrupted try may have advanced it
        if request.ids:
            result = self._session.generate_from_ids(
                request.ids,
                sampling,
                end_ids=request.end_ids,
                on_text=request.on_text,
                cancelled=interrupted,
                constraint=constraint,
                chances=request.chances,
            )
        else:
            result = self._session.generate(
                request.messages,
                sampling,
                on_text=request.on_text,
                cancelled=interrupted,
                constraint=constraint,
                chances=request.chances,
            )
        return BatchAnswer(
            request.row,
            result.text,
            result.finish_reason,
            result.prompt_tokens,
            result.generated_tokens,
            result.token_ids,
            result.reused_tokens,
            stopped_by=result.stopped_by,
        )


class BatchExecutor:
    """The rows of one job.  Not thread-safe; the model may answer chats while no `run` is active.

    Rows are answered as if each were alone.  In fp32 a greedy answer equals that of a chat, token for token.  In bf16
    it does except for near ties: products over many rows round in another order, which moves logits by up to a tenth of
    their standard deviation, and by more where two experts score almost equally.  With quantised weights, for which a
    chat also quantises its single vectors, logits move by up to four tenths.  A row's own seed makes sampling
    repeatable.

    Args:
        policy: number of rows at once and other limits; `None` for what fits this machine.

    Attributes:
        note: why rows cannot share this model's layers, for the user; empty if they can.
    """

    def __init__(self, loaded: LoadedModel, policy: BatchPolicy | None = None) -> None:
        self.policy = policy or policy_for(loaded)
        self._preparation = Preparation(loaded)
        self._batch: ContinuousBatch | OneByOne | None = None
        why = why_not_packed(loaded.model)
        if not why:
            try:
                self._batch = ContinuousBatch(PackedModel(loaded, self.policy), self.policy)
            except LookupError as error:
                why = str(error)
        self.note = f"Rows are answered one by one: {why}." if why else ""
        if self._batch is None:
            self._batch = OneByOne(loaded)

    def run(
        self,
        rows: Iterator[BatchRequest],
        on_row: AnswerCallback,
        should_yield: Check = never,
        cancelled: Check = never,
    ) -> BatchOutcome:
        """Answers rows, reading them as places become free; answers come in any order.

        Args:
            rows: the remaining ones if an earlier call has yielded: the rows in progress come first.
            on_row: called once for each row, including those that cannot be answered.
            should_yield: whether another request needs the machine; `run` then returns within one layer and keeps all
                rows.
            cancelled: whether to stop: as quickly, but without keeping anything.

        Raises:
            EngineError: the model cannot be run; the rows in progress are kept for another try.
        """
        assert self._batch is not None
        prepared = self._preparation.prepared(rows, on_row, cancelled)
        try:
            return self._batch.run(prepared, on_row, should_yield, cancelled)
        except RequestCancelled:  # while preparing a row's prompt
            return BatchOutcome.CANCELLED

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep through the weights now, and the tokens generated for them."""
        return self._batch.under_way if self._batch is not None else (0, 0)

    def time_parts(self) -> PartsTimer | None:
        """From now on sweeps run without overlap and their parts are timed; None if they follow no schedule."""
        return self._batch.time_parts() if isinstance(self._batch, ContinuousBatch) else None

    def forget_prefixes(self) -> None:
        """Stops sharing earlier prompt prefixes with later rows: for measurements."""
        if isinstance(self._batch, ContinuousBatch):
            self._batch.pool.forget_prefixes()

    def close(self) -> None:
        """Frees keys and values.  Safe to call twice."""
        if self._batch is not None:
            self._batch.free()
            self._batch = None
