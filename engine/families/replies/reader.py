"""An answer's text as its parts: reasoning, what is said, and calls of tools; while it arrives, or whole.

Models write their reasoning and their calls into the text, in the form of their family (`engine.families.replies`);
what is not in it is said as it stands. What a chat template can be told about thinking is read from its text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.common.chat import Tool, ToolCall
from engine.common.config import Thinking
from engine.common.untrusted import json_text
from engine.families import family_of
from engine.families.known import family_of_layers
from engine.families.replies import COMMON, HARMONY_MARKS, ReadCalls, ReplyForm
from engine.families.replies.calls import (
    Arriving,
    Calls,
    NoCall,
    Reading,
    Tools,
    any_of,
    json_calls,
    message_call,
    whole,
)


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str


Part = Thought | Spoken | ToolCall


class ReplyReader(Protocol):
    """Takes an answer's text as it comes and returns its parts as soon as they are certain."""

    @property
    def thinks(self) -> bool: ...

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]: ...


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
    most = None if several else 1
    if is_call:
        return _OneCall(Tools(tools), reply_reader(family, (), thinks=thinks, is_call=False), most)
    form = form_of(family)
    return _Channels(Tools(tools), most) if form.has_channels else _Marked(form, Tools(tools), most, thinks=thinks)


def form_of(family: str) -> ReplyForm:
    """The form in which this `model_type` answers; one that also sees pictures has its text part's."""
    candidates = (family, f"{family}_text", family_of_layers(family))
    return next((form for name in candidates if (form := family_of(name).replies)), COMMON)


def answering_family(model_type: str, text_type: str) -> str:
    """By which a model's answers are read: its own, or that of its text part, where any family's may be inside."""
    return text_type if form_of(model_type) is COMMON and form_of(text_type) is not COMMON else model_type


class _OneCall:
    """All but the reasoning is one call."""

    def __init__(self, tools: Tools, parts: ReplyReader, most: int | None) -> None:
        self._tools, self._parts, self._most, self._text = tools, parts, most, ""

    @property
    def thinks(self) -> bool:
        return self._parts.thinks

    def feed(self, text: str) -> list[Part]:
        return self._thoughts(self._parts.feed(text))

    def end(self) -> list[Part]:
        thoughts = self._thoughts(self._parts.end())
        rest, self._text = self._text, ""
        try:
            return thoughts + _as_parts(whole(lambda source: json_calls(source, self._tools), rest)[: self._most])
        except NoCall:
            return thoughts + ([Spoken(rest)] if rest else [])

    def _thoughts(self, parts: list[Part]) -> list[Part]:
        self._text += "".join(part.text for part in parts if isinstance(part, Spoken))
        return [part for part in parts if isinstance(part, Thought)]


def _as_parts(calls: Calls) -> list[Part]:
    return [ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, json_text(arguments)) for name, arguments in calls]


_FREE_AGAIN, _MOST_AGAIN = 10_000, 4
"""What was held back and was no call after all is read again: so many characters, and so many for each one before."""


class _Scanning:
    """Reads the text as it arrives, in one go; each feeding goes on where the last one ended."""

    def __init__(self, tools: Tools, most: int | None) -> None:
        self._tools, self._source, self._most = tools, Arriving(), most
        self._parts: list[Part] = []
        self._again = self._passed = 0
        """Characters that were read for nothing, and those before the text that is held."""
        self._is_call = False
        self._reading = self._read()

    def feed(self, text: str) -> list[Part]:
        self._source.text += text
        return self._go_on()

    def end(self) -> list[Part]:
        self._source.is_over = True
        return self._go_on()

    def _go_on(self) -> list[Part]:
        next(self._reading, None)
        parts, self._parts = self._parts, []
        return parts

    def _read(self) -> Reading[None]:
        raise NotImplementedError

    def _marks(self) -> tuple[str, ...]:
        """What counts as a mark where text is said now."""
        raise NotImplementedError

    def _tell(self, text: str) -> None:
        """Some of the text is no mark."""
        raise NotImplementedError

    def _told(self) -> Reading[str]:
        """Tells what stands before the next mark, and passes that: returns it, or nothing at the end."""
        source = self._source
        while True:
            marks = self._marks()
            found = any_of(marks).search(source.text, source.at) if marks else None
            end = found.start() if found else len(source.text)
            if not found and not source.is_over:
                end -= _begun_mark(source.text, source.at, marks)
            text, source.at = source.text[source.at : end], end
            self._tell(text)
            if found and found[0] in self._marks():  # some count only before anything is said
                source.at += len(found[0])
                return found[0]
            if source.is_over and source.at == len(source.text):
                return ""
            if not found:  # not at each mark: the rest would be copied as often
                self._passed += source.at
                source.text, source.at = source.text[source.at :], 0
                yield

    def _calls(self, reading: Reading[Calls], closes: tuple[str, ...] = ()) -> Reading[bool]:
        """Reads calls, if that is what stands here: else the text is as it was, and will be read again."""
        source, begin, self._is_call = self._source, self._source.at, True
        try:
            if self._again > _FREE_AGAIN + _MOST_AGAIN * (self._passed + begin):
                raise NoCall
            calls = yield from reading
        except NoCall:
            self._again += source.at - begin
            source.at = begin
            return False
        finally:
            self._is_call = False
        yield from source.closed(*closes)
        self._parts += _as_parts(calls[: self._most])
        self._most = self._most and 0
        return True


