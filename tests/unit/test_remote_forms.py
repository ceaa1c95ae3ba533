"""How other servers answer, word for word: vLLM 0.32 as it did here, SGLang 0.5.23 and Ollama 0.9 by their sources."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engine.common.chat import ChatMessage, Tool, ToolCall
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import Found, Server, endpoint_at
from engine.remote.failures import RemoteError, Trouble
from tests.bad_endpoint import MODEL, Asked, BadEndpoint
from tests.refusals import refused

HELLO = RemoteRequest((ChatMessage("user", "Hello"),))
WEATHER = Tool("weather", "Of a city.", '{"type": "object", "properties": {"city": {"type": "string"}}}')
USAGE = {"prompt_tokens": 31, "total_tokens": 33, "completion_tokens": 2}


@dataclass(frozen=True)
class Form:
    """One server's way.

    Attributes:
        entry: of its list of models; version: (where it says it, what it says).
        begins: the first part of an answer; thought: what reasoning is called in it.
        extra: more fields of each choice; usage: the last chunk.
        unknown: (status, body) for a model that it does not have, if it looks.
    """

    server: Server
    entry: dict[str, Any]
    version: tuple[str, dict[str, Any]]
    begins: dict[str, Any]
    thought: str
    extra: dict[str, Any]
    usage: dict[str, Any]
    unknown: tuple[int, dict[str, Any]] | None


FORMS = (
    Form(
        "vllm",
        {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "parent": None, "max_model_len": 2048},
        ("/version", {"version": "0.32.0"}),
        {"role": "assistant", "content": ""},
        "reasoning",
        {"logprobs": None, "token_ids": None},
        {"choices": [], "usage": USAGE, "system_fingerprint": "vllm-0.32.0-8cd063c5"},
        (
            404,
            {
                "error": {
                    "message": "The model `nobody` does not exist. Valid aliases: starter.",
                    "type": "NotFoundError",
                    "param": "model",
                    "code": 404,
                }
            },
        ),
    ),
    Form(
        "sglang",
        {"id": MODEL, "object": "model", "created": 1, "owned_by": "sglang", "root": MODEL, "max_model_len": 2048},
        ("/server_info", {"model_path": MODEL, "version": "0.5.23", "internal_states": []}),
        {"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None},
        "reasoning_content",
        {"logprobs": None, "matched_stop": None},
        {"choices": [], "usage": {**USAGE, "prompt_tokens_details": None, "reasoning_tokens": 0}},
        None,
    ),
    Form(
        "ollama",
        {"id": MODEL, "object": "model", "created": 1, "owned_by": "library"},
        ("/api/version", {"version": "0.9.6"}),
        {"role": "assistant", "content": ""},
        "reasoning",
        {},
        {"choices": [], "usage": USAGE, "system_fingerprint": "fp_ollama"},
        (
            404,
            {
                "error": {
                    "message": 'model "nobody" not found, try pulling it first',
                    "type": "not_found_error",
                    "param": None,
                    "code": None,
                }
            },
        ),
    ),
)


@pytest.fixture(params=FORMS, ids=lambda form: form.server)
def form(request: pytest.FixtureRequest) -> Form:
    found: Form = request.param
    return found


@pytest.fixture
def server(form: Form) -> Iterator[BadEndpoint]:
    """Answers in that form with a thought and "Hello!", or with a call if there are tools."""

    def get(asked: Asked) -> None:
        path, said = form.version
        asked.json(said) if asked.path == path else asked.json({"detail": "Not Found"}, 404)

    def answer(asked: Asked) -> None:
        if asked.body["model"] != MODEL and form.unknown is not None:
            asked.json(form.unknown[1], form.unknown[0])
            return
        parts: list[dict[str, Any]] = [form.begins, {form.thought: "Hm."}, {"content": "Hello"}, {"content": "!"}]
        finish = "stop"
        if asked.body.get("tool_choice") == "required":
            function = {"name": asked.body["tools"][0]["function"]["name"], "arguments": '{"city": "Paris"}'}
            parts = [form.begins, {"tool_calls": [{"index": 0, "id": "a1", "type": "function", "function": function}]}]
            finish = "tool_calls"
        elif "response_format" in asked.body:
            parts[2:] = [{"content": '{"hello": "you"}'}]
        asked.begin_stream()
        for part in parts:
            asked.raw(_data({"choices": [{"index": 0, "delta": part, "finish_reason": None, **form.extra}]}))
        asked.raw(_data({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": finish, **form.extra}]}))
        asked.raw(_data(form.usage) + b"data: [DONE]\n\n")

    with BadEndpoint(answer, get, entries=(form.entry,)) as found:
        yield found


def _data(chunk: dict[str, Any]) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**head, **chunk}).encode() + b"\n\n"


def test_it_is_known_for_what_it_is_and_understood(server: BadEndpoint, form: Form) -> None:
    with Client(endpoint_at(server.url, "rack"), "") as client:
        seen = about(client)
        assert (seen.found.server, seen.found.version) == (form.server, form.version[1]["version"])
        assert seen.found.models == (MODEL,)
        assert seen.found.contexts == (form.entry.get("max_model_len", 0),)
        assert set(seen.found.lacks) <= {"sampling"}
        answer = client.ask(HELLO)
        assert (answer.text, answer.reasoning, answer.finish_reason) == ("Hello!", "Hm.", "stop")
        assert (answer.prompt_tokens, answer.generated_tokens) == (31, 2)
        called = client.ask(RemoteRequest(HELLO.messages, tools=(WEATHER,), must_call=True))
        assert called.tool_calls == (ToolCall("a1", "weather", '{"city": "Paris"}'),)
        if form.unknown is not None:
            with pytest.raises(RemoteError) as failed:
                client.ask(RemoteRequest(HELLO.messages, model="nobody"))
            assert failed.value.kind is Trouble.WRONG_MODEL


NO_ROOM = {
    "vLLM 0.32": ("max_tokens=9000 cannot be greater than max_model_len=2048. Please request fewer.", 2048),
    "vLLM 0.11": (
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context length is 2048 tokens"
        " and your request has 37 input tokens (9000 > 2048 - 37).",
        1995,
    ),
    "vLLM 0.9": (
        "This model's maximum context length is 2048 tokens. However, you requested 9037 tokens (37 in the messages, "
        "9000 in the completion). Please reduce the length of the messages or completion.",
        1995,
    ),
    "SGLang": (
        "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total of 9037"
        " tokens: 37 tokens from the input messages and 9000 tokens for the completion.",
        1995,
    ),
    "OpenAI": ("max_tokens is too large: 9000. This model supports at most 2048 completion tokens.", 2048),
}


@pytest.mark.parametrize(("said", "room"), NO_ROOM.values(), ids=NO_ROOM)
def test_an_answer_may_be_as_long_as_there_is_room_for(said: str, room: int) -> None:
    def answer(asked: Asked) -> None:
        asked.error(400, said) if asked.body["max_tokens"] > room else asked.stream("Hello")

    with BadEndpoint(answer) as server, Client(endpoint_at(server.url, "rack"), "") as client:
        assert client.ask(RemoteRequest(HELLO.messages, SamplingParams(max_tokens=9000))).text == "Hello"
        assert [asked.body["max_tokens"] for asked in server.posted] == [9000, room]


def test_a_prompt_without_room_for_an_answer_is_too_long() -> None:
    said = "This model's maximum context length is 100 tokens. However, you requested 130 tokens (120 in the messages)."
    with (
        BadEndpoint(lambda asked: asked.error(400, said)) as server,
        Client(endpoint_at(server.url, "rack"), "") as client,
        refused(ErrorCode.PROMPT_TOO_LONG, kind=RemoteError),
    ):
        client.ask(HELLO)
    assert len(server.posted) == 1


def test_who_refuses_again_is_believed() -> None:
    said = "max_tokens=512 cannot be greater than max_model_len=200."
    with (
        BadEndpoint(lambda asked: asked.error(400, said)) as server,
        Client(endpoint_at(server.url, "rack"), "") as client,
        pytest.raises(RemoteError),
    ):
        client.ask(HELLO)
    assert [asked.body["max_tokens"] for asked in server.posted] == [512, 200]


def test_no_more_is_asked_for_than_a_known_context() -> None:
    with BadEndpoint() as server, Client(endpoint_at(server.url, "rack"), "") as client:
        client.found = Found("vllm", models=("other", MODEL), contexts=(100, 2048))
        client.ask(RemoteRequest(HELLO.messages, SamplingParams(max_tokens=9000), MODEL))
        assert server.posted[0].body["max_tokens"] == 2048
