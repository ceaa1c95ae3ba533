"""An answer's text as its parts: reasoning, what is said, and calls of tools; while it arrives, or whole.

Models write their reasoning and their calls into the text, in the form of their family (`engine.families.replies`);
what is not in it is said as it stands.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.common.chat import Tool, ToolCall
from engine.families import family_of
from engine.families.replies import COMMON, CallForm, ReadCalls, ReplyForm
from engine.families.replies.call_texts import find_outside, json_calls, json_texts


@dataclass(frozen=True, slots=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """More of what is said."""

    text: str


Part = Thought | Spoken | ToolCall


class ReplyReader(Protocol):
    """Takes an answer's text as it comes and returns its parts as soon as they are certain."""

    def feed(self, text: str) -> list[Part]:
        """More text."""
        ...

    def end(self) -> list[Part]:
        """Nothing comes any more: what was held back."""
        ...


def reply_reader(
    family: str, tools: tuple[Tool, ...], *, thinks: bool, is_call: bool, several: bool = True
) -> ReplyReader:
    """What takes apart an answer.

    Args:
        family: the `model_type` of who gives it.
        tools: those that may be called; without any, marks of calls are text.
        thinks: whether the prompt has already opened the reasoning.
        is_call: the whole text is one call as JSON, because a call was required.
        several: whether more than one call is wanted; later ones are left out if not.
    """
    if not several:
        return _FirstCall(reply_reader(family, tools, thinks=thinks, is_call=is_call))
    callable_ones = _Callable(tools)
    if is_call:
        return _OneCall(callable_ones, reply_reader(family, (), thinks=thinks, is_call=False))
    form = form_of(family)
    return _Channels(callable_ones) if form.has_channels else _Marked(form, callable_ones, thinks=thinks)


def form_of(family: str) -> ReplyForm:
    """The form in which this `model_type` answers; one that also sees pictures has its text part's."""
    return family_of(family).replies or family_of(f"{family}_text").replies or COMMON


class _Callable:
    """The tools that may be called."""

    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self._schemas = {tool.name: json.loads(tool.parameters) for tool in tools}
        self.any = bool(tools)

    def calls(self, text: str, read: ReadCalls) -> list[Part]:
        """The calls in a text; none, if it is no call of these."""
        calls = read(text.strip(), self._schemas)
        if not calls or not {name for name, _ in calls} <= self._schemas.keys():
            return []
        return [ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments) for name, arguments in calls]


class _FirstCall:
    def __init__(self, reader: ReplyReader) -> None:
        self._reader, self._has_called = reader, False

    def feed(self, text: str) -> list[Part]:
        return self._without_later(self._reader.feed(text))

    def end(self) -> list[Part]:
        return self._without_later(self._reader.end())

    def _without_later(self, parts: list[Part]) -> list[Part]:
        kept = []
        for part in parts:
            if not (self._has_called and isinstance(part, ToolCall)):
                kept.append(part)
            self._has_called = self._has_called or isinstance(part, ToolCall)
        return kept


class _OneCall:
    """All but the reasoning is one call."""

    def __init__(self, tools: _Callable, parts: ReplyReader) -> None:
        self._tools, self._parts, self._text = tools, parts, ""

    def feed(self, text: str) -> list[Part]:
        return self._thoughts(self._parts.feed(text))

    def end(self) -> list[Part]:
        thoughts = self._thoughts(self._parts.end())
        rest, self._text = self._text, ""
        return thoughts + (self._tools.calls(rest, json_calls) or ([Spoken(rest)] if rest else []))

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        self._text += "".join(part.text for part in parts if isinstance(part, Spoken))
        return [part for part in parts if isinstance(part, Thought)]


