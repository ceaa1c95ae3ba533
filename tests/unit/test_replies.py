"""An answer's text is taken apart the same way however it is cut into pieces, and nothing of it is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.chat import Tool, ToolCall
from engine.families.replies.calls import NEST
from engine.families.replies.reader import Part, Spoken, Thought, form_of, reply_reader

WEATHER = Tool(
    "weather", "", '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}'
)
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


CALL = ToolCall("", "weather", '{"city": "Rome", "days": 3}')
TWICE = [CALL, ToolCall("", "weather", '{"city": "007"}')]
"""Two calls; the second one's argument is a text that would also be a number."""
D = "\uff5c"  # the bar in DeepSeek's marks
FORMS = {
    "gpt-oss": (
        "gpt_oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Rome", "days": 3}<|call|><|start|>assistant to=functions.weather<|channel|>commentary json'
        "<|message|>"
        '{"city": "007"}',
    ),
    "minimax m3": (
        "minimax_m3_vl",
        f"<mm:think>Hm.</mm:think>Let me see.{NEST}<tool_call>\n"
        f'{NEST}<invoke name="weather">{NEST}<city>Rome{NEST}</city>{NEST}<days>3{NEST}</days>{NEST}</invoke>\n'
        f'{NEST}<invoke name="weather">{NEST}<city>007{NEST}</city>{NEST}</invoke>\n{NEST}</tool_call>',
    ),
    "cohere": (
        "cohere2_moe",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Let me see.<|END_TEXT|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome", "days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "weather", "parameters": {"city": "007"}}\n]<|END_ACTION|>',
    ),
    "minimax m1": (
        "minimax_m1",
        "<think>\nHm.\n</think>\nLet me see.\n<tool_calls>\n"
        '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n'
        '{"name": "weather", "arguments": {"city": "007"}}\n</tool_calls>',
    ),
    "llama 3.1": (
        "llama",
        'Let me see.<|python_tag|>[{"name": "weather", "parameters": {"city": "Rome", "days": 3}}, '
        '{"name": "weather", "parameters": {"city": "007"}}]',
    ),
    "qwen3.5 that sees": (
        "qwen3_5_moe",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\n007\n</parameter>\n</function>\n</tool_call>",
    ),
    "llama 4, marked": ("llama4", 'Let me see.<|python_start|>[weather(city="Rome", days=3), weather(city="007")]'),
    "granite 3": (
        "granitemoe",
        "<think>Hm.</think><response>Let me see.</response><|tool_call|>"
        '[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "weather", "arguments": {"city": "007"}}]',
    ),
    "granite 4": (
        "granitemoehybrid",
        'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "007"}}\n</tool_call>',
    ),
    "mistral small": (
        "mistral",
        'Let me see.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome", "days": 3}'
        '[TOOL_CALLS]weather[CALL_ID]abcdefghj[ARGS]{"city": "007"}',
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_family_is_read_in_its_own_form(name: str) -> None:
    family, text = FORMS[name]
    parts = _parts([text], family=family)
    spoken = "".join(part.text for part in parts if isinstance(part, Spoken)).strip()
    thought = "".join(part.text for part in parts if isinstance(part, Thought)).strip()
    assert [part for part in parts if isinstance(part, ToolCall)] == TWICE
    assert (spoken, thought) == ("Let me see." * ("Let me see" in text), "Hm." * ("Hm." in text))


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("name", FORMS)
@given(st.data())
def test_however_it_is_cut_each_form_reads_the_same(name: str, data: st.DataObject) -> None:
    family, text = FORMS[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _parts(pieces, family=family) == _parts([text], family=family)


def test_a_text_that_never_ends_hides_no_end_of_a_call() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Rome}}</tool_call> said'
    assert _parts([text]) == _parts(list(text)) == [Spoken(text)]


def test_a_required_call_may_come_after_a_thought() -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    expected = [Thought("Hm."), ToolCall("", "weather", '{"city": "Rome"}')]
    assert _parts(list(f"Hm.</think>\n\n{call}"), thinks=True, is_call=True) == expected
    assert _parts([call], is_call=True) == expected[1:]


def test_a_prompt_that_opened_a_thought_in_another_form_of_the_family_is_read() -> None:
    assert _parts(["Hm.</think>Paris."], family="mistral", thinks=True) == [Thought("Hm."), Spoken("Paris.")]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama4", "[1] is a footnote."),
        ("llama4", '{"name": "Rome", "is": "a city"}'),
        ("llama4", "[weather] is what you ask about."),
        ("gpt_oss", "Plain words."),
        ("gpt_oss", '{"json": true}'),
        ("mistral", "[TOOL_CALLS]nothing of the kind"),
        ("gemma4_text", "<|tool_call>call:weather{broken<tool_call|>"),
        ("lfm2_moe", "<|tool_call_start|>[weather(__import__('os'))]<|tool_call_end|>"),
        ("lfm2_moe", "<|tool_call_start|>[weather(city=1+1j)]<|tool_call_end|>"),
    ],
)
def test_what_only_looks_like_a_call_is_said(family: str, text: str) -> None:
    assert _parts([text], family=family) == [Spoken(text)]
    assert _parts(list(text), family=family) == [Spoken(text)]


