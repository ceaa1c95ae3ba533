"""Requests that arrive while others are answered: one loaded model for many clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.runtime.batch.executor import BatchExecutor
from engine.runtime.batch.policy import policy_for
from engine.runtime.batch.request import AnswerCallback, BatchOutcome, BatchRequest, Check, never
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.encoder_decoder_session import source_prompt
from engine.runtime.decode.prompt import chat_prompt, check_length, encode, implied_stops
from engine.runtime.decode.token_bytes import token_bytes
from engine.runtime.load.tokenizer import token_id

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

AHEAD_TOKENS = 256
"""Tokens of an answer for which a request reserves memory at a time: few answers are as long as they may be."""


class LiveRows:
    """Answers requests as they arrive, many in each sweep.  Not thread-safe."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._executor = BatchExecutor(loaded, replace(policy_for(loaded), ahead=AHEAD_TOKENS))
        self._constrained: ConstrainedAnswers | None = None
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self.implied_stops = () if self._encodes else implied_stops(loaded.tokenizer)
        """Strings that end every answer to a conversation."""

    @property
    def note(self) -> str:
        """Why requests are answered one by one, for the user; empty if they share each sweep."""
        return self._executor.note

    @property
    def under_way(self) -> int:
        """Requests that share each sweep now."""
        return self._executor.under_way[0]

    def prompt(self, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...], cancelled: CancelCheck) -> list[int]:
        """The tokens of a conversation.

        Raises:
            EngineError: `PROMPT_TOO_LONG`, or as `chat_prompt`.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        if self._encodes:
            return self._fitting(source_prompt(self._loaded.tokenizer, messages, cancelled))
        return self._fitting(chat_prompt(self._loaded.tokenizer, messages, cancelled, tools))

    def text_prompt(self, text: str, cancelled: CancelCheck) -> list[int]:
        """The tokens of a text to continue.

        Raises:
            EngineError, RequestCancelled: as `prompt`.
        """
        return self._fitting(encode(self._loaded.tokenizer, text, special=True, cancelled=cancelled))

    def _fitting(self, prompt: list[int]) -> list[int]:
        if not prompt:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        check_length(len(prompt), self._loaded.context_tokens)
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
        return self._executor.run(requests, on_answer, pauses) is not BatchOutcome.YIELDED

    def close(self) -> None:
        """Frees keys and values.  Safe to call twice."""
        self._executor.close()
