"""Requests become prompts in tokens here, with what ends their answers and what holds them to a form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.batch_files.rows import Constraint
from engine.common import clock
from engine.common.chat import ChatMessage, PromptEnd, Tool, ToolChoice
from engine.common.config import Thinking
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.pictures import pictures_of
from engine.runtime.batch.job_plan import costs_of
from engine.runtime.decode.beam_search import Beams, decode_beams
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.decode.constrained_calls import CallGrammars, ConstrainedCalls
from engine.runtime.decode.encoder_decoder import source_prompt
from engine.runtime.decode.generation import BatchRequest as BatchRequest
from engine.runtime.decode.generation import (
    Decoded,
    GenerationResult,
    TokenConstraint,
)
from engine.runtime.decode.prompt import chat_prompt, check_length, encode, implied_stops
from engine.runtime.decode.sequence import (
    AnswerLimits,
    AnswerSequence,
    SequenceError,
    alone_with,
    end_token_ids,
    of_one,
)
from engine.runtime.decode.split_answer import Replies
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.pictures import Blind, Layout

_log = logging.getLogger(__name__)


AnswerCallback = Callable[[GenerationResult], None]


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A request that can be answered.

    Attributes:
        earlier: how many of the prompt's first tokens are of earlier turns; see `AnswerSequence`.
        begun_s: when it was asked, by `perf_counter`.
        layout: where pictures lie in the prompt, if there are any.
        thinks: the prompt ends by opening the model's reasoning.
        is_call: all but the reasoning is one call as JSON, in no family's form.
    """

    request: BatchRequest
    prompt: list[int]
    limits: AnswerLimits
    tokenizer: Any
    constraint: TokenConstraint | None = None
    earlier: int = 0
    begun_s: float = 0.0
    layout: Layout | None = None
    thinks: bool = False
    is_call: bool = False

    @property
    def text(self) -> list[int]:
        """The prompt's tokens with one that the tokenizer knows in place of pictures'."""
        return self.prompt if self.layout is None else self.layout.sight.text(self.prompt)

    def begin(self, prefix: Sequence[int] | None = None, device: torch.device | None = None) -> AnswerSequence:
        """Its answer, still empty.

        Args:
            prefix: tokens that it continues, if not the prompt.
            device: of the logits.
        """
        request = self.request
        return AnswerSequence(
            self.text if prefix is None else prefix,
            request.sampling,
            self.limits,
            self.tokenizer,
            self.constraint,
            device,
            earlier=self.earlier,
            chances=request.chances,
            shown=request.shown,
        )

    def search(self, logits: torch.Tensor, prefix: Sequence[int]) -> Beams[Decoded]:
        """Its answer, searched for with beams from logits [1, V] after the prompt."""
        request = self.request
        return decode_beams(
            *(logits, request.sampling, self.limits, prefix, self.tokenizer, request.on_text, request.cancelled),
            earlier=self.earlier,
        )

    def ended(self, error: EngineError | None = None) -> GenerationResult:
        """Its outcome if it never begins."""
        return GenerationResult(row=self.request.row, prompt_tokens=len(self.prompt), error=error)


