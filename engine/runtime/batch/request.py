"""What a batch is asked, row by row, and what it answers; a row becomes a prompt in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from engine.common.chat import ChatMessage, FinishReason
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.runtime.decode.generation import TokenConstraint
from engine.runtime.decode.prompt import chat_prompt, implied_stops
from engine.runtime.decode.sequence import AnswerLimits, AnswerSequence, end_token_ids
from engine.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One row.

    Attributes:
        row: its index in the input.
        messages: the conversation to answer; empty if `ids` are given.
        ids: the prompt as tokens.
        sampling: its own; the same seed gives the same answer whatever the batch.
        constraint: what the answer must satisfy, if anything.
        end_ids: tokens that end the answer; `None` is the model's own.
    """

    row: int
    messages: tuple[ChatMessage, ...] = ()
    ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: TokenConstraint | None = None
    end_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What came of one row.

    Attributes:
        text: the answer, without stop string and special tokens; of a failed row what there was of it.
        finish_reason: why it ended.
        prompt_tokens, generated_tokens: lengths; `token_ids` are the generated ones, an end token among them.
        shared_tokens: of the prompt, taken over from other rows that begin alike.
        error: why the row could not be answered; `None` if it was.
    """

    row: int
    text: str
    finish_reason: FinishReason | Literal["failed"]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    shared_tokens: int = 0
    error: EngineError | None = None


class BatchOutcome(Enum):
    """Why `BatchExecutor.run` came back.

    `YIELDED`: another request had priority; the rows under way are kept, and the next `run` goes on with them.
    """

    FINISHED = "finished"
    YIELDED = "yielded"
    CANCELLED = "cancelled"


AnswerCallback = Callable[[BatchAnswer], None]
Check = Callable[[], bool]


def never() -> bool:
    """For callers that let it run."""
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
        return AnswerSequence(self.prompt, request.sampling, self.limits, self.tokenizer, request.constraint)

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
    ) -> Iterator[PreparedRow]:
        """Those that can be answered; the others go to `on_row` at once.

        Raises:
            RequestCancelled: `cancelled()` came true while a row's prompt was made.
        """
        for request in requests:
            try:
                yield self._prepare(request, cancelled)
            except EngineError as error:
                on_row(BatchAnswer(request.row, "", "failed", error=error))

    def _prepare(self, request: BatchRequest, cancelled: CancelCheck) -> PreparedRow:
        sampling = request.sampling
        if sampling.beams > 1:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, "Rows of a batch are not answered by beam search: ask for one beam."
            )
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
                f"with the answer: shorten the row by at least {1 - room:,} tokens.",
            )
        end_ids = self._end_ids if request.end_ids is None else request.end_ids
        limits = AnswerLimits.within(room, sampling, end_ids, stop)
        return PreparedRow(request, prompt, limits, self._tokenizer)
