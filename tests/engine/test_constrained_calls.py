"""Whatever the model would like to write, answers satisfy what was asked of them, and calls of tools their schemas."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool, ToolCall, ToolChoice
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, never_cancelled
from engine.families.replies.calls import NEST
from engine.families.replies.reader import Spoken, form_of, reply_reader
from engine.runtime.decode.constrained import ConstrainedAnswer, ConstrainedAnswers
from engine.runtime.decode.constrained_calls import CallGrammars, ConstrainedCalls
from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.engine import Engine
from tests.engine.tiny_tokenizer import EOS, VOCABULARY, save_tiny_tokenizer

FORMS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name: (model_type, what its template shows, marks that are control tokens)
    "hermes": ("qwen3_moe", "tools <tool_call>", ()),
    "control": ("granitemoehybrid", "tools <tool_call>", ("<tool_call>", "</tool_call>")),
    "coder": ("qwen3_moe", "tools <tool_call>\n<function=example>", ()),
    "glm": ("glm4_moe", "tools <tool_call> <arg_key>", ()),
    "granite": ("granitemoe", "tools <|tool_call|>", ("<|tool_call|>",)),
    "mistral": ("mistral", "tools [TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "mistral-args": ("mistral", "tools [TOOL_CALLS] [ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek": (
        "deepseek_v3",
        "tools <｜tool▁calls▁begin｜>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "deepseek-fenced": ("deepseek_v3", "tools <｜tool▁calls▁begin｜> ```json", ()),
    "dsml": ("deepseek_v32", "tools <｜DSML｜function_calls>", ()),
    "minimax": ("minimax_m2", "tools <minimax:tool_call>", ()),
    "minimax-m3": ("minimax_m3_vl", "tools", (NEST,)),
    "minimax-m3-text": ("minimax_m3_vl", "tools", ()),
    "jamba": ("jamba", "tools <tool_calls>[", ()),
    "lfm": ("lfm2_moe", "tools <|tool_call_start|>", ("<|tool_call_start|>", "<|tool_call_end|>")),
    "llama4": ("llama4_text", "tools <|python_start|>", ("<|python_start|>", "<|python_end|>")),
    "kimi": ("kimi_k2", "tools <|tool_calls_section_begin|>", ()),
    "gemma": ("gemma4", "tools <|tool_call>", ("<|tool_call>", "<tool_call|>", '<|"|>')),
    "cohere": ("cohere2_moe", "tools <|START_ACTION|>", ("<|START_ACTION|>", "<|END_ACTION|>")),
    "gpt-oss": ("gpt_oss", "tools", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")),
    "qwen2": ("qwen2", "tools <tool_call>", ()),
}


ENDS = ("\n</parameter>\n", "</parameter>", "</arg_value>", '<|"|>', NEST, "</｜DSML｜parameter>")


class Model:
    """A tokenizer with a family's marks; what it stands for writes at random."""

    def __init__(self, folder: Path, name: str) -> None:
        self.family, template, special = FORMS[name]
        folder.mkdir()
        save_tiny_tokenizer(folder, template=template)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if special:
            self.tokenizer.add_tokens(list(special), special_tokens=True)
        self.form, self.width = form_of(self.family), len(self.tokenizer)
        ids = self.tokenizer.added_tokens_decoder.items()
        self.shown = [index for index, token in ids if token.special and token.content in self.form.marks]
        self.grammars = CallGrammars(
            ConstrainedAnswers(self.tokenizer, self.width, frozenset({EOS})), self.form, self.tokenizer
        )
        closing = [self.tokenizer.encode(each)[0] for each in '"}])\n,']
        self.closing = torch.zeros(self.width)
        self.closing[closing] = 1.0
        self.ends = [self.tokenizer.encode(mark, add_special_tokens=False) for mark in ENDS]

    def begun(self, tools: list[Tool], choice: ToolChoice) -> ConstrainedCalls | ConstrainedAnswer | None:
        return self.grammars.begin(tools, choice, thinks=False, shown=self.shown)

    def answer(self, held: ConstrainedCalls | ConstrainedAnswer, opens: str, seed: int) -> str:
        """What it writes: what opens a call, and what comes into its mind until that call has ended."""
        generator, text = torch.Generator().manual_seed(seed), IncrementalDetokenizer(self.tokenizer, self.shown)
        written = ""
        for token in self.tokenizer.encode(opens, add_special_tokens=False):
            assert not held.accept(token)
            written += text.feed(token)
        meant: list[int] = []
        turn = 0
        for number in range(3000):
            logits = torch.randn(self.width, generator=generator) + self.closing * min(number / 40, 8)
            if number % 40 > 30 and not meant:  # a text without quotes ends with a mark, which nobody hits by chance
                meant, turn = list(self.ends[turn % len(self.ends)]), turn + 1
            if meant:
                logits[meant.pop(0)] += 100
            token = int(held.restrict(logits).argmax())
            if token == EOS:
                break
            is_over = held.accept(token)
            written += text.feed(token)
            if is_over:
                break
        else:
            raise AssertionError(f"the call did not end: {written[:300]}")
        return written + text.flush()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: Model(folder / name, name) for name in FORMS}


_NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
_PLAIN = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "two words", 'a "quoted" one']},
        {"enum": ["fast", 3, None]},
        {"type": ["string", "null"]},
        {"const": 7},
        {"const": "as it is"},
        {"enum": [1, "2", True, "false"]},
        {"anyOf": [{"enum": ["two words", "7"], "type": "string"}, {"type": "null"}]},
        {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
        {"anyOf": [{"const": "all"}, {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}]},
    ]
)


def _objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], needed: list[bool]) -> dict[str, Any]:
        required = [name for name, is_needed in zip(properties, needed, strict=False) if is_needed]
        extra = {"required": required, "additionalProperties": False}
        return {"type": "object", "properties": properties, **extra}

    return st.builds(
        made, st.dictionaries(_NAMES, schemas, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3)
    )


_SCHEMAS = _objects(
    st.recursive(
        _PLAIN,
        lambda inner: st.one_of(
            st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner), _objects(inner)
        ),
        max_leaves=4,
    )
)
_TOOLS = st.dictionaries(_NAMES, _SCHEMAS, min_size=1, max_size=3)


def _read(model: Model, tools: list[Tool], text: str, *, is_call: bool) -> list[ToolCall]:
    reader = reply_reader(model.family, tuple(tools), thinks=False, is_call=is_call)
    parts = reader.feed(text) + reader.end()
    said = "".join(part.text for part in parts if isinstance(part, Spoken))
    assert not said.strip(), (text, parts)
    return [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas=_TOOLS, seed=st.integers(0, 2**31))
def test_a_required_call_satisfies_its_schema(
    models: dict[str, Model], name: str, schemas: dict[str, Any], seed: int
) -> None:
    model = models[name]
    tools = [Tool(tool, "", json.dumps(schema)) for tool, schema in schemas.items()]
    held = model.begun(tools, ToolChoice(must=True, several=False))
    assert held is not None
    text = model.answer(held, "", seed)
    (call,) = _read(model, tools, text, is_call=isinstance(held, ConstrainedAnswer))[:1]
    jsonschema.validate(json.loads(call.arguments), schemas[call.name])


_COLOURS = Tool(
    "paint",
    "",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None},
                "level": {"allOf": [{"$ref": "#/$defs/Level"}]},
                "itself": {"anyOf": [{"$ref": "#/properties/itself"}, {"$ref": "#/properties/itself"}]},
            },
            "required": ["colour", "level"],
            "$defs": {
                "Colour": {"enum": ["dark red", "blue"], "type": "string"},
                "Level": {"oneOf": [{"const": "auto"}, {"const": "3"}]},
            },
        }
    ),
)


@pytest.mark.parametrize("name", ["coder", "glm", "minimax", "minimax-m3", "dsml", "lfm", "gemma"])
def test_named_values_behind_references_are_the_only_ones(models: dict[str, Model], name: str) -> None:
    """As pydantic writes enumerations, one of them optional; what refers to itself says nothing."""
    for seed in range(3):
        held = models[name].begun([_COLOURS], ToolChoice(must=True, names=("paint",), several=False))
        assert held is not None
        text = models[name].answer(held, "", seed)
        (call,) = _read(models[name], [_COLOURS], text, is_call=isinstance(held, ConstrainedAnswer))
        said = json.loads(call.arguments)
        assert said["colour"] in ("dark red", "blue", None), text
        assert said["level"] in ("auto", "3"), text


