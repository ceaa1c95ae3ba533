"""Rows one after the other, as chats: for families whose layers do not take many rows at once."""

from __future__ import annotations

from collections.abc import Iterator

from engine.common.errors import EngineError
from engine.runtime.batch.preparation import Prepared
from engine.runtime.batch.request import AnswerCallback, BatchAnswer, Check, Outcome
from engine.runtime.chat_session import ChatSession
from engine.runtime.loaded_model import LoadedModel


class OneByOne:
    """See `ContinuousBatch`; a row that has to give way is read again."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._session = ChatSession(loaded)
        self._interrupted: Prepared | None = None

    def run(
        self, prepared: Iterator[Prepared], on_row: AnswerCallback, should_yield: Check, cancelled: Check
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

    def _answer(self, new: Prepared, interrupted: Check) -> BatchAnswer:
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
