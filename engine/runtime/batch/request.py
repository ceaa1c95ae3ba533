"""Requests and answers of a batch, row by row; rows become prompts in tokens here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from engine.common.chat import ChatMessage, FinishReason
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.runtime.decode.generation import ChanceLog, TextCallback, TokenConstraint, ignore_text
from engine.runtime.decode.prompt import chat_prompt, implied_stops
from engine.runtime.decode.sequence import AnswerLimits, AnswerSequence, end_token_ids
from engine.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One row.

    Attributes:
        row: index in the input.
        messages: the conversation to continue; empty if `ids` are given.
        ids: the prompt as tokens.
        sampling: parameters of this row; the same seed gives the same answer in any batch.
        constraint: what the answer must satisfy, if anything.
        end_ids: tokens that end the answer; `None` for the model's own.
        chances: takes how likely each token was, if anybody asks.
        on_text: told after each token of the answer.
        cancelled: asked between sweeps: whether nobody wants the answer any more; it then ends as `cancelled`.
    """

    row: int
    messages: tuple[ChatMessage, ...] = ()
    ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: TokenConstraint | None = None
    end_ids: frozenset[int] | None = None
    chances: ChanceLog | None = None
    on_text: TextCallback = ignore_text
    cancelled: CancelCheck = never_cancelled


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The outcome of one row.

    Attributes:
        text: the answer, without stop string and special tokens; for a failed row, its text so far.
        finish_reason: why it ended.
        prompt_tokens, generated_tokens: lengths; `token_ids` are the generated ones, including an end token.
        shared_tokens: prompt tokens reused from rows with the same prefix.
        error: why the row could not be answered; `None` if it was.
        stopped_by: the stop string that ended it; empty if none did.
    """

    row: int
    text: str
    finish_reason: FinishReason | Literal["failed"]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    shared_tokens: int = 0
    error: EngineError | None = None
    stopped_by: str = ""


class BatchOutcome(Enum):
    """Why `BatchExecutor.run` returned.

    `YIELDED`: another request had priority; the rows in progress are kept, and the next `run` continues them.
    """

    FINISHED = "finished"
    YIELDED = "yielded"
    CANCELLED = "cancelled"


AnswerCallback = Callable[[BatchAnswer], None]
Check = Callable[[], bool]


def never() -> bool:
    """For callers that never interrupt."""
    return False


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be answered."""

    request: BatchRequest
    prompt: list[int]
    limits: AnswerLimits
    tokenizer: Any

    def begin(self) -> AnswerSequence:
        """Its answer, still empty."""
        request = self.request
        return AnswerSequence(
            self.prompt, request.sampling, self.limits, self.tokenizer, request.constraint, chances=request.chances
        )

    def within(self, room: int) -> PreparedRow:
        """The same with an answer of at most `room` tokens."""
        return replace(self, limits=replace(self.limits, max_tokens=room, reached="context"))

    def ended(self, reason: Literal["failed", "cancelled"], error: EngineError | None = None) -> BatchAnswer:
        """Its outcome if it never begins."""
        return BatchAnswer(self.request.row, "", reason, len(self.prompt), error=error)


class Preparation:
    """Turns rows into prompts one at a time, as they are needed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._context_tokens = loaded.tokenizer, loaded.context_tokens
        self._end_ids = end_token_ids(loaded.model, loaded.tokenizer)
        self._implied_stops = implied_stops(loaded.tokenizer)

    def prepared(
        self, requests: Iterator[BatchRequest], on_row: AnswerCallback, cancelled: CancelCheck = never_cancelled
    ) -> PreparedRows:
        """The rows that can be answered; the others go to `on_row` at once."""
        return PreparedRows(lambda request: self._prepare(request, cancelled), requests, on_row)

    def _prepare(self, request: BatchRequest, cancelled: CancelCheck) -> PreparedRow:
        sampling = request.sampling
        if sampling.beams > 1:
            raise EngineError(ErrorCode.INVALID_REQUEST, "Batches do not support beam search: use one beam.")
        if request.ids:
            prompt, stop = list(request.ids), sampling.stop
        else:
            prompt = chat_prompt(self._tokenizer, request.messages, cancelled)
            stop = (*sampling.stop, *self._implied_stops)
        if not prompt:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        room = self._context_tokens - len(prompt)
        if room < 1:
            raise EngineError(
                ErrorCode.PROMPT_TOO_LONG,
                f"The prompt is {len(prompt):,} tokens long, but this model holds {self._context_tokens:,} together "
                f"with the answer: shorten it by at least {1 - room:,} tokens.",
            )
        end_ids = self._end_ids if request.end_ids is None else request.end_ids
        limits = AnswerLimits.within(room, sampling, end_ids, stop)
        return PreparedRow(request, prompt, limits, self._tokenizer)


class PreparedRows:
    """Prepared rows as they are asked for; as its source it may have ended now and go on later.

    Raises:
        RequestCancelled: the work was cancelled while a prompt was being prepared.
    """

    def __init__(
        self, prepare: Callable[[BatchRequest], PreparedRow], requests: Iterator[BatchRequest], on_row: AnswerCallback
    ) -> None:
        self._prepare, self._requests, self._on_row = prepare, requests, on_row

    def __iter__(self) -> PreparedRows:
        return self

    def __next__(self) -> PreparedRow:
        while True:
            request = next(self._requests)
            try:
                return self._prepare(request)
            except EngineError as error:
                self._on_row(BatchAnswer(request.row, "", "failed", error=error))
