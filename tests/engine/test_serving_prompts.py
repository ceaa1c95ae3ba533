"""Prompts as clients want them over HTTP: counted, shown as tokens, continued, several at once, or given as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.serving.server import Address
from engine.serving.service import LibraryModels
from tests import plain_http
from tests.engine.test_serving import HELLO, Running, serving

PARIS = "What is the capital of Fr\u00e4nce ?"
BEGUN = [*HELLO, {"role": "assistant", "content": "It is"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as found:
        yield found


def _ok(running: Running, path: str, body: Any) -> Any:
    answer = running.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_texts_become_tokens_and_back(running: Running) -> None:
    tokens = _ok(running, "/tokenize", {"content": PARIS})["tokens"]
    assert _ok(running, "/detokenize", {"tokens": tokens}) == {"content": PARIS}
    pieces = _ok(running, "/tokenize", {"content": PARIS, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    raw = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(raw).decode() == PARIS
    assert _ok(running, "/tokenize", {"content": ""}) == {"tokens": []}
    assert _ok(running, "/detokenize", {"tokens": []}) == {"content": ""}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": 3}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/apply-template", {"messages": []}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [True]}),
        ("/v1/completions", {"prompt": ["a", {}]}),
        ("/v1/completions", {"prompt": ["a"] * 9, "n": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "continue_final_message": True}),
        ("/v1/chat/completions", {"messages": [*BEGUN, BEGUN[1]]}),
        (
            "/v1/chat/completions",
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
        ),
    ],
)
def test_what_is_no_prompt_is_said(running: Running, path: str, body: dict[str, Any]) -> None:
    answer = running.post(path, body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_template_is_shown_as_the_model_reads_it(running: Running) -> None:
    begins = "<|im_start|>user\nHello<|im_end|>\n"
    shown = {
        "answer": _ok(running, "/apply-template", {"messages": HELLO}),
        "whole": _ok(running, "/apply-template", {"messages": HELLO, "add_generation_prompt": False}),
        "continue": _ok(running, "/apply-template", {"messages": BEGUN, "continue_final_message": True}),
    }
    assert shown == {
        "answer": {"prompt": f"{begins}<|im_start|>assistant\n"},
        "whole": {"prompt": begins},
        "continue": {"prompt": f"{begins}<|im_start|>assistant\nIt is"},
    }


def test_an_answer_goes_on_where_it_was_begun(running: Running) -> None:
    asked = {"max_tokens": 9, "temperature": 0}
    prompt = _ok(running, "/apply-template", {"messages": BEGUN, "continue_final_message": True})["prompt"]
    text = _ok(running, "/v1/completions", {**asked, "prompt": prompt})["choices"][0]["text"]
    chat = _ok(running, "/v1/chat/completions", {**asked, "messages": BEGUN, "continue_final_message": True})
    assert chat["choices"][0]["message"]["content"].strip("\n") == text.strip("\n")
    message = _ok(running, "/v1/messages", {**asked, "messages": BEGUN})  # Anthropic's clients need not say so
    assert message["content"][0]["text"].strip("\n") == text.strip("\n")


def test_several_prompts_and_those_of_tokens(running: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "temperature": 0}
    tokens = _ok(running, "/tokenize", {"content": "Hello", "add_special": True})["tokens"]
    alone = _ok(running, "/v1/completions", {**asked, "prompt": "Hello"})
    assert _ok(running, "/v1/completions", {**asked, "prompt": tokens})["choices"] == alone["choices"]
    both = _ok(running, "/v1/completions", {**asked, "prompt": [tokens, "Other"], "n": 2})
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in both["choices"]]
    assert texts[:2] == [alone["choices"][0]["text"]] * 2
    other = _ok(running, "/v1/completions", {**asked, "prompt": "Other"})
    assert texts[2:] == [other["choices"][0]["text"]] * 2
    for name, times in (("prompt_tokens", 1), ("completion_tokens", 2)):  # a prompt is counted once
        assert both["usage"][name] == times * sum(each["usage"][name] for each in (alone, other))


def test_prompts_are_counted_also_those_that_are_too_long(running: Running) -> None:
    used = running.chat().json()["usage"]["prompt_tokens"]
    long = [{"role": "user", "content": "word " * 300}]
    for path, name in (
        ("/v1/chat/completions/input_tokens", "messages"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/messages/count_tokens", "messages"),
    ):
        assert _ok(running, path, {name: HELLO})["input_tokens"] == used
        assert _ok(running, path, {name: long})["input_tokens"] > 256


def test_models_say_how_much_they_hold(running: Running) -> None:
    listed = plain_http.get(f"{running.url}/v1/models").json()["data"]
    assert {model["max_model_len"] for model in listed} == {256}
    assert plain_http.get(f"{running.url}/v1/models/qwen3_moe").json()["max_model_len"] == 256


def test_health_needs_no_key() -> None:
    with serving(Address(port=0, key="secret key")) as running:
        for path in ("/health", "/v1/health"):
            assert plain_http.get(running.url + path).json() == {"status": "ok"}
        assert running.post("/tokenize", {"content": "x"}).status_code == 401


def test_a_model_answers_to_its_other_names() -> None:
    models = LibraryModels(Path("mixtral"), "mixtral", ["gpt-4o"])
    assert models.find("gpt-4o") == models.find("mixtral") == models.find("") == ("mixtral", Path("mixtral"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_may_go_on_past_its_end(running: Running, path: str) -> None:
    asked = {"prompt": "Other", "messages": HELLO, "max_tokens": 150, "ignore_eos": True, "temperature": 0}
    answer = _ok(running, path, asked)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (150, "length")
