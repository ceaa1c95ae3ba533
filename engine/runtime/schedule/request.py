"""Requests become prompts in tokens here, with what ends their answers and what holds them to a form."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, PromptEnd, Tool, ToolChoice
from engine.common.config import Thinking
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.pictures import pictures_of
from engine.families.replies.reader import form_of, reply_reader
from engine.runtime.batch.job_plan import costs_of
from engine.runtime.decode.constrained import AfterThought, ConstrainedAnswers
from engine.runtime.decode.constrained_calls import CallGrammars, ConstrainedCalls
from engine.runtime.decode.encoder_decoder import source_prompt
from engine.runtime.decode.generation import BatchRequest as BatchRequest
from engine.runtime.decode.generation import GenerationResult, TokenConstraint
from engine.runtime.decode.generation import Outcome as Outcome
from engine.runtime.decode.prompt import chat_prompt, check_length, encode, implied_stops
from engine.runtime.decode.sequence import Sequence, alone_with, end_token_ids, of_one
from engine.runtime.load.tokenizer import token_id
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.pictures import FIRST, Blind

_TAIL_TOKENS = 12
"""Enough for every mark with what may follow it in a prompt."""
AnswerCallback = Callable[[GenerationResult], None]


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
        self._form = form_of(loaded.info.family)
        self._opens = tuple(opens.rstrip() for opens, _closes in self._form.thoughts)
        self._shown: dict[bool, tuple[int, ...]] = {}
        self._loaded = loaded
        self._constrained: ConstrainedAnswers | None = None
        self._calls: CallGrammars | None = None

    def prompt(
        self,
        messages: abc.Sequence[ChatMessage],
        cancelled: CancelCheck,
        tools: abc.Sequence[Tool] = (),
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

    def check_known(self, ids: abc.Sequence[int]) -> None:
        """Raises EngineError `INVALID_REQUEST` if this model has no such token."""
        if not ids:
            return
        most = int(self._loaded.model.config.get_text_config().vocab_size)
        if (token := next((each for each in ids if not 0 <= each < most), None)) is not None:
            words = f"The prompt has the token {token}, but this model has those from 0 to {most - 1:,} only."
            raise EngineError(ErrorCode.INVALID_REQUEST, words)

    def _held_calls(
        self, tools: abc.Sequence[Tool], choice: ToolChoice, prompt: abc.Sequence[int], thinking: Thinking
    ) -> tuple[TokenConstraint | None, bool]:
        """What holds calls of tools to their schemas, and whether the whole answer is a call as JSON."""
        try:
            if self._calls is None:
                self._calls = CallGrammars(self._constraints(), self._form, self._tokenizer)
            held = self._calls.begin(tools, choice, thinks=self.thinks(prompt), shown=self._seen(calls=True))
        except EngineError:
            if choice.must:
                raise
            return None, False  # a tokenizer that cannot be constrained: the model is trusted
        if choice.must and held is not None:
            return self._behind_thoughts(held, prompt, thinking), not isinstance(held, ConstrainedCalls)
        return held, False

    def thinks(self, prompt: abc.Sequence[int]) -> bool:
        """Whether a prompt ends by opening the model's reasoning."""
        tail = str(self._tokenizer.decode([token for token in prompt[-_TAIL_TOKENS:] if token < FIRST])).rstrip()
        return tail.endswith(self._opens)

    def _seen(self, *, calls: bool) -> tuple[int, ...]:
        """The control tokens that a reader of its answers must see; `calls` if tools may be called."""
        if calls not in self._shown:
            marks = self._form.marks if calls else self._form.marks_of_thoughts
            added = self._tokenizer.added_tokens_decoder.items()
            seen = (index for index, token in added if token.special and any(token.content in mark for mark in marks))
            self._shown[calls] = tuple(seen)
        return self._shown[calls]

    def _behind_thoughts(
        self, constraint: TokenConstraint, prompt: abc.Sequence[int], thinking: Thinking
    ) -> TokenConstraint:
        """A constraint that holds for the answer alone, where the model thinks before it.

        That is where the prompt has opened the reasoning, where the model cannot do without, or where it was asked for.
        """
        form, opens = self._form, list[int]()
        if not self.thinks(prompt):
            if not (form.has_channels or thinking not in ("auto", "off")):
                return constraint
            found = (token_id(self._tokenizer, text) for text in form.begins_thought)
            opens = [index for index in found if index is not None]
            if not opens:
                return constraint
        written = [encode(self._tokenizer, text, special=False) for text in ("\n", "\n\n")]
        breaks = [] if form.has_channels else [ids[0] for ids in written if len(ids) == 1]
        return AfterThought(constraint, form.ends_thought, breaks, opens, self._tokenizer, self._seen(calls=False))

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

    def prepare(self, sequence: Sequence, cancelled: CancelCheck = never_cancelled) -> Sequence:
        """The same with its prompt and what its answer is held to.

        What it is told later, and asks, is done as work for it alone: see `of_one`.

        Raises:
            SequenceError: it cannot be answered: `INVALID_REQUEST`, `PROMPT_TOO_LONG` or `MODEL_UNSUPPORTED`.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        with of_one():
            request = sequence.request
            sequence.request = replace(
                request,
                on_progress=alone_with(request.on_progress),
                cancelled=alone_with(request.cancelled),
            )
            sampling, stop, tools = request.sampling, request.sampling.stop, request.tools
            prompt = self.prompt_of(request, cancelled, self._context_tokens)
            room, constraint, how = self.fitting(prompt), request.constraint, dict[str, Any]()
            if isinstance(constraint, Constraint):
                constraint = self._constraints().begin(constraint)
            if request.is_chat:
                thinking, stop = self._thinking(request), (*stop, *self.implied_stops)
                if sampling.repetition_penalty != 1:
                    sequence.earlier = self._earlier(request, prompt, cancelled)
                sequence.thinks = thinks = not self._encodes and self.thinks(prompt)
                if constraint is not None and not self._encodes:
                    constraint = self._behind_thoughts(constraint, prompt, thinking)
                elif tools:
                    constraint, sequence.is_call = self._held_calls(tools, request.choice, prompt, thinking)
                how["shown"] = self._seen(calls=bool(tools))
                if request.splits:
                    family = self._loaded.info.family
                    how["reader"] = reply_reader(family, tools, thinks=thinks, is_call=sequence.is_call)
            end_ids = self._end_ids if request.end_ids is None else request.end_ids
            sequence.layout = self._sight.layout(prompt) if self._sight is not None else None
            sequence.prepared(prompt, self._tokenizer, room, end_ids, stop, constraint, **how)
            return sequence

    def rows(
        self, requests: Iterable[BatchRequest], on_row: AnswerCallback, cancelled: CancelCheck = never_cancelled
    ) -> Iterator[Sequence]:
        """Those that can share their sweeps with others, as they are asked for; the rest goes to `on_row` at once.

        Raises:
            RequestCancelled: the work was cancelled while a prompt was being prepared.
        """
        for request in requests:
            try:
                if request.sampling.beams > 1:
                    raise EngineError(ErrorCode.INVALID_REQUEST, "Batches do not support beam search: use one beam.")
                sequence = self.prepare(Sequence(request), cancelled)
            except EngineError as error:
                on_row(GenerationResult(row=request.row, error=error))
            else:
                yield sequence

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