def test_harmony_without_tools_says_what_is_final() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris."
    assert _parts([text], family="gpt_oss", tools=False) == [Thought("Hm."), Spoken("Paris.")]


@pytest.mark.parametrize(
    ("rest", "said"),
    [("<|start|>assistant", []), ("<|end|><|start|>assistant to=", []), ("<|end|>Paris.", [Spoken("Paris.")])],
)
def test_harmony_behind_reasoning_without_a_head_that_is_whole(rest: str, said: list[Part]) -> None:
    for pieces in ([f"<|channel|>analysis<|message|>Hm.{rest}"], [*f"<|channel|>analysis<|message|>Hm.{rest}"]):
        assert _parts(pieces, family="gpt_oss") == [Thought("Hm."), *said]


def _parts(
    pieces: list[str], *, thinks: bool = False, is_call: bool = False, tools: bool = True, family: str = ""
) -> list[Part]:
    reader = reply_reader(family, (WEATHER,) if tools else (), thinks=thinks, is_call=is_call)
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


@given(st.text(alphabet='<>/thinkol_ca[]{}"ab\n', max_size=60))
def test_without_tools_no_text_is_lost(text: str) -> None:
    kept = "".join(part.text for part in _parts([text], tools=False) if isinstance(part, Spoken | Thought))
    for mark in ("<think>", "</think>"):
        text = text.replace(mark, "")
        kept = kept.replace(mark, "")
    assert kept.replace("\n", "").strip() == text.replace("\n", "").strip() or text.strip() == kept.strip()


def test_calls_of_unknown_tools_and_broken_calls_stay_text() -> None:
    for text in (TEXTS[9], TEXTS[10], TEXTS[11], TEXTS[12]):
        assert _parts([text]) == [Spoken(text)]


def test_reasoning_that_the_prompt_opened_ends_at_its_mark() -> None:
    assert _parts(["I wonder", "</th", "ink>\n\nYes."], thinks=True) == [Thought("I wonder"), Spoken("Yes.")]


def test_of_several_calls_only_the_first_is_kept_if_one_is_wanted() -> None:
    reader = reply_reader("qwen3_moe", (WEATHER,), thinks=False, is_call=False, several=False)
    parts = [*reader.feed(TEXTS[4]), *reader.feed("done"), *reader.end()]
    assert len([part for part in parts if isinstance(part, ToolCall)]) == 1
    assert parts[-1] == Spoken("done")


def test_a_required_call_is_the_whole_text() -> None:
    text = '{"name":"weather","arguments":{"city":"Rome"}}'
    assert _parts([text[:9], text[9:]], is_call=True) == [ToolCall("", "weather", '{"city": "Rome"}')]
    assert _parts([text[:20]], is_call=True) == [Spoken(text[:20])]


@pytest.mark.parametrize(
    ("family", "text", "ends"),
    [
        ("qwen3_moe", "<think>Hm.</think>", True),
        ("qwen3_moe", "<think>Hm.</think>\n\n", True),
        ("qwen3_moe", "<think>Hm.", False),
        ("mistral4", "[THINK]Hm.[/THINK]", True),
        ("gpt_oss", "<|channel|>analysis<|message|>", False),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>", True),
        ("gpt_oss", "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>", True),
        ("gpt_oss", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", True),
    ],
)
def test_where_an_answer_may_begin_after_a_thought(family: str, text: str, ends: bool) -> None:
    assert bool(form_of(family).ends_thought.search(text)) is ends


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "007", "007"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "number"}, "3", 3),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "two"]}, "1", 1),
        ({}, "12", 12),
        ({"$ref": "#/x"}, "True", "True"),
    ],
)
def test_arguments_without_quotes_are_what_the_schema_allows(schema: object, text: str, value: object) -> None:
    tool = Tool("f", "", json.dumps({"type": "object", "properties": {"x": schema}}))
    for said in (
        f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>",
        f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>",
    ):
        reader = reply_reader("glm4_moe", (tool,), thinks=False, is_call=False)
        (call,) = [*reader.feed(said), *reader.end()]
        assert json.loads(call.arguments) == {"x": value}


@given(st.data())
def test_how_a_text_is_cut_does_not_matter(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _parts(pieces) == _parts([text])