class _Marked(_Scanning):
    """Everything but harmony: marks around reasoning and calls."""

    def __init__(self, form: ReplyForm, tools: Tools, most: int | None, *, thinks: bool) -> None:
        super().__init__(tools, most)
        self._forms = {each.opens: each for each in form.calls} if tools.names else {}
        self._form = form
        self._until = tuple(closes for _opens, closes in form.thoughts) if thinks else ()
        """What ends the reasoning, any of it; nothing outside of it."""
        self._unopened: tuple[str, ...] = ()
        """What would have ended reasoning in which there was a call."""
        self._has_thought = self._is_told = self._has_spoken = self._has_left_out = False

    @property
    def thinks(self) -> bool:
        return bool(self._until) and not self._is_call

    def _read(self) -> Reading[None]:
        thoughts = dict(self._form.thoughts)
        while True:
            if not (self._until or self._has_spoken):
                yield from self._bare_calls()
            mark = yield from self._told()
            if not mark:
                return
            if mark in self._until:
                self._until, self._is_told = (), False
            elif mark in self._unopened:
                self._unopened = ()
            elif mark in self._forms:
                form = self._forms[mark]
                if (yield from self._calls(form.read(self._source, self._tools), form.closes)):
                    self._until, self._unopened, self._has_spoken, self._is_told = (), self._until, True, True
                else:
                    self._tell(mark)
            elif mark in thoughts:
                self._until = (thoughts[mark],)
            else:
                self._has_left_out = True

    def _bare_calls(self) -> Reading[None]:
        """An answer may be calls alone, without a mark."""

        def alone(read: ReadCalls) -> Reading[Calls]:
            calls = yield from read(self._source, self._tools)
            if not (yield from self._source.follows()):
                raise NoCall
            return calls

        if self._form.bare and self._tools.names and (yield from self._calls(alone(self._form.bare))):
            self._has_spoken = True

    def _marks(self) -> tuple[str, ...]:
        if self._until:
            return (*self._until, *(mark for mark, form in self._forms.items() if not form.is_said))
        marks = (*self._forms, *self._unopened)
        # Reasoning comes first, and what goes with it; later such a mark is something that the answer is about.
        if self._forms or self._has_left_out or not self._has_spoken:
            marks += self._form.left_out
        return marks if self._has_spoken else (*marks, *(opens for opens, _closes in self._form.thoughts))

    def _tell(self, text: str) -> None:
        if self._until:
            text = text if self._has_thought else text.lstrip()
            self._has_thought = self._has_thought or bool(text)
            self._parts += [Thought(text)] if text else []
            return
        text = text if self._is_told else text.lstrip("\n")
        self._is_told = self._is_told or bool(text)
        self._has_spoken = self._has_spoken or bool(text.strip())
        self._parts += [Spoken(text)] if text else []


