"""A row becomes a prompt in tokens, with what ends its answer; what is wrong with it is its own answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.runtime.batch.request import AnswerCallback, BatchAnswer, BatchRequest
from engine.runtime.batch.row import RowText
from engine.runtime.decoding import Limits
from engine.runtime.generation import CancelCheck, never_cancelled
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prompt import chat_prompt, implied_stops
from engine.runtime.stopping import end_token_ids


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row that can be answered."""

    request: BatchRequest
    prompt: list[int]
    limits: Limits
    tokenizer: Any

    def text(self) -> RowText:
        """Its answer, still empty."""
        return RowText(self.request, self.prompt, self.limits, self.tokenizer)

    def refused(self, error: EngineError) -> BatchAnswer:
        """Its answer if there is no room for it."""
        return BatchAnswer(self.request.row, "", "failed", len(self.prompt), error=error)


class Preparation:
    """Makes prompts of rows as they are asked for, none ahead."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._context_tokens = loaded.tokenizer, loaded.context_tokens
        self._end_ids = end_token_ids(loaded.model, loaded.tokenizer)
        self._implied_stops = implied_stops(loaded.tokenizer)

    def prepared(
        self, requests: Iterator[BatchRequest], on_row: AnswerCallback, cancelled: CancelCheck = never_cancelled
    ) -> Iterator[Prepared]:
        """Those that can be answered; the others are told to `on_row` at once.

        Raises:
            RequestCancelled: `cancelled()` came true while a row's prompt was made.
        """
        for request in requests:
            try:
                yield self._prepare(request, cancelled)
            except EngineError as error:
                on_row(BatchAnswer(request.row, "", "failed", error=error))

    def _prepare(self, request: BatchRequest, cancelled: CancelCheck) -> Prepared:
        sampling = request.sampling
        if sampling.beams > 1:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, "Rows of a batch are not answered by beam search: ask for one beam."
            )
        if request.ids:
            prompt, stop = list(request.ids), sampling.stop
        else:
            messages = [replace(m, content=m.content.encode("utf-8", "replace").decode()) for m in request.messages]
            prompt = chat_prompt(self._tokenizer, messages, cancelled)
            stop = (*sampling.stop, *self._implied_stops)
        if not prompt:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        room = self._context_tokens - len(prompt)
        if room < 1:
            raise EngineError(
                ErrorCode.PROMPT_TOO_LONG,
                f"The prompt is {len(prompt):,} tokens long, but this model holds {self._context_tokens:,} together "
                f"with the answer: shorten the row by at least {1 - room:,} tokens.",
            )
        end_ids = self._end_ids if request.end_ids is None else request.end_ids
        reached = "length" if sampling.max_tokens <= room else "context"
        limits = Limits(end_ids, stop, min(sampling.max_tokens, room), reached)  # type: ignore[arg-type]
        return Prepared(request, prompt, limits, self._tokenizer)
