"""An answer's text is taken apart the same way however it is cut into pieces, and nothing of it is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.chat import Tool, ToolCall
from engine.serving.replies import Part, ReplyReader, Spoken, Thought

WEATHER = Tool("weather", "", '{"type": "object"}')
TEXTS = [
    "Just text with < and <tool and [TOOL.",
    "<think>Hm, <tool_call> is a mark.</think>\n\nParis.",
    "<think>only thought, cut",
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    '<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>'
    '<tool_call>{"name": "weather"}</tool_call>',
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>",
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
    '<|tool_call_start|>[{"name": "weather", "arguments": {}}]<|tool_call_end|>done',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> text',
    "<tool_call>not a call</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {"city": "cut',
    "<tool_call>" + "[" * 3000,
]


def _parts(pieces: list[str], *, thinks: bool = False, is_call: bool = False, tools: bool = True) -> list[Part]:
    reader = ReplyReader((WEATHER,) if tools else (), thinks=thinks, is_call=is_call)
    found = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    joined: list[Part] = []
    for part in found:
        last = joined[-1] if joined else None
        if isinstance(part, Spoken) and isinstance(last, Spoken):
            joined[-1] = Spoken(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + part.text)
        else:
            joined.append(part)
    return [ToolCall("", part.name, part.arguments) if isinstance(part, ToolCall) else part for part in joined]


@given(st.data())
def test_how_a_text_is_cut_does_not_matter(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _parts(pieces) == _parts([text])


@given(st.text(alphabet='<>/thinkol_ca[]{}"ab\n', max_size=60))
def test_without_tools_no_text_is_lost(text: str) -> None:
    kept = "".join(part.text for part in _parts([text], tools=False) if isinstance(part, Spoken | Thought))
    for mark in ("<think>", "</think>"):
        text = text.replace(mark, "")
        kept = kept.replace(mark, "")
    assert kept.replace("\n", "").strip() == text.replace("\n", "").strip() or text.strip() == kept.strip()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (TEXTS[3], {"city": "Rome"}),
        (TEXTS[5], {"city": "Rome", "days": 3}),
        (TEXTS[6], {"city": "Rome"}),
        (TEXTS[7], {"city": "Rome"}),
    ],
)
def test_calls_of_every_form_are_read(text: str, arguments: dict[str, object]) -> None:
    (call,) = [part for part in _parts([text]) if isinstance(part, ToolCall)]
    assert (call.name, json.loads(call.arguments)) == ("weather", arguments)


def test_calls_of_unknown_tools_and_broken_calls_stay_text() -> None:
    for text in (TEXTS[9], TEXTS[10], TEXTS[11], TEXTS[12]):
        assert _parts([text]) == [Spoken(text)]


def test_reasoning_that_the_prompt_opened_ends_at_its_mark() -> None:
    assert _parts(["I wonder", "</th", "ink>\n\nYes."], thinks=True) == [Thought("I wonder"), Spoken("Yes.")]


def test_a_required_call_is_the_whole_text() -> None:
    text = '{"name":"weather","arguments":{"city":"Rome"}}'
    assert _parts([text[:9], text[9:]], is_call=True) == [ToolCall("", "weather", '{"city": "Rome"}')]
    assert _parts([text[:20]], is_call=True) == [Spoken(text[:20])]
