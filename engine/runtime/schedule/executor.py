"""Answers thousands of rows with one loaded model, for job files and the worker.

Rows join between sweeps through the layers, and leave as soon as they are answered (continuous batching).  Families
whose layers cannot take many rows at once are answered row by row, as chats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.common.errors import EngineError, RequestCancelled
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.policy import BatchPolicy, policy_for, why_not_packed
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.schedule.request import (
    AnswerCallback,
    BatchAnswer,
    BatchOutcome,
    BatchRequest,
    Check,
    Preparation,
    PreparedRow,
    never,
)
from engine.runtime.schedule.together import ContinuousBatch


class OneByOne:
    """See `ContinuousBatch`; an interrupted row starts again from its prompt."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._alone = Alone(loaded)
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
            if answer is None:
                self._interrupted = new
            else:
                on_row(answer)

    @property
    def under_way(self) -> tuple[int, int]:
        """One row, whose tokens only count once it ends."""
        return 1, 0

    def free(self) -> None:
        """Frees the KV cache."""
        self._alone.clear()
        self._interrupted = None

    def _answer(self, new: PreparedRow, yields: Check) -> BatchAnswer | None:
        request = new.request
        if request.constraint is not None:
            request.constraint.reset()  # an interrupted try may have advanced it

        def interrupted() -> bool:  # a long prompt, too, is left between two layers
            return yields() or request.cancelled()

        result = self._alone.begin(replace(new, request=replace(request, cancelled=interrupted))).turn(never)
        assert result is not None
        if result.finish_reason == "cancelled" and not request.cancelled():
            return None
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
                self._batch = ContinuousBatch(PackedModel(loaded, self.policy), self.policy, kept=loaded.kept)
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
        prepared = self._preparation.rows(rows, on_row, cancelled)
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
