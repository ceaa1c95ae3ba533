"""An answer's text as its parts: reasoning, what is said, and calls of tools; while it arrives, or whole.

Models write their reasoning and their calls into the text, in a form of their own.  Each form is one entry in `FORMS`;
what is in none of them is said as it stands.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from engine.common.chat import Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Thought:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """More of what is said."""

    text: str


Part = Thought | Spoken | ToolCall


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls stand in a text: between two marks, where `read` finds (name, arguments as JSON text)."""

    opens: str
    closes: str
    read: Callable[[str], list[tuple[str, str]]]


def _json_calls(text: str) -> list[tuple[str, str]]:
    """`{"name": ..., "arguments": {...}}`, or a list of such: Qwen, Hermes, Granite, Mistral, LFM and many others."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return []
        if not isinstance(arguments, dict):
            return []
        calls.append((entry["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEY_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _tagged_calls(text: str) -> list[tuple[str, str]]:
    """`<function=name><parameter=key>value</parameter></function>`: Qwen3-Coder and Qwen3.5."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return []
    return [(found[1].strip(), _arguments(_PARAMETER.findall(found[2])))]


def _key_value_calls(text: str) -> list[tuple[str, str]]:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`: GLM-4.5 and later."""
    name = text.split("<arg_key>", 1)[0].strip()
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        return []
    return [(name, _arguments(_KEY_VALUE.findall(text)))]


def _arguments(pairs: list[tuple[str, str]]) -> str:
    """Values are JSON where they can be read as such, else texts."""
    arguments = {}
    for key, value in pairs:
        try:
            arguments[key.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[key.strip()] = value
    return json.dumps(arguments, ensure_ascii=False)


def _tool_call(text: str) -> list[tuple[str, str]]:
    """What stands between `<tool_call>` marks in any of the families that use these."""
    return _json_calls(text) or _tagged_calls(text) or _key_value_calls(text)


FORMS = (
    _Form("<tool_call>", "</tool_call>", _tool_call),
    _Form("<|tool_call_start|>", "<|tool_call_end|>", _json_calls),
    _Form("[TOOL_CALLS]", "\n", _json_calls),
)
_THINKS, _THOUGHT = "<think>", "</think>"


class ReplyReader:
    """Takes an answer's text as it comes and returns its parts as soon as they are certain.

    Args:
        tools: those that may be called; without any, marks of calls are text.
        thinks: whether the prompt has already opened the reasoning.
        is_call: the whole text is one call as JSON, because a call was required.
    """

    def __init__(self, tools: tuple[Tool, ...], *, thinks: bool, is_call: bool) -> None:
        self._names = {tool.name for tool in tools}
        self._thinks, self._is_call = thinks, is_call
        self._form: _Form | None = None
        self._held = ""
        self._has_spoken = self._has_thought = False

    def feed(self, text: str) -> list[Part]:
        """More text."""
        self._held += text
        if self._is_call:
            return []
        parts: list[Part] = []
        while (part := self._step()) is not None:
            parts += part
        return parts

    def end(self) -> list[Part]:
        """Nothing comes any more: what was held back."""
        rest, self._held = self._held, ""
        if self._is_call:
            return self._calls(rest, _json_calls) or ([Spoken(rest)] if rest else [])
        if self._form is not None:
            form, self._form = self._form, None
            return self._calls(rest, form.read) or [Spoken(form.opens + rest)]
        return self._plain(rest)

    def _step(self) -> list[Part] | None:
        """One part out of what is held; None if more text is needed."""
        if self._form is not None:
            end = self._held.find(self._form.closes)
            if end < 0:
                return None
            inside, self._held = self._held[:end], self._held[end + len(self._form.closes) :]
            form, self._form = self._form, None
            return self._calls(inside, form.read) or [Spoken(form.opens + inside + form.closes)]
        marks = [_THOUGHT] if self._thinks else self._marks()
        at, mark = min(((self._held.find(each), each) for each in marks if each in self._held), default=(-1, ""))
        if at < 0:
            return self._certain(marks)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        parts = self._plain(before)
        if mark in (_THINKS, _THOUGHT):
            self._thinks = mark == _THINKS
        else:
            self._form = next(form for form in FORMS if form.opens == mark)
        return parts

    def _marks(self) -> list[str]:
        calls = [form.opens for form in FORMS] if self._names else []
        # Reasoning comes first; later such a mark is something that the answer is about.
        return calls if self._has_spoken else [_THINKS, *calls]

    def _certain(self, marks: list[str]) -> list[Part] | None:
        """All but an end that may be the beginning of a mark."""
        keep = max(
            (n for mark in marks for n in range(1, min(len(mark), len(self._held) + 1)) if self._held[-n:] == mark[:n]),
            default=0,
        )
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return self._plain(text) or None

    def _plain(self, text: str) -> list[Part]:
        if self._thinks:
            text = text if self._has_thought else text.lstrip()
            self._has_thought = self._has_thought or bool(text)
            return [Thought(text)] if text else []
        text = text if self._has_spoken else text.lstrip("\n")
        self._has_spoken = self._has_spoken or bool(text.strip())
        return [Spoken(text)] if text else []

    def _calls(self, text: str, read: Callable[[str], list[tuple[str, str]]]) -> list[Part]:
        calls = read(text.strip())
        if not calls or not {name for name, _ in calls} <= self._names:
            return []
        self._has_spoken = True
        return [ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments) for name, arguments in calls]