OPENS = {
    "hermes": "Let me look. <tool_call>",
    "coder": "<tool_call>\n<function=",
    "glm": "<think>I might <tool_call>x</think>\n<tool_call>",
    "granite": "<|tool_call|>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "lfm": "Now <|tool_call_start|>",
    "gemma": "<|tool_call>",
    "minimax": "<minimax:tool_call>",
    "minimax-m3": f"{NEST}<tool_call>",
    "jamba": "<tool_calls>",
}


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("name", OPENS)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schemas=_TOOLS, seed=st.integers(0, 2**31))
def test_a_call_that_the_model_opens_satisfies_its_schema(
    models: dict[str, Model], name: str, schemas: dict[str, Any], seed: int
) -> None:
    model = models[name]
    tools = [Tool(tool, "", json.dumps(schema)) for tool, schema in schemas.items()]
    held = model.begun(tools, ToolChoice(several=False))
    assert isinstance(held, ConstrainedCalls)
    logits = torch.randn(model.width)
    assert held.restrict(logits) is logits  # free as long as nothing is called
    text = model.answer(held, OPENS[name], seed)
    reader = reply_reader(model.family, tuple(tools), thinks=False, is_call=False)
    calls = [part for part in reader.feed(text) + reader.end() if isinstance(part, ToolCall)]
    assert calls, text
    jsonschema.validate(json.loads(calls[0].arguments), schemas[calls[0].name])


CODER = os.environ.get("SWITCHYARD_CODER", "")


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path(CODER).is_file(), reason="SWITCHYARD_CODER names no GGUF file")
@pytest.mark.timeout(4 * 3600)
def test_all_calls_of_a_small_real_model_satisfy_a_hundred_random_schemas() -> None:
    """Made for Qwen2.5-Coder-1.5B-Instruct."""
    engine, calls, without = Engine(), 0, 0
    engine.load(EngineConfig(CODER, device="cpu"), on_progress=lambda _done, _total: None, cancelled=never_cancelled)

    @settings(max_examples=100, derandomize=True, deadline=None, phases=[Phase.generate], database=None)
    @given(schemas=_TOOLS, seed=st.integers(0, 2**31))
    def asked(schemas: dict[str, Any], seed: int) -> None:
        nonlocal calls, without
        tools = tuple(Tool(tool, "", json.dumps(schema)) for tool, schema in schemas.items())
        words = f"Call the tool {tools[0].name}, with arguments that you make up."
        result = engine.generate(
            [ChatMessage("user", words)],
            SamplingParams(temperature=0.7, seed=seed, max_tokens=300),
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _tokens: None,
            cancelled=never_cancelled,
            tools=tools,
        )
        for call in result.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        calls += len(result.calls)
        without += not result.calls

    try:
        asked()
    finally:
        engine.unload()
    sys.stdout.write(f"{calls} calls, none in {without} of 100 answers\n")
    assert without < 40


_WEATHER = Tool(
    "weather",
    "",
    json.dumps(
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        }
    ),
)


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("qwen2", '```json\n{\n  "name": "weather",\n  "arguments": '),
        ("llama4", '{"name": "weather", "parameters": '),
        ("gpt-oss", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"),
    ],
)
def test_calls_whose_mark_is_an_ordinary_one_are_held_from_their_arguments_on(
    models: dict[str, Model], name: str, opens: str
) -> None:
    model = models[name]
    for seed in range(5):
        held = model.begun([_WEATHER], ToolChoice(several=False))
        assert held is not None
        text = model.answer(held, opens, seed)
        (call,) = _read(model, [_WEATHER], text, is_call=False)
        jsonschema.validate(json.loads(call.arguments), json.loads(_WEATHER.parameters))


