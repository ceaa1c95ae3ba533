"""Requests that arrive while others are answered: one loaded model for many clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, PromptEnd, Tool, ToolChoice
from engine.common.config import Thinking
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.falls import passed_over
from engine.runtime.batch.policy import policy_for
from engine.runtime.decode.detokenizer import token_bytes
from engine.runtime.decode.generation import GenerationResult, TokenConstraint
from engine.runtime.decode.prompt import encode
from engine.runtime.decode.sequence import SequenceError
from engine.runtime.schedule.request import AnswerCallback, BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

_OF_ONE = (
    ErrorCode.INVALID_REQUEST,
    ErrorCode.PROMPT_TOO_LONG,
    ErrorCode.MODEL_UNSUPPORTED,
    ErrorCode.NOT_ENOUGH_MEMORY,
)
"""What may be wrong with one request alone."""


class LiveRows:
    """Answers requests as they arrive, many in each sweep.  `take`, `run` and `close` are for the engine's thread.

    Args:
        scheduler: of this model, whose other requests share the sweeps; `None` for one that nobody else uses.
    """

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler | None = None) -> None:
        self._scheduler = scheduler or Scheduler(loaded)
        self._is_shared = scheduler is not None
        self._most = policy_for(loaded).rows
        self._under_way = 0
        self._is_closing = False
        self._preparation = Preparation(loaded)
        self._failed: list[BaseException] = []
        self.implied_stops = self._preparation.implied_stops
        """Strings that end every answer to a conversation."""

    @property
    def _loaded(self) -> LoadedModel:
        return self._scheduler.loaded

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its answer."""
        return self._loaded.context_tokens

    @property
    def note(self) -> str:
        """Why requests are answered one by one, for the user; empty if they share each sweep."""
        return self._scheduler.note

    @property
    def under_way(self) -> int:
        """Requests of these clients that are being answered now."""
        return self._under_way

    def prompt(
        self,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...],
        cancelled: CancelCheck,
        thinking: Thinking = "auto",
        end: PromptEnd = "answer",
        most_tokens: int | None = None,
    ) -> list[int]:
        """The tokens of a conversation, which may be too many.  Like what else makes prompts, callable on any thread.

        Raises:
            EngineError: as `chat_prompt`.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        return self._preparation.prompt(messages, cancelled, tools, thinking, end, most_tokens)

    def text_prompt(
        self, text: str, cancelled: CancelCheck, most_tokens: int | None = None, *, special: bool = True
    ) -> list[int]:
        """The tokens of a text, which may be too many; with what the tokenizer adds at its ends if `special`.

        Raises:
            EngineError, RequestCancelled: as `prompt`.
        """
        return encode(self._loaded.tokenizer, text, special=special, cancelled=cancelled, most_tokens=most_tokens)

    def known(self, ids: tuple[int, ...]) -> list[int]:
        """Tokens that somebody else has chosen.

        Raises:
            EngineError: `INVALID_REQUEST`: this model has no such token.
        """
        most = int(self._loaded.model.config.get_text_config().vocab_size)
        for token in ids:
            if not 0 <= token < most:
                words = f"The prompt has the token {token}, but this model has those from 0 to {most - 1:,} only."
                raise EngineError(ErrorCode.INVALID_REQUEST, words)
        return list(ids)

    def check_room(self, prompt: list[int]) -> None:
        """Raises EngineError `INVALID_REQUEST` if a prompt is empty, `PROMPT_TOO_LONG` if no answer fits behind it."""
        self._preparation.fitting(prompt)

    def text_of(self, tokens: list[int]) -> str:
        """What tokens stand for, control tokens included."""
        sight = self._loaded.sight
        known = tokens if sight is None else sight.text(tokens)
        return str(self._loaded.tokenizer.decode(known, clean_up_tokenization_spaces=False))

    def thinks(self, prompt: list[int]) -> bool:
        """Whether a prompt ends by opening the model's reasoning."""
        return self._preparation.replies.thinks(prompt)

    def token_text(self, token: int) -> str:
        """What a token stands for."""
        return str(self._loaded.tokenizer.decode([token]))

    def token_bytes(self, token: int) -> bytes:
        """What it adds to the text."""
        return token_bytes(self._loaded.tokenizer, token)

    def shown(self, *, calls: bool) -> tuple[int, ...]:
        """The control tokens of the vocabulary that are marks in answers; `calls` if tools may be called."""
        return self._preparation.replies.shown(calls=calls)

    def constrained(
        self, constraint: Constraint, prompt: list[int] | None = None, thinking: Thinking = "auto"
    ) -> TokenConstraint:
        """What makes an answer satisfy a constraint.

        Args:
            prompt: of the conversation that it answers; None for a text to continue.
            thinking: how much the model was told to think before.

        Raises:
            EngineError: the model or the constraint does not allow it.
        """
        return self._preparation.constrained(constraint, prompt, thinking)

    def held_calls(
        self, tools: tuple[Tool, ...], choice: ToolChoice, prompt: list[int], thinking: Thinking = "auto"
    ) -> tuple[TokenConstraint | None, bool]:
        """What holds calls of tools to their schemas, and whether the whole answer is a call as JSON.

        Raises:
            EngineError: a call is required, and the model or the tool's schema does not allow it.
        """
        return self._preparation.held_calls(tools, choice, prompt, thinking)

    def take(self, requests: Iterator[BatchRequest], on_answer: AnswerCallback) -> None:
        """Lets requests join those under way, as many as there are places; `requests` may end now and go on later.

        Raises:
            BaseException: what keeps the model from answering anybody; those under way got no answer.
        """
        while not self._failed and self._under_way < self._most and (request := next(requests, None)) is not None:
            self._submit(request, on_answer)
        if self._failed:
            failed, self._failed = self._failed.pop(), []
            raise failed

    def run(self, requests: Iterator[BatchRequest], on_answer: AnswerCallback) -> None:
        """Answers requests until none is left; others may join them meanwhile.

        Raises:
            BaseException: as `take`.
        """

        def arrive() -> bool:
            if not self._failed:
                self.take(requests, on_answer)
            return bool(self._failed)

        self.take(requests, on_answer)
        while self._under_way:
            self._scheduler.serve(arrive)
            self.take(requests, on_answer)

    def close(self) -> None:
        """Ends what is under way, and frees keys and values that nobody else needs.  Safe to call twice."""
        self._is_closing = True
        if not self._is_shared:
            self._scheduler.close()
            return
        with passed_over("Requests ended while closing"):  # everybody has been told then
            self._scheduler.serve(lambda: not self._under_way)

    def _submit(self, request: BatchRequest, on_answer: AnswerCallback) -> None:
        def ended(outcome: Outcome) -> None:
            self._under_way -= 1
            answer = _answer(request, outcome)
            if answer is not None:
                on_answer(answer)
            elif isinstance(outcome, BaseException):
                self._failed.append(outcome)

        self._under_way += 1
        self._scheduler.submit(replace(request, cancelled=lambda: self._is_closing or request.cancelled()), ended)


def _answer(request: BatchRequest, outcome: Outcome) -> GenerationResult | None:
    """What became of a request; None if no other can be answered either."""
    if isinstance(outcome, BaseException):
        is_of_one = isinstance(outcome, SequenceError)
        if not isinstance(outcome, EngineError) or not (is_of_one or outcome.code in _OF_ONE):
            return None
        return GenerationResult(row=request.row, prompt_tokens=len(request.ids), error=outcome)
    return replace(outcome, row=request.row)
