"""What is wrong with a request is said by each interface in its own form, with its own status, streamed or not."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.batch_files.openai_requests import _CONSTRAINTS, _NOT_GIVEN, _NUMBERS
from engine.cli import main
from engine.common.kept_context import OTHER_PROGRAMS, folder_of, keep_chat, kept_context_dir
from engine.serving.server import Address, make_app
from engine.serving.service import LibraryModels, Service
from tests import plain_http
from tests.engine.test_serving import HELLO, TOOL, Running, serving
from tests.scripted_broker import ScriptedBroker, made_up_models
from tests.tiny_checkpoint import write_tiny_checkpoint

PATHS = {
    "openai": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "ollama": "/api/chat",
}
GOOD: dict[str, dict[str, Any]] = {
    "openai": {"messages": HELLO, "max_tokens": 4},
    "responses": {"input": "Hello", "max_output_tokens": 4},
    "anthropic": {"messages": HELLO, "max_tokens": 4},
    "ollama": {"messages": HELLO, "options": {"num_predict": 4}},
}
PARAMETERS: Any = TOOL["function"]["parameters"]  # type: ignore[index]
FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS}
CLAUDES = {"name": "weather", "input_schema": PARAMETERS}
LONG = [{"role": "user", "content": "word " * 300}]
IMPOSSIBLE: tuple[dict[str, Any], ...] = ({"type": "shape"}, {"enum": []}, {"type": "object", "minProperties": "x"})
"""No such type, nothing that would be one, and nonsense."""


def _formats(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Requests of each interface for an answer of this schema."""
    named = {"type": "json_schema", "name": "x", "schema": schema}
    tool = {"name": "x", "input_schema": schema}
    return [
        ("openai", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        ("responses", {"text": {"format": named}}),
        ("anthropic", {"tools": [tool], "tool_choice": {"type": "any"}}),
        ("ollama", {"format": schema}),
    ]


WRONG: list[tuple[str, dict[str, Any]]] = [
    # Types.
    ("openai", {"messages": 3}),
    ("openai", {"messages": [3]}),
    ("openai", {"max_tokens": "many"}),
    ("openai", {"temperature": [1]}),
    ("openai", {"model": ["mixtral"]}),
    ("openai", {"stop": [3]}),
    ("responses", {"input": 3}),
    ("responses", {"input": [3]}),
    ("responses", {"max_output_tokens": "many"}),
    ("responses", {"temperature": "hot"}),
    ("anthropic", {"messages": 3}),
    ("anthropic", {"messages": [3]}),
    ("anthropic", {"max_tokens": "many"}),
    ("anthropic", {"max_tokens": None}),
    ("anthropic", {"temperature": "hot"}),
    ("anthropic", {"system": 3}),
    ("anthropic", {"stop_sequences": [3]}),
    ("ollama", {"messages": 3}),
    ("ollama", {"messages": [3]}),
    ("ollama", {"options": 3}),
    ("ollama", {"options": {"temperature": "hot"}}),
    ("ollama", {"format": 3}),
    # Tools that contradict each other.
    ("openai", {"tool_choice": "required"}),
    ("openai", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("openai", {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}),
    ("openai", {"tools": [TOOL] * 129}),
    ("responses", {"tool_choice": "required"}),
    ("responses", {"tools": [FLAT], "tool_choice": {"type": "function", "name": "other"}}),
    ("responses", {"tools": [FLAT], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}),
    ("anthropic", {"tool_choice": {"type": "any"}}),
    ("anthropic", {"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "other"}}),
    ("anthropic", {"tools": [{"name": "weather", "input_schema": "none"}]}),
    ("ollama", {"tools": "weather"}),
    ("ollama", {"tools": [{"type": "browser"}]}),
    # Schemas that cannot be met.
    *(asked for schema in IMPOSSIBLE for asked in _formats(schema)),
    # Stop strings by the hundred.
    ("openai", {"stop": ["a"] * 101}),
    ("anthropic", {"stop_sequences": ["a"] * 101}),
    ("ollama", {"options": {"stop": ["a"] * 101}}),
    # A prompt that is too long.
    ("openai", {"messages": LONG}),
    ("responses", {"input": LONG}),
    ("anthropic", {"messages": LONG}),
    ("ollama", {"messages": LONG}),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as found:
        yield found


def check_error(api: str, answer: httpx2.Response, status: int, kind: str, code: str | None = None) -> None:
    """That an error has the form of its interface; OpenAI's are for both of its paths."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    if api == "ollama":
        assert said.keys() == {"error"}
        message = said["error"]
    elif api == "anthropic":
        assert (said.keys(), said["type"], said["error"].keys()) == ({"type", "error"}, "error", {"type", "message"})
        assert said["error"]["type"] == kind
        message = said["error"]["message"]
    else:
        assert said.keys() == {"error"}
        assert said["error"].keys() == {"message", "type", "param", "code"}
        assert (said["error"]["type"], said["error"]["code"]) == (kind, code)
        message = said["error"]["message"]
    assert message.endswith((".", ")")), message
    assert "Traceback" not in message


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("api", "fields"), WRONG)
def test_what_makes_no_sense(running: Running, api: str, fields: dict[str, Any], streams: bool) -> None:
    answer = running.post(PATHS[api], {**GOOD[api], **fields, "stream": streams})
    is_long = LONG in fields.values()
    check_error(api, answer, 400, "invalid_request_error", "context_length_exceeded" if is_long else None)


@pytest.mark.parametrize("api", PATHS)
def test_models_that_are_not_there_or_do_not_load(running: Running, api: str) -> None:
    unknown = "not_found_error" if api == "anthropic" else "invalid_request_error"
    broken = "overloaded_error" if api == "anthropic" else "server_error"
    for streams in (False, True):
        asked = {**GOOD[api], "stream": streams}
        check_error(api, running.post(PATHS[api], {**asked, "model": "nothing"}), 404, unknown, "model_not_found")
        check_error(api, running.post(PATHS[api], {**asked, "model": "broken"}), 503, broken)


@pytest.mark.parametrize("api", PATHS)
def test_fields_that_nobody_knows_are_ignored(running: Running, api: str) -> None:
    more = {"what": {"is": ["this"]}, "stream": False}
    assert running.post(PATHS[api], {**GOOD[api], **more}).status_code == 200


@pytest.mark.parametrize("api", PATHS)
def test_bodies_that_cannot_be_read(running: Running, api: str) -> None:
    deep = json.dumps(GOOD[api])[:-1].encode() + b', "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    for body in (b"\xff\xfe", b'{"messages": "\xe4"}', b"{", b"[]", b"", b"NaN", deep):
        check_error(
            api, plain_http.post(running.url + PATHS[api], content=body, timeout=30), 400, "invalid_request_error"
        )


FORMS = {  # whose form errors have, the path, and a request
    **{api: (api, path, GOOD[api]) for api, path in PATHS.items()},
    "completions": ("openai", "/v1/completions", {"prompt": "One", "max_tokens": 2}),
    "generate": ("ollama", "/api/generate", {"prompt": "One", "options": {"num_predict": 2}}),
    "show": ("ollama", "/api/show", {"model": "mixtral"}),
    "tokenize": ("openai", "/tokenize", {"content": "One"}),
    "detokenize": ("openai", "/detokenize", {"tokens": [1, 2]}),
    "apply-template": ("openai", "/apply-template", {"messages": HELLO}),
    "count_tokens": ("anthropic", "/v1/messages/count_tokens", {"messages": HELLO}),
    "input_tokens": ("openai", "/v1/responses/input_tokens", {"input": "Hello"}),
}
FIELDS = {name.partition(".")[0] for table in (_NUMBERS, _CONSTRAINTS, _NOT_GIVEN) for name in table} | {
    *("model", "messages", "input", "prompt", "system", "instructions", "options", "content", "tokens", "raw", "name"),
    *("stop", "stop_sequences", "dry_sequence_breakers", "logit_bias", "ignore_eos", "keep_alive", "stream_options"),
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "metadata", "user", "with_pieces"),
    *("thinking", "think", "reasoning", "reasoning_effort", "output_config", "chat_template_kwargs", "add_special"),
    *("add_generation_prompt", "continue_final_message", "service_tier", "store", "include"),
}
ODD = ["null", "true", "false", "[]", "{}", "[[]]", "[{}]", "[null]", '{"type": []}', '{"a": 1}', '[{"type": "text"}]']
ODD += ["0", "-1", "5.0", "-1.5", "1e-400", "NaN", "1e999", "-1e308", str(2**63), str(-(10**400)), '"5"', '""']
ODD += ['["x"]', '"\\ud800"', '{"name": 5}', '[{"type": "function", "function": null}]', '{"": null}']
ODD += ['"' + "x" * 5000 + '"']


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("name", FORMS)
def test_an_odd_value_of_any_field_is_taken_or_refused_in_a_sentence(name: str) -> None:
    """Every field of any interface at every other, with values in turn that clients and attackers may send."""
    api, path, good = FORMS[name]
    app = make_app(Service(ScriptedBroker(ends=True), made_up_models()), Address(port=0))

    async def send_all() -> None:
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for place, field in enumerate(sorted(FIELDS)):
                for odd in ODD[(place + len(name)) % 8 :: 8]:
                    body = json.dumps({**good, "stream": False, field: 0}).replace(f'"{field}": 0', f'"{field}": {odd}')
                    answer = await client.post(path, content=body)
                    if answer.status_code != 200:
                        code = "model_not_found" if answer.status_code == 404 else None
                        kind = "not_found_error" if code and api == "anthropic" else "invalid_request_error"
                        assert answer.status_code in (400, 404), (body, answer.text)
                        check_error(api, answer, answer.status_code, kind, code)
                    elif "json" in answer.headers["content-type"]:
                        assert "NaN" not in answer.text
                        assert "Infinity" not in answer.text

    asyncio.run(send_all())


def test_a_wrong_key() -> None:
    with serving(Address(port=0, key="secret key")) as running:
        for api, path in PATHS.items():
            for headers in ({}, {"authorization": "Bearer other"}, {"x-api-key": "other"}):
                answer = running.post(path, GOOD[api], headers=headers)
                check_error(api, answer, 401, "authentication_error", "invalid_api_key")


def test_a_port_in_use_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SWITCHYARD_KEY", raising=False)
    keep_chat(OTHER_PROGRAMS)
    with serving() as running:
        assert (
            main(["serve", "--model", str(write_tiny_checkpoint(tmp_path / "tiny")), "--port", str(running.port)]) == 2
        )
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{running.port}" in said
    assert said.count("\n") == 1
    assert folder_of(OTHER_PROGRAMS, kept_context_dir()).is_dir()  # it is of the server that has the port


PARIS = "What is the capital of Fr\u00e4nce ?"
BEGUN = [*HELLO, {"role": "assistant", "content": "It is"}]


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