class Preparation:
    """Turns requests into prompts one at a time, as they are needed."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer, self._context_tokens = loaded.tokenizer, loaded.context_tokens
        self._end_ids = end_token_ids(loaded.model, loaded.tokenizer)
        self._sight = loaded.sight
        if self._sight is not None:
            self._sight.costs_of = partial(costs_of, loaded)
        self._blind = loaded.blind or Blind(loaded.info.name, "it was made for text")
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self.implied_stops = () if self._encodes else implied_stops(loaded.tokenizer)
        """Strings that end every answer to a conversation."""
        self.replies = Replies(loaded.tokenizer, loaded.info.family)
        self._loaded = loaded
        self._constrained: ConstrainedAnswers | None = None
        self._calls: CallGrammars | None = None

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        cancelled: CancelCheck,
        tools: Sequence[Tool] = (),
        thinking: Thinking = "auto",
        end: PromptEnd = "answer",
        most_tokens: int | None = None,
    ) -> list[int]:
        """The tokens of a conversation.

        Raises:
            EngineError, RequestCancelled: as `chat_prompt`.
        """
        if self._sight is None and any(map(pictures_of, messages)):
            raise self._blind.refuse()
        if self._encodes:
            if end == "continue":
                words = "This model reads a question apart from its answer, which therefore cannot be begun for it."
                raise EngineError(ErrorCode.INVALID_REQUEST, words)
            return source_prompt(self._tokenizer, messages, cancelled)
        return chat_prompt(self._tokenizer, messages, cancelled, tools, thinking, end, most_tokens, self._sight)

    def prompt_of(self, request: BatchRequest, cancelled: CancelCheck, most_tokens: int | None = None) -> list[int]:
        """The tokens of a request's prompt, which may be too many.

        Raises:
            EngineError, RequestCancelled: as `chat_prompt`.
        """
        if request.ids:
            return list(request.ids)
        if request.text is not None:
            how: dict[str, Any] = {"special": request.special, "cancelled": cancelled, "most_tokens": most_tokens}
            return encode(self._tokenizer, request.text, **how)
        thinking = self._thinking(request)
        return self.prompt(request.messages, cancelled, request.tools, thinking, request.end, most_tokens)

    @staticmethod
    def _thinking(request: BatchRequest) -> Thinking:
        """How much to think before an answer: none before one that is held to a form, unless that was asked for."""
        is_free = request.constraint is None and not request.choice.must
        return "off" if not is_free and request.sampling.thinking == "auto" else request.sampling.thinking

    def check_known(self, ids: Sequence[int]) -> None:
        """Raises EngineError `INVALID_REQUEST` if this model has no such token."""
        if not ids:
            return
        most = int(self._loaded.model.config.get_text_config().vocab_size)
        if (token := next((each for each in ids if not 0 <= each < most), None)) is not None:
            words = f"The prompt has the token {token}, but this model has those from 0 to {most - 1:,} only."
            raise EngineError(ErrorCode.INVALID_REQUEST, words)

    def _held_calls(
        self, tools: Sequence[Tool], choice: ToolChoice, prompt: Sequence[int], thinking: Thinking
    ) -> tuple[TokenConstraint | None, bool]:
        """What holds calls of tools to their schemas, and whether the whole answer is a call as JSON."""
        try:
            if self._calls is None:
                self._calls = CallGrammars(self._constraints(), self.replies.form, self._tokenizer)
            thinks, shown = self.replies.thinks(prompt), self.replies.shown(calls=True)
            held = self._calls.begin(tools, choice, thinks=thinks, shown=shown)
        except EngineError:
            if choice.must:
                raise
            return None, False  # a tokenizer that cannot be constrained: the model is trusted
        if choice.must and held is not None:
            return self.replies.free_before(held, prompt, thinking), not isinstance(held, ConstrainedCalls)
        return held, False

    def _constraints(self) -> ConstrainedAnswers:
        if self._constrained is None:
            self._constrained = ConstrainedAnswers.of(self._loaded)
        return self._constrained

    def fitting(self, prompt: list[int]) -> int:
        """Tokens that may follow a prompt.

        Raises:
            EngineError: `INVALID_REQUEST` if it is empty, `PROMPT_TOO_LONG`.
        """
        if not prompt:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        if self._encodes:  # prompt and answer each have the whole context; the answer begins with a start token
            check_length(len(prompt) - 1, self._context_tokens)
            return self._context_tokens - 1
        check_length(len(prompt), self._context_tokens)
        return self._context_tokens - len(prompt)

    def prepare(self, request: BatchRequest, cancelled: CancelCheck = never_cancelled) -> PreparedRow:
        """A request with its prompt and the limits of its answer.

        What it is told later, and asks, is done as work for it alone: see `of_one`.

        Raises:
            SequenceError: it cannot be answered: `INVALID_REQUEST`, `PROMPT_TOO_LONG` or `MODEL_UNSUPPORTED`.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        with of_one():
            request = replace(
                request,
                on_progress=alone_with(request.on_progress),
                on_text=alone_with(request.on_text),
                on_reused=alone_with(request.on_reused),
                cancelled=alone_with(request.cancelled),
            )
            begun_s, sampling, stop = clock.now(), request.sampling, request.sampling.stop
            prompt = self.prompt_of(request, cancelled, self._context_tokens)
            room, earlier, thinks, is_call = self.fitting(prompt), 0, False, False
            constraint = request.constraint
            if isinstance(constraint, Constraint):
                constraint = self._constraints().begin(constraint)
            if request.is_chat:
                thinking, stop = self._thinking(request), (*stop, *self.implied_stops)
                if sampling.repetition_penalty != 1:
                    earlier = self._earlier(request, prompt, cancelled)
                thinks = not self._encodes and self.replies.thinks(prompt)
                request.on_prepared(thinks)
                if constraint is not None and not self._encodes:
                    constraint = self.replies.free_before(constraint, prompt, thinking)
                elif request.tools:
                    constraint, is_call = self._held_calls(request.tools, request.choice, prompt, thinking)
                request = replace(request, shown=self.replies.shown(calls=bool(request.tools)))
            end_ids = self._end_ids if request.end_ids is None else request.end_ids
            limits = AnswerLimits.within(room, sampling, end_ids, stop)
            layout = self._sight.layout(prompt) if self._sight is not None else None
            how = (constraint, earlier, begun_s, layout, thinks, is_call)
            return PreparedRow(request, prompt, limits, self._tokenizer, *how)

    def rows(
        self, requests: Iterator[BatchRequest], on_row: AnswerCallback, cancelled: CancelCheck = never_cancelled
    ) -> PreparedRows:
        """Those that can share their sweeps with others; the rest goes to `on_row` at once."""

        def prepare(request: BatchRequest) -> PreparedRow:
            if request.sampling.beams > 1:
                raise EngineError(ErrorCode.INVALID_REQUEST, "Batches do not support beam search: use one beam.")
            return self.prepare(request, cancelled)

        return PreparedRows(prepare, requests, on_row)

    def _earlier(self, request: BatchRequest, ids: list[int], cancelled: CancelCheck) -> int:
        """How many tokens of a conversation, at its beginning, lie before what has been asked since the last answer."""
        messages = request.messages
        answers = [number for number, message in enumerate(messages[:-1]) if message.role == "assistant"]
        if not answers or self._encodes:
            return 0
        try:
            before = self.prompt(messages[: answers[-1] + 1], cancelled, request.tools)
        except EngineError:  # a template that wants a question in the end
            return 0
        return next((at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), 0)


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
                self._on_row(GenerationResult(row=request.row, error=error))


