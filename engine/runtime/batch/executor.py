"""Rows one after the other, as chats: for families whose layers do not take many rows at once."""

from __future__ import annotations

from collections.abc import Iterator

from engine.common.cancellation import RequestCancelled
from engine.common.errors import EngineError
from engine.runtime.batch.continuous import ContinuousBatch
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.policy import BatchPolicy, policy_for, why_not_packed
from engine.runtime.batch.request import (
    AnswerCallback,
    BatchAnswer,
    BatchRequest,
    Check,
    Outcome,
    Preparation,
    PreparedRow,
    never,
)
from engine.runtime.decode.chat_session import ChatSession
from engine.runtime.loaded_model import LoadedModel


class OneByOne:
    """See `ContinuousBatch`; a row that has to give way is read again."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._session = ChatSession(loaded)
        self._interrupted: PreparedRow | None = None

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> Outcome:
        """See `BatchExecutor.run`."""
        while True:
            if cancelled():
                return Outcome.CANCELLED
            if should_yield():
                return Outcome.YIELDED
            new = self._interrupted or next(prepared, None)
            self._interrupted = None
            if new is None:
                return Outcome.FINISHED
            try:
                answer = self._answer(new, lambda: cancelled() or should_yield())
            except EngineError as error:
                on_row(new.refused(error))
                continue
            if answer.finish_reason == "cancelled":
                self._interrupted = new
            else:
                on_row(answer)

    @property
    def under_way(self) -> tuple[int, int]:
        """One row, whose tokens count when it ends."""
        return 1, 0

    def free(self) -> None:
        """Frees the KV cache."""
        self._session.clear()
        self._interrupted = None

    def _answer(self, new: PreparedRow, interrupted: Check) -> BatchAnswer:
        request = new.request
        sampling, constraint = request.sampling, request.constraint
        if constraint is not None:
            constraint.reset()  # it may have had to give way before
        if request.ids:
            result = self._session.generate_from_ids(
                request.ids, sampling, end_ids=request.end_ids, cancelled=interrupted, constraint=constraint
            )
        else:
            result = self._session.generate(request.messages, sampling, cancelled=interrupted, constraint=constraint)
        return BatchAnswer(
            request.row,
            result.text,
            result.finish_reason,
            result.prompt_tokens,
            result.generated_tokens,
            result.token_ids,
            result.reused_tokens,
        )


class BatchExecutor:
    """The rows of one job.  Not for several threads; the model may answer chats while no `run` is going on.

    Rows are answered as if each were alone.  In fp32 a greedy answer is that of a chat, token for token.  In bf16 it is
    but for near ties: products over many rows are rounded in another order, which moves logits by up to a tenth of
    their standard deviation, and by more where two experts come out equally good; quantised weights, for which a chat
    quantises its single vectors as well, by up to four tenths.  A row's own seed makes sampling repeatable.

    Args:
        policy: how many rows at once and the like; `None` is what fits this machine.

    Attributes:
        note: a word about it if rows cannot go through this model's layers together; empty if they can.
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
    ) -> Outcome:
        """Answers rows, which are asked for as places come free; answers come in any order.

        Args:
            rows: the rest of them, if an earlier call has yielded: the rows under way come first.
            on_row: called once for each row, also for those that cannot be answered.
            should_yield: whether somebody else needs the machine: then it comes back within one layer, all rows kept.
            cancelled: whether to stop: as soon, with nothing kept.

        Raises:
            EngineError: the model cannot be run; the rows under way are kept for another try.
        """
        assert self._batch is not None
        prepared = self._preparation.prepared(rows, on_row, cancelled)
        try:
            return self._batch.run(prepared, on_row, should_yield, cancelled)
        except RequestCancelled:  # while a row's prompt was made
            return Outcome.CANCELLED

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep through the weights now, and the tokens that have been generated for them."""
        return self._batch.under_way if self._batch is not None else (0, 0)

    def time_parts(self) -> PartsTimer | None:
        """From now on sweeps overlap nothing, and their parts are timed; None if they go by no schedule."""
        return self._batch.time_parts() if isinstance(self._batch, ContinuousBatch) else None

    def forget_prefixes(self) -> None:
        """Beginnings of prompts are not shared with later rows: for measurements."""
        if isinstance(self._batch, ContinuousBatch):
            self._batch.pool.forget_prefixes()

    def close(self) -> None:
        """Frees keys and values.  Harmless if repeated."""
        if self._batch is not None:
            self._batch.free()
            self._batch = None
