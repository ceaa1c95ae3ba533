"""How answers hold reasoning and calls of tools, by family: data, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine.families.replies.calls import (
    DSML,
    MINIMAX_TAGS,
    NEST,
    QWEN_TAGS,
    Arriving,
    Calls,
    Reading,
    Tools,
    behind,
    braced_calls,
    fenced_calls,
    json_calls,
    kimi_calls,
    mistral_calls,
    nested_calls,
    python_calls,
    separated_calls,
    tool_call,
)

ReadCalls = Callable[[Arriving, Tools], Reading[Calls]]


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls behind a mark.

    Attributes:
        opens: the mark before them.
        read: reads them, from behind the mark.
        closes: the marks one of which may stand after them.
        inner: marks within them.
        is_said: whether the mark is an ordinary one, so that within reasoning it says nothing.
    """

    opens: str
    read: ReadCalls
    closes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    is_said: bool = False


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a family writes.

    Attributes:
        thoughts: marks before and after the reasoning.
        calls: where calls stand.
        left_out: marks without a meaning of their own.
        bare: reads an answer that consists of calls alone, without any mark.
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
        found += [mark for form in self.calls for mark in (form.opens, *form.closes, *form.inner)]
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


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

_TOOL_CALL = (
    CallForm("<tool_call>", tool_call, ("</tool_call>",)),
    CallForm(QWEN_TAGS.opens, QWEN_TAGS.read_opened, ("</tool_call>",)),
)
HERMES = ReplyForm(calls=_TOOL_CALL)
"""Hermes, Qwen, GLM, Granite 4; Qwen's coders leave the outer mark out at times."""
QWEN2 = ReplyForm(calls=(*_TOOL_CALL, CallForm("```", fenced_calls, ("```",), is_said=True)))
"""Qwen2.5-Coder writes its calls in fences."""
HARMONY = ReplyForm(has_channels=True)
MISTRAL = ReplyForm(
    thoughts=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
    calls=(CallForm("[TOOL_CALLS]", mistral_calls, inner=("[ARGS]", "[CALL_ID]")),),
)
GRANITE = ReplyForm(calls=(CallForm("<|tool_call|>", json_calls), *_TOOL_CALL), left_out=("<response>", "</response>"))
LFM = ReplyForm(calls=(CallForm("<|tool_call_start|>", python_calls, ("<|tool_call_end|>",)),))
LLAMA = ReplyForm(
    calls=(
        CallForm("<|python_start|>", python_calls, ("<|python_end|>",)),
        CallForm("<|python_tag|>", python_calls),
        *_TOOL_CALL,
    ),
    bare=python_calls,
)
"""Llama 3.1 and later; `<tool_call>` is what many models made from them were taught."""
GEMMA = ReplyForm(
    thoughts=(("<|channel>thought\n", "<channel|>"),),
    calls=(CallForm("<|tool_call>", braced_calls, ("<tool_call|>",), ('<|"|>',)),),
)
MINIMAX = ReplyForm(
    calls=(
        CallForm("<minimax:tool_call>", MINIMAX_TAGS.read, MINIMAX_TAGS.around),
        CallForm(MINIMAX_TAGS.opens, MINIMAX_TAGS.read_opened, MINIMAX_TAGS.around),
    )
)
COHERE = ReplyForm(
    thoughts=(("<|START_THINKING|>", "<|END_THINKING|>"),),
    calls=(CallForm("<|START_ACTION|>", json_calls, ("<|END_ACTION|>",)),),
    left_out=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
_IN_TAGS = CallForm("<tool_calls>", json_calls, ("</tool_calls>",))
MINIMAX_M1 = ReplyForm(calls=(_IN_TAGS,))
MINIMAX_M3 = ReplyForm(
    thoughts=(("<mm:think>", "</mm:think>"), *MINIMAX.thoughts),
    calls=(CallForm(f"{NEST}<tool_call>", nested_calls, (f"{NEST}</tool_call>",), (NEST,)), *MINIMAX.calls),
)
DEEPSEEK = ReplyForm(
    calls=(
        CallForm("<｜tool▁calls▁begin｜>", behind("<｜tool▁call▁begin｜>", separated_calls), ("<｜tool▁calls▁end｜>",)),
        CallForm(
            "<｜tool▁call▁begin｜>",
            separated_calls,
            ("<｜tool▁calls▁end｜>",),
            ("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
        CallForm("<｜DSML｜function_calls>", DSML.read, DSML.around),
        CallForm("<｜DSML｜tool_calls>", DSML.read, DSML.around),
        CallForm(DSML.opens, DSML.read_opened, DSML.around),
    ),
)
_KIMI_END = "<|tool_calls_section_end|>"
KIMI = ReplyForm(
    calls=(
        CallForm("<|tool_calls_section_begin|>", behind("<|tool_call_begin|>", kimi_calls), (_KIMI_END,)),
        CallForm(
            "<|tool_call_begin|>",
            kimi_calls,
            (_KIMI_END,),
            ("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
)
COMMON = ReplyForm(
    thoughts=(("<think>", "</think>"), ("[THINK]", "[/THINK]")),
    calls=(
        *_TOOL_CALL,
        *LFM.calls,
        *MISTRAL.calls,
        _IN_TAGS,
        CallForm("<TOOLCALL>", json_calls, ("</TOOLCALL>",)),
        CallForm("<longcat_tool_call>", json_calls, ("</longcat_tool_call>",)),
    ),
)
"""For families without a form of their own: what fine-tuned models of any family write, and Hunyuan, Jamba,
Nemotron and LongCat."""