Outcome = GenerationResult | BaseException
"""What was answered, or why nothing was."""
OnEnd = Callable[[Outcome], None]


class Asked:
    """A request, and when its tokens came."""

    def __init__(
        self,
        request: BatchRequest | PreparedRow,
        on_end: OnEnd,
        on_begin: Callable[[], None],
        on_token: Callable[[], None],
        number: int,
    ) -> None:
        self._request, self._on_end, self.on_begin, self._on_token = request, on_end, on_begin, on_token
        self.number = number
        self.begun: AnswerSequence | None = None
        """Its answer so far, after the model has moved to another device."""
        self.tokens = 0
        self._begun_s, self._first_s, self._last_s = clock.now(), 0.0, 0.0
        self._row: PreparedRow | None = None

    def prepare(self, preparation: Preparation) -> PreparedRow:
        """What is answered; this is told what comes of it."""
        if self._row is None:
            asked = self._request
            found = preparation.prepare(asked, asked.cancelled) if isinstance(asked, BatchRequest) else asked
            self._on_text = found.request.on_text
            request = replace(found.request, row=self.number, on_text=self._told)
            self._row = replace(found, request=request, begun_s=self._begun_s)
        return self._row

    def _told(self, text: str, tokens: int) -> None:
        if tokens > self.tokens:
            self._last_s = clock.now()
            self._first_s = self._first_s or self._last_s
            self.tokens = tokens
            self._on_token()
        self._on_text(text, tokens)

    def end(self, outcome: Outcome) -> None:
        """Tells how it ended; that nobody can be told harms no other."""
        try:
            with of_one():
                self._on_end(outcome)
        except SequenceError as error:
            _log.warning("the end of a request could not be told: %s", error.code)

    def move(self, loaded: LoadedModel) -> None:
        """Another model goes on with it."""
        if self.begun is not None:
            self.begun.move(loaded.device)
        row = self._row or self._request
        if isinstance(row, PreparedRow) and row.layout is not None and loaded.sight:
            moved = replace(row, layout=row.layout.seen_by(loaded.sight))
            self._row, self._request = moved if self._row else None, moved

    def timed(self, result: GenerationResult) -> GenerationResult:
        """With the times of all its tokens, wherever they came from."""
        took = self._last_s - self._first_s
        return replace(
            result,
            ttft_s=self._first_s - self._begun_s if self.tokens else 0.0,
            tokens_per_s=(self.tokens - 1) / took if self.tokens > 1 and took > 0 else 0.0,
        )
