"""One answer in OpenAI's form: chat completions and completions, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.batch_files.openai_format import FINISH
from engine.common.chat import ToolCall
from engine.families.replies.reader import Part, Spoken, Thought
from engine.protocol import Ask, Began, Finished, NamedChances, NamedToken, Token
from engine.serving.asking import AnswerEvent
from engine.serving.tools import Reading, ToolUse


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, read.

    Attributes:
        asks: one for each answer, those to the same prompt behind each other.
        each: answers to each prompt.
        uses: tools that may be called.
        is_chat: or else a text is continued.
        echoes: what stands before each answer: its prompt, if that is wanted.
        streams, counts: whether it wants a stream, and in it the tokens used.
    """

    model: str
    asks: tuple[Ask, ...]
    each: int
    uses: ToolUse
    is_chat: bool
    streams: bool
    counts: bool
    echoes: tuple[str, ...]

    def answers(self) -> list[Answer]:
        """All of them, before anything has come."""
        return [Answer(self, echo) for echo in self.echoes]

    def head(self, *, chunk: bool = False) -> dict[str, Any]:
        """What an answer, or each chunk of one, begins with."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if chunk and self.is_chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": None,
        }

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The tokens of all answers; a prompt counts once, however often it is answered."""
        prompts = [answer.ended for answer in answers[:: self.each]]
        prompt = sum(each.prompt_tokens for each in prompts)
        generated = sum(answer.ended.generated_tokens for answer in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in prompts)},
        }


class Answer:
    """One answer: what has come of it, and what to send for each event."""

    def __init__(self, wanted: Wanted, echo: str = "") -> None:
        self._wanted, self._echo = wanted, echo
        self._reading = Reading(wanted.uses)
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[ToolCall] = []
        self._chances: list[NamedChances] = []
        self._named_characters = 0
        self.ended = Finished("", "stop", 0, 0, 0)

    def take(self, event: AnswerEvent) -> list[dict[str, Any]]:
        """The deltas of a stream that an event makes."""
        is_chat = self._wanted.is_chat
        parts: list[Part] = self._reading.parts(event) if is_chat else []
        if isinstance(event, Began):
            if is_chat:
                return [_delta({"role": "assistant", "content": None})]
            return self._deltas([Spoken(self._echo)])
        if isinstance(event, Token):
            self._chances += event.chances
            deltas = self._deltas(parts if is_chat else [Spoken(event.text)])
            if event.chances:
                deltas = deltas or [self._spoken("")]
                deltas[0]["logprobs"] = self._logprobs(list(event.chances), self._named_characters)
                self._named_characters += sum(len(each.token.text) for each in event.chances)
            return deltas
        self.ended = event
        deltas = self._deltas(parts)
        last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        return [*deltas, {**last, "logprobs": None, "finish_reason": self._reason}]

    def choice(self, index: int) -> dict[str, Any]:
        """The answer, whole."""
        said = "".join(self._said)
        logprobs = self._logprobs(self._chances, 0) if self._chances else None
        chosen: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": self._reason}
        if not self._wanted.is_chat:
            return {**chosen, "text": said}
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if self._thought:
            message["reasoning_content"] = "".join(self._thought)
        if self._calls:
            message["content"] = said.strip() or None
            message |= self._called(self._calls[0]) or {"tool_calls": [_call(call) for call in self._calls]}
        return {**chosen, "message": message}

    def _logprobs(self, chances: list[NamedChances], before: int) -> dict[str, Any]:
        if self._wanted.is_chat:
            return {"content": [_logprob(each) for each in chances], "refusal": None}
        return _completion_logprobs(chances, before)

    @property
    def _reason(self) -> str:
        called = "function_call" if self._wanted.uses.is_legacy else "tool_calls"
        return called if self._calls else FINISH[self.ended.finish_reason]

    def _called(self, call: ToolCall) -> dict[str, Any]:
        """A call in the form of who offered functions; empty for all others."""
        return {"function_call": _call(call)["function"]} if self._wanted.uses.is_legacy else {}

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        deltas = []
        for part in parts:
            if isinstance(part, ToolCall):
                self._calls.append(part)
                called = self._called(part) or {"tool_calls": [{"index": len(self._calls) - 1, **_call(part)}]}
                deltas.append(_delta(called))
            elif isinstance(part, Thought):
                self._thought.append(part.text)
                deltas.append(_delta({"reasoning_content": part.text}))
            elif part.text:
                self._said.append(part.text)
                deltas.append(self._spoken(part.text))
        return deltas

    def _spoken(self, text: str) -> dict[str, Any]:
        is_chat = self._wanted.is_chat
        return _delta({"content": text}) if is_chat else {"text": text, "logprobs": None, "finish_reason": None}


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprob(chances: NamedChances) -> dict[str, Any]:
    def entry(token: NamedToken) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}

    return {**entry(chances.token), "top_logprobs": [entry(token) for token in chances.likeliest]}


def _completion_logprobs(chances: list[NamedChances], at: int) -> dict[str, Any]:
    offsets = []
    for each in chances:
        offsets.append(at)
        at += len(each.token.text)
    return {
        "tokens": [each.token.text for each in chances],
        "token_logprobs": [each.token.logprob for each in chances],
        "top_logprobs": [{token.text: token.logprob for token in each.likeliest} for each in chances],
        "text_offset": offsets,
    }
