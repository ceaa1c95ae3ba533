"""What a chat template can be told about thinking before the answer, and of tools, read from its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.common.config import Thinking
from engine.families.replies.reader import form_of

_BEGINS, _ENDS = re.compile(r"\{[%{]"), re.compile(r"[%}]\}")
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
    """Whether answers to prompts of this template may begin with reasoning."""
    form = form_of(family)
    return form.has_channels or any(closes in template for _opens, closes in form.thoughts)


def takes_tools(template: str) -> bool:
    """Whether a template tells the model which tools it may call."""
    return "tools" in template


def _reading(template: str) -> Callable[[re.Pattern[str]], bool]:
    """Says whether a pattern is in the template's code; what it writes, and texts in it, do not count."""
    parts = (_ENDS.split(part, maxsplit=1)[0] for part in _BEGINS.split(template)[1:])
    code = _TEXTS.sub("''", " ; ".join(parts))
    return lambda pattern: pattern.search(code) is not None