class _Marked:
    """Everything but harmony: marks around reasoning and calls."""

    def __init__(self, form: ReplyForm, tools: _Callable, *, thinks: bool) -> None:
        self._form, self._tools = form, tools
        self._until = tuple(closes for _opens, closes in form.thoughts) if thinks else ()
        """What ends the reasoning, any of it; nothing outside of it."""
        self._call: CallForm | None = None
        self._held = ""
        self._has_spoken = self._has_thought = False
        self._may_be_bare = form.bare is not None and tools.any
        self._has_left_out = self._is_over = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return [] if self._is_bare() else self._steps()

    def _steps(self) -> list[Part]:
        parts: list[Part] = []
        while (part := self._step()) is not None:
            parts += part
        return parts

    def end(self) -> list[Part]:
        rest, self._held = self._held, ""
        if self._is_bare() or (self._may_be_bare and _may_be_calls(rest)):
            assert self._form.bare is not None
            self._may_be_bare = False
            if calls := self._tools.calls(rest, self._form.bare):
                return calls
        self._held, self._may_be_bare = rest, False
        parts = self._steps()
        if self._call is not None and not self._tools.calls(self._held, self._call.read):
            self._is_over = True  # a text that never ends hides no end of a call
            parts += self._steps()
        rest, self._held = self._held, ""
        if self._call is not None:
            form, self._call = self._call, None
            return parts + self._calls_or_text(form, rest, "")
        return parts + self._plain(rest)

    def _is_bare(self) -> bool:
        """Whether the whole answer may be calls without a mark."""
        self._may_be_bare = self._may_be_bare and not self._has_spoken and _may_be_calls(self._held)
        return self._may_be_bare

    def _step(self) -> list[Part] | None:
        """One part out of what is held; None if more text is needed."""
        if self._call is not None:
            return self._step_in_call(self._call)
        marks = self._until or self._marks()
        at, _longest, mark = min(
            ((self._held.find(each), -len(each), each) for each in marks if each in self._held), default=(-1, 0, "")
        )
        if at < 0:
            return self._certain(marks)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        parts = self._plain(before)
        if self._until:
            self._until = ()
        elif mark in (thoughts := dict(self._form.thoughts)):
            self._until = (thoughts[mark],)
        elif mark in self._form.left_out:
            self._has_left_out = True
        else:
            self._call = next(form for form in self._form.calls if form.opens == mark)
        return parts

    def _step_in_call(self, form: CallForm) -> list[Part] | None:
        closes = form.closes or form.opens
        end = find_outside(None if self._is_over else form.texts(self._held), closes, self._held)
        if end < 0:
            return None
        inside, self._held = self._held[:end], self._held[end + len(closes) :]
        if form.closes:
            self._call = None
        return self._calls_or_text(form, inside, form.closes)

    def _calls_or_text(self, form: CallForm, inside: str, closes: str) -> list[Part]:
        calls = self._tools.calls(inside, form.read)
        self._has_spoken = True
        return calls or [Spoken(form.opens + inside + closes)]

    def _marks(self) -> list[str]:
        marks = [form.opens for form in self._form.calls] if self._tools.any else []
        # Reasoning comes first, and what goes with it; later such a mark is something that the answer is about.
        if self._tools.any or self._has_left_out or not self._has_spoken:
            marks += self._form.left_out
        return marks if self._has_spoken else [*marks, *(opens for opens, _closes in self._form.thoughts)]

    def _certain(self, marks: Sequence[str]) -> list[Part] | None:
        """All but an end that may be the beginning of a mark."""
        text, self._held = _certain_part(self._held, marks)
        return self._plain(text) or None

    def _plain(self, text: str) -> list[Part]:
        if self._until:
            text = text if self._has_thought else text.lstrip()
            self._has_thought = self._has_thought or bool(text)
            return [Thought(text)] if text else []
        text = text if self._has_spoken else text.lstrip("\n")
        self._has_spoken = self._has_spoken or bool(text.strip())
        return [Spoken(text)] if text else []


_BODY, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADS = ("<|start|>", "<|channel|>", "<|constrain|>", _BODY, "to=", "assistant")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _Channels:
    """Harmony (OpenAI, "harmony response format", 2025): messages with a head that names channel and recipient."""

    def __init__(self, tools: _Callable) -> None:
        self._tools = tools
        self._held = ""
        self._is_head = self._is_first = True
        self._kind = "final"
        self._callee = ""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while (part := self._step()) is not None:
            parts += part
        return parts

    def end(self) -> list[Part]:
        rest, self._held = self._held, ""
        if self._is_head:
            return [Spoken(rest)] if rest.strip() and self._is_first and "<|" not in rest else []
        return self._message(rest, is_whole=True)

    def _step(self) -> list[Part] | None:
        return self._step_in_head() if self._is_head else self._step_in_body()

    def _step_in_head(self) -> list[Part] | None:
        if self._is_first and not _begins_like(self._held.lstrip(), _HEADS):
            self._is_head, self._is_first = False, False  # it does without heads
            return []
        head, mark, rest = self._held.partition(_BODY)
        if not mark:
            return None
        self._held, self._is_head, self._is_first = rest, False, False
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._kind = channel[1] if channel else "final"
        self._callee = recipient[1] if recipient and self._tools.any else ""
        return []

    def _step_in_body(self) -> list[Part] | None:
        texts = json_texts(self._held) if self._callee else None
        found = ((find_outside(texts, each, self._held), each) for each in _ENDS if each in self._held)
        at, mark = min(((at, each) for at, each in found if at >= 0), default=(-1, ""))
        if at < 0:
            if self._callee:
                return None
            text, self._held = _certain_part(self._held, _ENDS)
            return self._message(text) or None
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        if mark == "<|channel|>":
            self._held = mark + self._held
        parts = self._message(text, is_whole=True)
        self._is_head, self._callee = True, ""
        return parts

    def _message(self, text: str, *, is_whole: bool = False) -> list[Part]:
        if self._callee and is_whole:
            name = self._callee
            as_json = f'{{"name": {json.dumps(name)}, "arguments": {text.strip() or "{}"}}}'
            return self._tools.calls(as_json, json_calls) or [Spoken(text)]
        if not text:
            return []
        return [Thought(text)] if self._kind == "analysis" else [Spoken(text)]


_CALLS_BEGIN = re.compile(r'\s*(?:\[\s*(?:[\w.]+\(|[\w.]*$|\{)|\{\s*(?:"(?:name|type|function)"|"\w*$|$)|$)')


def _may_be_calls(text: str) -> bool:
    """Whether a text begins as calls without a mark do."""
    return _CALLS_BEGIN.match(text) is not None


def _certain_part(text: str, marks: Sequence[str]) -> tuple[str, str]:
    """A text up to an end with which one of the marks may begin, and that end: the longest."""
    keep = max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text[-n:] == mark[:n]),
        default=0,
    )
    return text[: len(text) - keep], text[len(text) - keep :]


def _begins_like(text: str, heads: Sequence[str]) -> bool:
    """Whether a text begins with one of these, or may once there is more of it."""
    return any(text.startswith(head) or head.startswith(text) for head in heads)
