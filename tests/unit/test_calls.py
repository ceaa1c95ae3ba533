"""Calls in every form that a family writes: what was meant is read, and what is no call goes on as text."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.chat import Tool, ToolCall
from engine.families.replies.calls import NEST
from engine.families.replies.reader import Part, Spoken, Thought, form_of, reply_reader

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "size": {"type": "number"},
        "wet": {"type": "boolean"},
        "zip": {"$ref": "#/$defs/zip"},
        "more": {"type": "object"},
        "many": {"type": "array"},
    },
    "$defs": {"zip": {"type": "string"}},
}
TOOLS = (Tool("weather", "", json.dumps(SCHEMA)), Tool("weather_now", "", json.dumps(SCHEMA)))
D = "\uff5c"  # the bar in DeepSeek's marks
Call = tuple[str, dict[str, Any]]


def parts_of(text: str, family: str, cuts: list[int] | None = None, *, thinks: bool = False) -> list[Part]:
    """The parts of an answer, neighbours of a kind joined, and calls without their ids."""
    reader, found = reply_reader(family, TOOLS, thinks=thinks, is_call=False), list[Part]()
    cuts = sorted(cuts or [])
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.feed(text[begin:end])
    joined: list[Part] = []
    for part in [*found, *reader.end()]:
        last = joined[-1] if joined else None
        if isinstance(part, ToolCall):
            joined.append(ToolCall("", part.name, part.arguments))
        elif type(part) is type(last) and not isinstance(last, ToolCall | None):
            joined[-1] = type(part)(last.text + part.text)
        else:
            joined.append(part)
    return joined


def calls_of(parts: list[Part]) -> list[Call]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = [part for part in parts if isinstance(part, ToolCall)]
    return [(call.name, json.loads(call.arguments.encode(), parse_constant=refuse)) for call in found]


def said_in(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Spoken))


# Renderers as the families' own chat templates write calls.


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: list[Call], key: str = "arguments") -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': name, key: given})}\n</tool_call>" for name, given in calls)


def _coder(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        rows = (f"<parameter={key}>\n{v if isinstance(v, str) else str(v)}\n</parameter>\n" for key, v in given.items())
        return f"<tool_call>\n<function={name}>\n{''.join(rows)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        rows = (f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in given.items())
        return f"<tool_call>{name}\n{''.join(rows)}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax(calls: list[Call]) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        rows = (f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in given.items())
        return f'<invoke name="{name}">\n{"".join(rows)}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _dsml(calls: list[Call]) -> str:
    mark = f"{D}DSML{D}"

    def one(name: str, given: dict[str, Any]) -> str:
        rows = (
            f'<{mark}parameter name="{key}" string="{_json(isinstance(v, str))}">{_plain(v)}</{mark}parameter>\n'
            for key, v in given.items()
        )
        return f'<{mark}invoke name="{name}">\n{"".join(rows)}</{mark}invoke>\n'

    return f"<{mark}function_calls>\n{''.join(one(*call) for call in calls)}</{mark}function_calls>"


def _deepseek(calls: list[Call]) -> str:
    each = (
        f"<{D}tool▁call▁begin{D}>{name}<{D}tool▁sep{D}>{_json(given)}<{D}tool▁call▁end{D}>" for name, given in calls
    )
    return f"<{D}tool▁calls▁begin{D}>{''.join(each)}<{D}tool▁calls▁end{D}>"


def _deepseek_r1(calls: list[Call]) -> str:
    each = (
        f"<{D}tool▁call▁begin{D}>function<{D}tool▁sep{D}>{name}\n```json\n{_json(given)}\n```<{D}tool▁call▁end{D}>"
        for name, given in calls
    )
    return f"<{D}tool▁calls▁begin{D}>{chr(10).join(each)}<{D}tool▁calls▁end{D}>"


def _kimi(calls: list[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{_json(given)}<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _listed(mark: str) -> Callable[[list[Call]], str]:
    return lambda calls: mark + _json([{"name": name, "arguments": given} for name, given in calls])


def _python(calls: list[Call]) -> str:
    each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(each)}]"


def _gemma(calls: list[Call]) -> str:
    def value(said: Any) -> str:
        if isinstance(said, str):
            return f'<|"|>{said}<|"|>'
        if isinstance(said, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in said.items()) + "}"
        return f"[{','.join(map(value, said))}]" if isinstance(said, list) else _json(said)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


def _harmony(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


def _fenced(calls: list[Call]) -> str:
    return "\n".join(f"```json\n{_json({'name': name, 'arguments': given})}\n```" for name, given in calls)


FORMS: dict[str, tuple[str, Callable[[list[Call]], str]]] = {
    "hermes": ("qwen3_moe", _hermes),
    "coder": ("qwen3_moe", _coder),
    "glm": ("glm4_moe", _glm),
    "minimax": ("minimax_m2", _minimax),
    "deepseek v3.2": ("deepseek_v3", _dsml),
    "deepseek v3.1": ("deepseek_v3", _deepseek),
    "deepseek r1": ("deepseek_v3", _deepseek_r1),
    "kimi": ("kimi_k25", _kimi),
    "mistral": ("mistral4", _mistral),
    "mistral nemo": ("mistral", _listed("[TOOL_CALLS]")),
    "granite": ("granitemoe", _listed("<|tool_call|>")),
    "lfm": ("lfm2_moe", lambda calls: f"<|tool_call_start|>{_python(calls)}<|tool_call_end|>"),
    "llama 4": ("llama4", _python),
    "llama 3": ("llama", lambda calls: f"<|python_tag|>{_hermes(calls[:1], 'parameters')[12:-13]}"),
    "gemma": ("gemma4_text", _gemma),
    "gpt-oss": ("gpt_oss", _harmony),
    "coder 2.5": ("qwen2", _fenced),
    "unknown": ("", _hermes),
}
MARKS = [
    "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=days>", "</parameter>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="weather">', "</invoke>", '<parameter name="days">',
    "<minimax:tool_call>", "</minimax:tool_call>", f"<{D}tool▁call▁end{D}>", f"</{D}DSML{D}parameter>", "[TOOL_CALLS]",
    "[ARGS]", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call|>",
    "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|end|>", "<|call|>",
    "```", "<think>", "</think>", '{"name": "weather"', "{'", '"', "'", "\\", "}", "]", ")",
]  # fmt: skip
OPENING = [mark for mark in MARKS if mark[0] in "<[" and "/" not in mark] + [f"<{D}tool▁calls▁begin{D}>"]

_words = st.sampled_from(["a", "Rome", "12", "true", "null", "ä", "😀", "\t", "x\ny", "</b>", "C:\\new", "NaN"])
_texts = st.lists(st.one_of(_words, st.sampled_from(MARKS).map(lambda mark: f"{mark} b")), max_size=4).map(" ".join)
_numbers = st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": _texts,
        "days": st.integers(),
        "size": _numbers,
        "wet": st.booleans(),
        "zip": st.sampled_from(["007", "1e5", "null", "[1]"]),
        "more": st.dictionaries(st.sampled_from("abc"), _values, max_size=3),
        "many": st.lists(_values, max_size=3),
    },
)
_calls = st.lists(st.tuples(st.sampled_from(["weather", "weather_now"]), _arguments), min_size=1, max_size=3)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=13)
@given(data=st.data())
def test_what_a_family_writes_reads_back_equal_however_it_is_cut(form: str, data: st.DataObject) -> None:
    family, written = FORMS[form]
    calls = data.draw(_calls)[: 1 if form == "llama 3" else 3]
    text = written(calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    parts = parts_of(text, family, cuts)
    assert (calls_of(parts), said_in(parts).strip()) == (calls, "")


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("family", sorted({family for family, _written in FORMS.values()}))
@settings(max_examples=13)
@given(data=st.data())
def test_any_text_streams_to_the_parts_of_the_whole(family: str, data: st.DataObject) -> None:
    piece = st.one_of(
        _words, st.sampled_from(MARKS), st.sampled_from(["weather", "city", ">", ":", ",", "=", " ", "\n"])
    )
    real = _calls.map(FORMS[next(form for form in FORMS if FORMS[form][0] == family)][1])
    text = "".join(data.draw(st.lists(piece | real, max_size=12)))
    thinks = data.draw(st.booleans())
    whole = parts_of(text, family, thinks=thinks)
    assert parts_of(text, family, data.draw(st.lists(st.integers(0, len(text)), max_size=8)), thinks=thinks) == whole
    assert parts_of(text, family, list(range(1, len(text))), thinks=thinks) == whole
    calls_of(whole)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("llama 4", "gpt-oss")])
def test_a_mark_in_prose_holds_nothing_and_hides_no_call(form: str) -> None:
    family, written = FORMS[form]
    call: Call = ("weather", {"city": "Rome"})
    opens = written([call]).split("weather")[0].split("{")[0].strip()
    reader, said = reply_reader(family, TOOLS, thinks=False, is_call=False), ""
    text = f"Write {opens} first, then {opens} {{braces}}, then much more; and so on."
    for at, character in enumerate(text):
        said += "".join(part.text for part in reader.feed(character) if isinstance(part, Spoken))
        assert at - len(said) < len(opens) + 12
    assert reader.end() == [Spoken(text[len(said) :])] or said == text
    parts = parts_of(f"{text}\n{written([call])}", family)
    assert (said_in(parts), calls_of(parts)) == (f"{text}\n", [call])


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("llama 4", "gpt-oss", "coder 2.5")])
def test_a_call_within_reasoning_ends_it(form: str) -> None:
    family, written = FORMS[form]
    call: Call = ("weather", {"city": "Rome"})
    opens, closes = form_of(family).thoughts[0]
    for after in ("", closes):
        for before, thinks in ((opens, False), ("", True)):
            parts = parts_of(f"{before}Hm.\n{written([call])}\n{after}\nSaid.", family, thinks=thinks)
            assert (parts[0], calls_of(parts), said_in(parts).strip()) == (Thought("Hm.\n"), [call], "Said.")


def _nested(given: dict[str, Any]) -> str:
    def value(each: Any) -> str:
        if isinstance(each, dict):
            return "".join(f"{NEST}<{key}>{value(inner)}{NEST}</{key}>" for key, inner in each.items())
        return value({"item": each[0]}) + value({"item": each[1]}) if isinstance(each, list) else str(each)

    return f'{NEST}<tool_call>\n{NEST}<invoke name="weather">{value(given)}{NEST}</invoke>\n'


CITY, DAYS = {"city": "Rome"}, {"city": "Rome", "days": 3}
PARAMETER = "<parameter=city>\nRome\n"
BROKEN: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("qwen3_moe", f"<function=weather>\n{PARAMETER}</parameter>\n</function>\n</tool_call>", [CITY]),
    ("qwen3_moe", f"<function=weather>\n{PARAMETER}</parameter>\n</function>", [CITY]),
    ("qwen3_moe", f"<tool_call>\n<function=weather>\n{PARAMETER}</function>\n</tool_call>", [CITY]),
    ("qwen3_moe", f"<tool_call>\n<function=weather>\n{PARAMETER}</parameter>\n</tool_call>", [CITY]),
    (
        "qwen3_moe",
        f"<tool_call>\n<function=weather>\n{PARAMETER}</tool_call>\n{_coder([('weather', DAYS)])}",
        [CITY, DAYS],
    ),
    (
        "qwen3_moe",
        f"<tool_call>\n<function=weather>\n{PARAMETER}<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [DAYS],
    ),
    (
        "qwen3_moe",
        f"<tool_call>\n<function=weather>\n{PARAMETER}</function>\n<function=weather>\n{PARAMETER}</parameter>\n"
        "</function>\n</tool_call>",
        [CITY, CITY],
    ),
    (
        "qwen3_moe",
        f"<tool_call>\n<function=weather>\n{PARAMETER}</parameter>\n</function>\n<function=unknown>\n</function>",
        [CITY],
    ),
    ("qwen3_moe", "<tool_call>{'name': 'weather', 'arguments': {'city': 'Rome', 'days': 3,}}</tool_call>", [DAYS]),
    ("qwen3_moe", '<tool_call>{"name": "weather", "arguments": null}\n{"name": "weather"}</tool_call>', [{}, {}]),
    ("qwen3_moe", '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}} </tool_call', [CITY]),
    ("glm4_moe", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</tool_call>", [CITY]),
    (
        "glm4_moe",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>",
        [DAYS],
    ),
    ("minimax_m2", '<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>', [CITY]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome\n</invoke>\n', [CITY]),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        [DAYS],
    ),
    (
        "deepseek_v3",
        f'<{D}DSML{D}invoke name="weather">\n<{D}DSML{D}parameter name="city" string="true">Rome</{D}DSML{D}invoke>',
        [CITY],
    ),
    (
        "deepseek_v3",
        f'<{D}tool▁calls▁begin{D}><{D}tool▁call▁begin{D}>weather<{D}tool▁sep{D}>{{"city": "Rome"}}<{D}tool▁call▁end{D}>'
        f'<{D}tool▁call▁begin{D}>weather<{D}tool▁sep{D}>{{"city": "cut',
        [CITY],
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "Rome"}', [CITY]),
    ("minimax_m3_vl", f"{_nested(DAYS)}{NEST}</tool_call>", [DAYS]),
    ("minimax_m3_vl", _nested({"city": "Rome <b>&</b>\n"}), [{"city": "Rome <b>&</b>\n"}]),
    (
        "minimax_m3_vl",
        _nested({"more": {"a": ["x", {"b": "2"}], "c": "3"}}),
        [{"more": {"a": ["x", {"b": 2}], "c": 3}}],
    ),
    ("minimax_m3_vl", f'{NEST}<tool_call>\n{NEST}<invoke name="weather">{NEST}</invoke>', [{}]),
    ("minimax_m1", '<tool_calls>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_calls>', [CITY]),
    ("gpt_oss", '<|channel|>analysis to=weather<|message|>{"city": "Rome"} <|call|>', [CITY]),
    ("gpt_oss", "<|channel|>commentary to=functions.weather<|message|><|call|>", [{}]),
    ("qwen2", '```\n[{"name": "weather", "arguments": {"city": "Rome"}}]\n```', [CITY]),
]


@pytest.mark.parametrize(("family", "text", "arguments"), BROKEN)
def test_calls_that_are_not_quite_in_form_are_read(family: str, text: str, arguments: list[dict[str, Any]]) -> None:
    for cuts in ([], list(range(1, len(text)))):
        assert [given for _name, given in calls_of(parts_of(text, family, cuts))] == arguments


def test_a_value_may_hold_whole_calls() -> None:
    inner = _coder([("weather", DAYS)])
    calls: list[Call] = [("weather", {"city": f"Write:\n{inner}\nso.", "days": 1}), ("weather", {"city": inner})]
    calls.append(("weather", {"city": "<parameter=days> is a tag\n<parameter=size> too"}))
    assert calls_of(parts_of(_coder(calls), "qwen3_moe")) == calls


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "Bob", "arguments": {"city": "Rome"}}\n```',
        '```json\n{"name": "weather"}\n```',
        '```json\n{"name": "weather", "arguments": "{}"}\n```',
        '```json\n{"name": "weather", "arguments": {}}\nand so on```',
        '```python\nprint({"name": "weather", "arguments": {}})\n```',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": 007}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 200 + "1" + "}" * 201 + "</tool_call>",
        f"<tool_call>\n<function=weather>\n{PARAMETER}",
    ],
)
def test_what_is_no_call_is_said(text: str) -> None:
    assert parts_of(text, "qwen2") == parts_of(text, "qwen2", list(range(1, len(text)))) == [Spoken(text)]


def test_an_answer_of_json_streams_where_calls_need_no_mark() -> None:
    reader = reply_reader("llama", TOOLS, thinks=False, is_call=False)
    assert reader.feed('{"city": "') == [Spoken('{"city": "')]


@pytest.mark.parametrize(("number", "read"), [("NaN", None), ("-Infinity", None), ("-1e999", -1.7976931348623157e308)])
def test_what_json_cannot_say_is_null_or_the_largest_number_in_every_form(number: str, read: float | None) -> None:
    for form, (family, written) in FORMS.items():
        text = written([("weather", {"size": 123.25, "more": {"a": [123.25]}})]).replace("123.25", number)
        calls = calls_of(parts_of(text, family))
        assert calls == [("weather", {"size": read, "more": {"a": [read]}})], form


def test_halves_of_surrogate_pairs_are_joined_or_replaced() -> None:
    text = r'<tool_call>{"name": "weather", "arguments": {"city": "\ud83d \ud83d\ude00", "\udc00": 1}}</tool_call>'
    assert calls_of(parts_of(text, "qwen3_moe")) == [("weather", {"city": "\ufffd \U0001f600", "\ufffd": 1})]
    reader = reply_reader("qwen3_moe", TOOLS, thinks=False, is_call=True)
    (call,) = [*reader.feed(text[11:-12]), *reader.end()]
    assert call.arguments.encode()


_SELF: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}
_DEFS = {
    "zip": {"type": "string"},
    "zips": {"$ref": "#/$defs/zip"},
    "a/b": {"type": "string"},
    "loop": _SELF,
    **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(60)},
    "d60": {"type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"$ref": "#/$defs/zips"}, "0123", "0123"),
        ({"$ref": "#/$defs/a~1b"}, "12", "12"),
        ({"$ref": "#/$defs/none"}, "12", 12),
        ({"$ref": "#zip"}, "12", 12),
        ({"$ref": "#/$defs/d0"}, "12", "12"),
        ({"$ref": "#/$defs/loop"}, "true", True),
        ({"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/zip"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/zip"}, {"description": "a zip"}]}, "12", "12"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, "12", 12),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "object"}, "{'a': [1, None, True, ('b',)]}", {"a": [1, None, True, ["b"]]}),
        ({"type": "array"}, "['it\\'s', \"\\x41\"]", ["it's", "A"]),
        ({"type": "array"}, "Rome, Oslo", "Rome, Oslo"),
        ({"type": "object"}, "{'a': __import__('os')}", "{'a': __import__('os')}"),
        ({"type": ["string", "object"]}, "{'a': 1}", {"a": 1}),
        ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "number"}, "1e999", 1.7976931348623157e308),
        ({}, "NaN", "NaN"),
        ({}, "{'a': 1}", "{'a': 1}"),
    ],
)
def test_values_without_quotes_follow_the_whole_schema(schema: object, text: str, value: object) -> None:
    for place in ({"properties": {"x": schema}}, {"$ref": "#/$defs/all"}, {"additionalProperties": schema}):
        whole = {"type": "object", **place, "$defs": {**_DEFS, "all": {"allOf": [{"properties": {"x": schema}}]}}}
        reader = reply_reader("qwen3_moe", (Tool("f", "", json.dumps(whole)),), thinks=False, is_call=False)
        said = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
        ((name, given),) = calls_of([*reader.feed(said), *reader.end()])
        assert (name, given) == ("f", {"x": value})


def test_broken_calls_are_read_again_in_linear_time_and_hide_no_later_one() -> None:
    broken = f'<tool_call>{{"name": "weather", "arguments": {{"city": "{"x" * 1200}" oops '
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert [name for name, _ in calls_of(parts_of(broken * 30 + call, "qwen3_moe"))] == ["weather"]
    nested = '<tool_call>{"name": "weather", "arguments": {"city": ["' * 3000
    for family, text in (("qwen3_moe", nested), ("glm4_moe", "<tool_call>weather<arg_key>city</arg_key>" * 3000)):
        reader = reply_reader(family, TOOLS, thinks=False, is_call=False)
        reader.feed(text)
        reader.end()
        assert reader._again <= 10_000 + 6 * len(text)  # type: ignore[attr-defined]