@pytest.mark.parametrize("text", ['```json\n{"name": "other"}', "```python\nprint()\n```", "a <tool", "<think>"])
def test_what_is_no_call_stays_free(models: dict[str, Model], text: str) -> None:
    model = models["qwen2"]
    held = model.begun([_WEATHER], ToolChoice())
    for token in model.tokenizer.encode(text):
        held.accept(token)
    logits = torch.randn(model.width)
    assert held.restrict(logits) is logits


def test_several_calls_may_come_and_text_between_them(models: dict[str, Model]) -> None:
    model = models["hermes"]
    held = model.begun([_WEATHER], ToolChoice())
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 1}}\n</tool_call>'
    for token in model.tokenizer.encode(f"{call}\nand\n{call}"):
        assert held.restrict(torch.zeros(model.width))[token].isfinite()
        assert not held.accept(token)
    assert held.restrict(torch.zeros(model.width)).isfinite().all()


def test_a_schema_that_cannot_be_compiled_frees_its_arguments_or_is_refused(models: dict[str, Model]) -> None:
    model = models["hermes"]
    odd = Tool("odd", "", json.dumps({"type": "object", "properties": {"x": {"$ref": "https://example.org/x"}}}))
    held = model.begun([odd, _WEATHER], ToolChoice(several=False))
    assert held is not None
    (call,) = _read(model, [odd, _WEATHER], model.answer(held, "<tool_call>", 3), is_call=False)
    assert isinstance(json.loads(call.arguments), dict)
    with pytest.raises(EngineError, match="schema"):
        model.begun([odd, _WEATHER], ToolChoice(must=True))
    assert model.begun([odd, _WEATHER], ToolChoice(must=True, names=("weather",))) is not None


_WIDTH = VOCABULARY + 8  # models often have more logits than tokens

_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["late", "broken"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def answers(tokenizer: Any) -> ConstrainedAnswers:
    return ConstrainedAnswers(tokenizer, _WIDTH, frozenset({EOS}))


def _random_answer(answers: ConstrainedAnswers, constraint: Constraint, seed: int) -> list[int]:
    """Tokens drawn from random logits until the end is drawn."""
    generator = torch.Generator().manual_seed(seed)
    answer, tokens = answers.begin(constraint), []
    while len(tokens) < 200:
        token = int(answer.restrict(torch.randn(_WIDTH, generator=generator)).argmax())
        if token != EOS:
            tokens.append(token)
        if token == EOS or answer.accept(token):
            assert answer.complete
            return tokens
    raise AssertionError("the answer did not end")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_answers_satisfy_the_schema(tokenizer: Any, answers: ConstrainedAnswers, seed: int) -> None:
    tokens = _random_answer(answers, Constraint(schema=json.dumps(_SCHEMA)), seed)
    value = json.loads(tokenizer.decode(tokens))
    assert value["kind"] in ("late", "broken")
    assert isinstance(value["sure"], bool)
    assert set(value) == {"kind", "sure"}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    choices=st.lists(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12),
        min_size=1,
        max_size=5,
        unique=True,
    ),
)
def test_answers_are_one_of_the_choices(
    tokenizer: Any, answers: ConstrainedAnswers, seed: int, choices: list[str]
) -> None:
    tokens = _random_answer(answers, Constraint(choices=tuple(choices)), seed)
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) in choices


def test_an_answer_knows_when_it_may_end_and_when_it_must(answers: ConstrainedAnswers, tokenizer: Any) -> None:
    answer = answers.begin(Constraint(choices=("a", "ab")))
    assert not answer.complete
    answer.accept(tokenizer.convert_tokens_to_ids("a"))
    assert answer.complete
    allowed = answer.restrict(torch.zeros(_WIDTH)).isfinite().nonzero()[:, 0].tolist()
    assert set(allowed) == {EOS, tokenizer.convert_tokens_to_ids("b")}


@pytest.mark.parametrize("schema", ['{"type": 5}', "no json", '{"$ref": "http://example.com/x"}'])
def test_a_schema_that_cannot_be_followed_is_refused_in_one_sentence(answers: ConstrainedAnswers, schema: str) -> None:
    with pytest.raises(EngineError, match="The schema"):
        answers.begin(Constraint(schema=schema))
