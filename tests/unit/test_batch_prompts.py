"""Rows become prompts, or endings that say why not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.batch_files.openai_format import holds_openai_requests
from engine.batch_files.openai_requests import NO_LIMIT
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.prompts import OpenAiPrompts, TemplatePrompts, parse_template, template_of
from engine.batch_files.rows import Answer, Constraint, Row, grammar_of
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError

_SAMPLING = SamplingParams(max_tokens=7)


@pytest.mark.parametrize(("text", "word"), [("no column", "names no column"), ("{{missing}}", "missing")])
def test_a_template_that_does_not_fit_the_input_is_refused(text: str, word: str) -> None:
    with pytest.raises(EngineError, match=word):
        parse_template(text, ["text"])


@pytest.mark.parametrize(
    ("columns", "taken"), [(["x"], "x"), (["id", "Text"], "Text"), (["file", "pages", "text"], "text")]
)
def test_without_a_template_the_obvious_column_is_asked(columns: list[str], taken: str) -> None:
    assert template_of(columns).columns == (taken,)


def test_without_an_obvious_column_a_template_is_asked_for() -> None:
    with pytest.raises(EngineError, match="give a template"):
        template_of(["a", "b"])


def test_rows_that_cannot_be_asked_have_their_ending() -> None:
    prompts = TemplatePrompts(parse_template("{{text}}", ["text"]), "Be brief.", _SAMPLING)
    asked = prompts(Row(0, {"text": "hello"}))
    assert [(message.role, message.content) for message in asked.messages] == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]
    for row, word in (
        (Row(1, {"text": " \n"}), "nothing in"),
        (Row(2, {}), "lacks"),
        (Row(3, {"text": "x"}, problem="is broken"), "is broken"),
    ):
        ending = prompts(row)
        assert ending.row == row.index
        assert ending.failed
        assert word in ending.problem


def _openai(**body: object) -> Row:
    full = {"messages": [{"role": "user", "content": "hi"}], **body}
    return Row(0, {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": full})


def test_an_openai_request_brings_its_own_sampling(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(dict(_openai().fields)) + "\n")
    assert holds_openai_requests(open_source(path))
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    asked = OpenAiPrompts(_SAMPLING)(
        _openai(
            temperature=0.5,
            max_completion_tokens=3,
            stop="END",
            seed=4,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
    )
    assert asked.sampling == SamplingParams(temperature=0.5, max_tokens=3, stop=("END",), seed=4)
    assert json.loads(asked.constraint.schema) == schema


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "picture"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"n": 2}, "several"),
        ({"stream": True}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logprobs": True, "top_logprobs": 3}, "probabilities"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"five": 1}}, "bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_completion_tokens": 0}, "max_tokens is 0"),
        ({"seed": 1.5}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_json": {}, "grammar": "start: /a/"}, "leave one of them out"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"suffix": "x"}, "suffix"),
        ({"min_tokens": 2}, "least length"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "not text"),
    ],
)
def test_openai_requests_that_cannot_be_answered_say_why(body: dict[str, object], word: str) -> None:
    ending = OpenAiPrompts(_SAMPLING)(_openai(**body))
    assert word in ending.problem


def test_what_asks_for_nothing_out_of_the_way_is_answered() -> None:
    harmless = {
        "stream": False,
        "n": 1,
        "tools": [],
        "logprobs": False,
        "presence_penalty": 0,
        "logit_bias": {},
        "modalities": ["text"],
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "stop": None,
        "top_p": 0,
        "seed": -5 - 2**80,
        "max_tokens": 9,
        "max_completion_tokens": 4,
        "response_format": {"type": "text"},
    }
    asked = OpenAiPrompts(_SAMPLING)(_openai(**harmless))
    assert asked.sampling.max_tokens == 4
    assert 0 < asked.sampling.top_p < 1e-3
    assert asked.sampling.seed is not None
    assert 0 <= asked.sampling.seed < 2**63
    anything = OpenAiPrompts(_SAMPLING)(_openai(response_format={"type": "json_schema", "json_schema": {"name": "n"}}))
    assert anything.constraint is not None


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"guided_choice": ["a", "b"]}, Constraint(choices=("a", "b"))),
        ({"structured_outputs": {"regex": "a/b\\/c\n"}}, Constraint(grammar="start: /a\\/b\\/c\\n/")),
        ({"json_schema": {"type": "integer"}}, Constraint(schema='{"type": "integer"}')),
        ({"grammar": 'root ::= "\\u00e9\\x2d\\U0001f600\\n"'}, Constraint(grammar='start: "\u00e9\\x2d\U0001f600\\n"')),
    ],
)
def test_rows_are_constrained_under_every_name(body: dict[str, object], constraint: Constraint) -> None:
    asked = OpenAiPrompts(_SAMPLING)(_openai(**body))
    assert constraint.grammar.strip() in asked.constraint.grammar
    assert replace(asked.constraint, grammar="") == replace(constraint, grammar="")
    assert grammar_of(asked.constraint)


def test_numbers_of_a_row_may_be_written_as_others_write_them() -> None:
    for body, limit in (({"max_tokens": -1}, NO_LIMIT), ({"max_tokens": 3.0}, 3), ({"n_predict": 4}, 4)):
        asked = OpenAiPrompts(_SAMPLING)(_openai(**body))
        assert asked.sampling.max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"custom_id": 3}, "custom_id"),
        ({"method": "GET"}, "GET"),
        ({"url": "/v1/embeddings"}, "/v1/embeddings"),
        ({"body": "text"}, "no body"),
    ],
)
def test_an_envelope_that_is_not_right_says_why(fields: dict[str, object], word: str) -> None:
    row = _openai()
    ending = OpenAiPrompts(_SAMPLING)(Row(0, {**row.fields, **fields}))
    assert word in ending.problem


def test_a_custom_id_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({**_openai().fields, "custom_id": name}) + "\n" for name in "aba"))
    prepared = prepare(BatchJob(str(path), str(tmp_path / "out.jsonl"), start="resume"))
    for _ in range(2):
        asked = [entry for _share, entry in prepared.asked()]
        assert [isinstance(entry, Answer) for entry in asked] == [False, False, True]
        assert isinstance(asked[2], Answer)
        assert "earlier row" in asked[2].problem