_BODY, _ENDS = "<|message|>", ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADS = (*HARMONY_MARKS, "to=", "assistant")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _Channels(_Scanning):
    """Harmony (OpenAI, "harmony response format", 2025): messages with a head that names channel and recipient."""

    _kind = "final"

    @property
    def thinks(self) -> bool:
        return self._kind == "analysis" and not self._is_call

    def _read(self) -> Reading[None]:
        source = self._source
        has_head, callee = (yield from source.follows(*_HEADS)), ""
        while True:
            if has_head:
                begin = source.at
                if not (yield from source.find(_BODY)):
                    rest = source.text[begin:]
                    self._tell("" if "<|" in rest or not rest.strip() else rest)
                    return
                head = source.text[begin : source.at]
                channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
                self._kind = channel[1] if channel else self._kind
                callee = recipient[1] if recipient and recipient[1] in self._tools.names else ""
            if callee:
                yield from self._calls(message_call(source, callee, _ENDS))
            mark = yield from self._told()
            if not mark:
                return
            source.at -= len(mark) if mark in ("<|start|>", "<|channel|>") else 0  # the next head begins with it
            self._kind, has_head, callee = "final", True, ""

    def _marks(self) -> tuple[str, ...]:
        return _ENDS

    def _tell(self, text: str) -> None:
        if text:
            self._parts.append(Thought(text) if self._kind == "analysis" else Spoken(text))


def _begun_mark(text: str, begin: int, marks: tuple[str, ...]) -> int:
    """How many characters at a text's end may be the beginning of one of the marks."""
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(begin, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return len(text) - at
    return 0


_CODE_BEGINS, _CODE_ENDS = re.compile(r"\{[%{]"), re.compile(r"[%}]\}")
"""Of code; split at one and then at the other, which takes no longer for a template that never ends its code."""
_TEXTS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_SWITCHES = {
    # Not where it is given a value of the template's own, as in `namespace(enable_thinking=true)`.
    "enable_thinking": re.compile(r"(?<![.\w])enable_thinking\b(?!\s*=[^=])"),
    # An attribute of messages in some templates, so that it counts only where it is asked for as such.
    "thinking": re.compile(r"(?<![.\w])(?:if|and|or|not)\s+(?:not\s+)?thinking\b(?!\s*[.\[(])"),
}
"""Variables that turn thinking on and off: Qwen's, which most took over, and that of Granite and DeepSeek."""
_MODE = re.compile(r"(?<![.\w])thinking_mode\b(?!\s*=[^=])")
"""MiniMax-M3's."""
_EFFORT = re.compile(r"(?<![.\w])reasoning_effort\b(?!\s*=[^=])")
"""gpt-oss's."""
_NO_EFFORT = re.compile(r"""['"]none['"]""")
_EFFORTS: tuple[Thinking, ...] = ("low", "medium", "high")


def thinking_choices(template: str) -> tuple[Thinking, ...]:
    """The values of `SamplingParams.thinking` that a template knows, besides `auto`; empty if it knows none."""
    knows = _reading(template)
    efforts = _EFFORTS if knows(_EFFORT) else ()
    switches = any(knows(pattern) for pattern in (_MODE, *_SWITCHES.values()))
    if switches:
        return ("off", *efforts) if efforts else ("off", "on")
    return ("off", *efforts) if efforts and _NO_EFFORT.search(template) else efforts


def thinking_values(template: str, thinking: Thinking) -> dict[str, Any]:
    """The variables with which a template writes a prompt for it; none for what the template does not know."""
    if thinking == "auto":
        return {}
    knows = _reading(template)
    values: dict[str, Any] = {name: thinking != "off" for name, pattern in _SWITCHES.items() if knows(pattern)}
    if knows(_MODE):
        values["thinking_mode"] = "disabled" if thinking == "off" else "enabled"
    if knows(_EFFORT):
        if thinking in _EFFORTS:
            values["reasoning_effort"] = thinking
        elif thinking == "off" and _NO_EFFORT.search(template):
            values["reasoning_effort"] = "none"
    return values


def template_text(tokenizer: Any) -> str:
    """A tokenizer's chat template, with all its versions if it has several; empty if it has none."""
    template = tokenizer.chat_template
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else template or ""


def may_think(template: str, family: str) -> bool:
    form = form_of(family)
    return form.has_channels or any(closes in template for _opens, closes in form.thoughts)


def takes_tools(template: str) -> bool:
    return "tools" in template


def _reading(template: str) -> Callable[[re.Pattern[str]], bool]:
    """Says whether a pattern is in the template's code; what it writes, and texts in it, do not count."""
    parts = (_CODE_ENDS.split(part, maxsplit=1)[0] for part in _CODE_BEGINS.split(template)[1:])
    code = _TEXTS.sub("''", " ; ".join(parts))
    return lambda pattern: pattern.search(code) is not None
