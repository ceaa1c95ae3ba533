"""Rows become prompts, or endings that say why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.batch_files.answer import Answer
from engine.batch_files.openai_requests import holds_openai_requests
from engine.batch_files.opening import open_source
from engine.batch_files.prompts import OpenAiPrompts, TemplatePrompts
from engine.batch_files.request import RowRequest
from engine.batch_files.row import Row
from engine.batch_files.template import parse_template, template_of
from engine.config import SamplingParams
from engine.errors import EngineError

_SAMPLING = SamplingParams(max_tokens=7)


def test_a_template_is_filled_with_text_numbers_and_json() -> None:
    template = parse_template("{{ a }} and {{b}}: {{c}}, again {{a}}", ["a", "b", "c"])
    row = Row(4, {"a": "{{b}}", "b": 2.5, "c": {"x": [True, None]}})
    assert template.fill(row) == '{{b}} and 2.5: {"x": [true, null]}, again {{b}}'


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
    assert isinstance(asked, RowRequest)
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
        assert isinstance(ending, Answer)
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
    assert isinstance(asked, RowRequest)
    assert asked.sampling == SamplingParams(temperature=0.5, max_tokens=3, stop=("END",), seed=4)
    assert asked.constraint is not None
    assert json.loads(asked.constraint.schema) == schema


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"temperature": -1}, "cannot be"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"n": 2}, "several"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_openai_requests_that_cannot_be_answered_say_why(body: dict[str, object], word: str) -> None:
    ending = OpenAiPrompts(_SAMPLING)(_openai(**body))
    assert isinstance(ending, Answer)
    assert word in ending.problem
