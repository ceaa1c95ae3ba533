"""Requests that arrive while others are answered: one loaded model for many clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.runtime.batch.policy import policy_for
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.prompt import encode
from engine.runtime.decode.token_bytes import token_bytes
from engine.runtime.load.tokenizer import token_id
from engine.runtime.schedule.request import AnswerCallback, BatchAnswer, BatchRequest, Check, Preparation, never
from engine.runtime.schedule.scheduler import Outcome, Scheduler

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
    """Answers requests as they arrive, many in each sweep.  Not thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._scheduler = Scheduler(loaded)
        self._most = policy_for(loaded).rows
        self._preparation = Preparation(loaded)
        self._constrained: ConstrainedAnswers | None = None
        self._failed: list[BaseException] = []
        self.implied_stops = self._preparation.implied_stops
        """Strings that end every answer to a conversation."""

    @property
    def note(self) -> str:
        """Why requests are answered one by one, for the user; empty if they share each sweep."""
        return self._scheduler.note

    @property
    def under_way(self) -> int:
        """Requests that are being answered now."""
        return self._scheduler.under_way

    def prompt(self, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...], cancelled: CancelCheck) -> list[int]:
        """The tokens of a conversation.

        Raises:
            EngineError: `PROMPT_TOO_LONG`, or as `chat_prompt`.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        return self._fitting(self._preparation.prompt(messages, cancelled, tools))

    def text_prompt(self, text: str, cancelled: CancelCheck) -> list[int]:
        """The tokens of a text to continue.

        Raises:
            EngineError, RequestCancelled: as `prompt`.
        """
        return self._fitting(encode(self._loaded.tokenizer, text, special=True, cancelled=cancelled))

    def _fitting(self, prompt: list[int]) -> list[int]:
        self._preparation.fitting(prompt)
        return prompt

    def ends_with(self, prompt: list[int], text: str) -> bool:
        """Whether a prompt ends with a text, apart from white space."""
        tail = str(self._loaded.tokenizer.decode(prompt[-12:]))
        return tail.rstrip().endswith(text)

    def token_text(self, token: int) -> str:
        """What a token stands for."""
        return str(self._loaded.tokenizer.decode([token]))

    def token_bytes(self, token: int) -> bytes:
        """What it adds to the text."""
        return token_bytes(self._loaded.tokenizer, token)

    def control_tokens_in(self, marks: tuple[str, ...]) -> tuple[int, ...]:
        """The special tokens of the vocabulary of which these marks are made."""
        added = self._loaded.tokenizer.added_tokens_decoder.items()
        return tuple(index for index, token in added if token.special and any(token.content in mark for mark in marks))

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token for this text."""
        return token_id(self._loaded.tokenizer, text) is not None

    def constrained(self, constraint: Constraint) -> ConstrainedAnswer:
        """What makes an answer satisfy a constraint.

        Raises:
            EngineError: the model or the constraint does not allow it.
        """
        if self._constrained is None:
            self._constrained = ConstrainedAnswers.of(self._loaded)
        return self._constrained.begin(constraint)

    def run(self, requests: Iterator[BatchRequest], on_answer: AnswerCallback, pauses: Check = never) -> bool:
        """Answers requests until none is left; `requests` may end now and go on while others are under way.

        Returns:
            Whether none is left; else `pauses` came true, and the next call goes on.

        Raises:
            EngineError: the model cannot be run.
        """
        failed = self._failed

        def take(request: BatchRequest) -> None:
            def ended(outcome: Outcome) -> None:
                answer = _answer(request, outcome)
                if answer is not None:
                    on_answer(answer)
                elif isinstance(outcome, BaseException):
                    failed.append(outcome)

            self._scheduler.submit(request, ended)

        def arrive() -> bool:
            while self._scheduler.under_way < self._most and (request := next(requests, None)) is not None:
                take(request)
            return bool(failed) or pauses()

        while not (interrupted := arrive()) and self._scheduler.is_busy:
            self._scheduler.serve(arrive)
        if failed:
            raise failed.pop()
        return not interrupted

    def close(self) -> None:
        """Frees keys and values.  Safe to call twice."""
        self._scheduler.close()


def _answer(request: BatchRequest, outcome: Outcome) -> BatchAnswer | None:
    """What became of a request; None if no other can be answered either."""
    if isinstance(outcome, BaseException):
        if not isinstance(outcome, EngineError) or outcome.code not in _OF_ONE:
            return None
        return BatchAnswer(request.row, "", "failed", len(request.ids), error=outcome)
    return BatchAnswer(
        request.row,
        outcome.text,
        outcome.finish_reason,
        outcome.prompt_tokens,
        outcome.generated_tokens,
        outcome.token_ids,
        outcome.reused_tokens,
        stopped_by=outcome.stopped_by,
    )
