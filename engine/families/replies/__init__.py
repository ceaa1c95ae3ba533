"""How answers hold reasoning and calls of tools, by family: data, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.families.replies.call_texts import (
    Calls,
    Schemas,
    braced_calls,
    braced_texts,
    invoke_calls,
    json_calls,
    json_texts,
    later_json_texts,
    mistral_calls,
    python_calls,
    python_texts,
    separated_calls,
    tool_call,
)

ReadCalls = Callable[[str, Schemas], Calls]


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls between two marks.

    Attributes:
        opens: the mark before them.
        closes: the mark after them; empty if they end with the answer, or where the next ones begin.
        texts: what a text is in what stands inside, where a mark means nothing; None if there is nothing to tell it by.
    """

    opens: str
    closes: str
    read: ReadCalls
    texts: Callable[[str], re.Pattern[str] | None] = lambda _inside: None


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a family writes.

    Attributes:
        thoughts: marks before and after the reasoning.
        calls: where calls stand.
        left_out: marks without a meaning of their own.
        bare: reads an answer that consists of calls alone, without any mark; it then begins as `bare_begins` says.
        has_channels: the answer is messages of OpenAI's harmony format, each with a head that says what it is.
    """

    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    calls: tuple[CallForm, ...] = ()
    left_out: tuple[str, ...] = ()
    bare: ReadCalls | None = None
    has_channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that it must see, also where the vocabulary counts them as control tokens."""
        if self.has_channels:
            return HARMONY_MARKS
        found = list(self.marks_of_thoughts)
        found += [mark for form in self.calls for mark in (form.opens, form.closes, *_INNER_MARKS) if mark]
        return tuple(dict.fromkeys([*found, *self.left_out]))

    @property
    def marks_of_thoughts(self) -> tuple[str, ...]:
        """Those that it must see where no tool can be called."""
        return HARMONY_MARKS if self.has_channels else tuple(mark for pair in self.thoughts for mark in pair)

    @property
    def begins_thought(self) -> tuple[str, ...]:
        """With what reasoning begins, as far as it is one token."""
        return ("<|channel|>",) if self.has_channels else tuple(opens.strip() for opens, _closes in self.thoughts)

    @property
    def ends_thought(self) -> re.Pattern[str]:
        """Matches a text that ends where the answer may begin after the reasoning."""
        if self.has_channels:
            return re.compile(r"<\|channel\|>\s*(?!analysis)[^<\s][^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>$")
        return re.compile(f"(?:{'|'.join(re.escape(closes) for _opens, closes in self.thoughts)})\\s*$")


_INNER_MARKS = ("[ARGS]", "[CALL_ID]", '<|"|>', "<｜tool▁sep｜>")
"""Marks within calls."""
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_TOOL_CALL = CallForm("<tool_call>", "</tool_call>", tool_call, json_texts)
HERMES = ReplyForm(calls=(_TOOL_CALL,))
"""Hermes, Qwen, GLM, Granite 4."""
HARMONY = ReplyForm(has_channels=True)
MISTRAL = ReplyForm(
    thoughts=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
    calls=(CallForm("[TOOL_CALLS]", "", mistral_calls, later_json_texts),),
)
GRANITE = ReplyForm(
    calls=(CallForm("<|tool_call|>", "", json_calls, json_texts), _TOOL_CALL), left_out=("<response>", "</response>")
)
LFM = ReplyForm(calls=(CallForm("<|tool_call_start|>", "<|tool_call_end|>", python_calls, python_texts),))
LLAMA = ReplyForm(
    calls=(
        CallForm("<|python_start|>", "<|python_end|>", python_calls, python_texts),
        CallForm("<|python_tag|>", "", python_calls, python_texts),
        _TOOL_CALL,
    ),
    bare=python_calls,
)
"""Llama 3.1 and later; `<tool_call>` is what many models made from them were taught."""
GEMMA = ReplyForm(
    thoughts=(("<|channel>thought\n", "<channel|>"),),
    calls=(CallForm("<|tool_call>", "<tool_call|>", braced_calls, braced_texts),),
)
MINIMAX = ReplyForm(calls=(CallForm("<minimax:tool_call>", "</minimax:tool_call>", invoke_calls),))
DEEPSEEK = ReplyForm(
    calls=(
        CallForm("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", separated_calls, later_json_texts),
        CallForm("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", invoke_calls),
        CallForm("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", invoke_calls),
    ),
    left_out=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
COMMON = ReplyForm(
    thoughts=(("<think>", "</think>"), ("[THINK]", "[/THINK]")), calls=(_TOOL_CALL, *LFM.calls, *MISTRAL.calls)
)
"""For families without a form of their own: what fine-tuned models of any family write."""
