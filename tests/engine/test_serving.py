"""The server over real HTTP, with a tiny model: by the clients' own packages, and by clients that misbehave."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.protocol import Ask, ChatMessage, Failed, Finished, Served, Token
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import Preparation
from engine.runtime.schedule.scheduler import Scheduler
from engine.serving import server as connections
from engine.serving.answers import Answer
from engine.serving.broker import ModelBroker
from engine.serving.link import BrokerLink, EngineLink
from engine.serving.server import Address, Server
from engine.serving.service import Service
from tests import plain_http
from tests.engine.loaded_tiny import as_loaded, tiny_loaded, tiny_tokenizer
from tests.engine.single_streams import Alone
from tests.engine.test_encoder_decoder import model as encoder_decoder
from tests.engine.tiny_tokenizer import TEMPLATE
from tests.refusals import refused, until
from tests.scripted_broker import ScriptedBroker, made_up_models

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class TinyEngine:
    """An engine whose models are made in memory; a model named `broken` cannot be loaded."""

    template = "{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}" + TEMPLATE

    def __init__(self) -> None:
        self.loaded: LoadedModel | None = None
        self.loads: list[str] = []
        self._scheduler: Scheduler | None = None

    @property
    def info(self) -> Any:
        return self.loaded.info if self.loaded else None

    def load(self, path: Path, _cancelled: CancelCheck) -> None:
        self.loads.append(path.name)
        self.unload()
        if path.name == "broken":
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There is no room for it.")
        self.loaded = replace(tiny_loaded(path.name), tokenizer=tiny_tokenizer(self.template))

    def default_sampling(self) -> SamplingParams:
        return SamplingParams()

    @property
    def scheduler(self) -> Scheduler:
        assert self.loaded is not None
        if self._scheduler is None:
            self._scheduler = Scheduler(self.loaded)
        return self._scheduler

    def unload(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self.loaded = self._scheduler = None


@dataclass
class Running:
    """A server under test."""

    url: str
    port: int
    engine: TinyEngine
    broker: ModelBroker

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        return plain_http.post(self.url + path, json=body, timeout=60, **options)

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, **fields})


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as found:
        yield found


class serving:  # noqa: N801 - read as a verb
    """A server for the duration of a block."""

    def __init__(self, address: Address | None = None, idle_s: float | None = None) -> None:
        self._address, self._engine = address or Address(port=0), TinyEngine()
        self._broker = ModelBroker(self._engine, self._engine.load, idle_s)
        self._server = Server(Service(self._broker, made_up_models()), self._address)

    def __enter__(self) -> Running:
        port = self._server.start()
        self._broker.start()
        return Running(f"http://127.0.0.1:{port}", port, self._engine, self._broker)

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._broker.close()


def _alone(messages: list[dict[str, str]], **sampling: Any) -> str:
    turns = [ChatMessage(each["role"], each["content"]) for each in messages]  # type: ignore[arg-type]
    return Alone(tiny_loaded("mixtral")).generate(turns, SamplingParams(**sampling)).text


def test_answers_are_those_of_the_model_alone_however_many_ask(running: Running) -> None:
    questions = [[{"role": "user", "content": f"Question {number}"}] for number in range(9)]

    def ask(messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        return str(running.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, questions))
    for messages, answer in zip(questions, answers, strict=True):
        assert answer.strip("\n") == _alone(messages, max_tokens=24).strip("\n")


def test_the_openai_package(running: Running) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        assert "mixtral" in {model.id for model in client.models.list()}
        asked: dict[str, Any] = {"model": "mixtral", "messages": HELLO, "max_tokens": 8, "temperature": 0}
        two = client.chat.completions.create(**asked, n=2, seed=3, logprobs=True, top_logprobs=2)
        assert [choice.index for choice in two.choices] == [0, 1]
        tokens = two.choices[0].logprobs.content
        assert (len(tokens), tokens[0].logprob) == (8, tokens[0].top_logprobs[0].logprob)
        assert two.usage.completion_tokens == 16
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == two.choices[0].message.content
        assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("length", 8)
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = client.chat.completions.create(**{**asked, "max_tokens": 200}, tools=[TOOL], tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        schema = {"name": "x", "schema": {"enum": ["left", "right"]}}
        form = {"type": "json_schema", "json_schema": schema}
        shaped = client.chat.completions.create(**{**asked, "max_tokens": 50}, response_format=form)
        assert json.loads(shaped.choices[0].message.content) in ("left", "right")
        assert client.completions.create(model="mixtral", prompt="One", max_tokens=4, logprobs=2).choices[0].logprobs
        response = client.responses.create(model="mixtral", input="Hello", max_output_tokens=8, temperature=0)
        assert response.output_text.strip("\n") == streamed.strip("\n")
        with client.responses.stream(model="mixtral", input="Hello", max_output_tokens=8, temperature=0) as stream:
            events = list(stream)
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")  # 8 tokens are few
        assert events[-1].response.output_text == response.output_text
        assert next(event.item.content for event in events if event.type == "response.output_item.added") == []
        assert [event for event in events if event.type.endswith("text.delta")][-1].snapshot == response.output_text
        with pytest.raises(openai.NotFoundError, match="no model named"):
            client.chat.completions.create(**{**asked, "model": "nothing"})
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.embeddings.create(model="mixtral", input="x")


def test_results_of_tools_go_back_into_the_conversation_of_every_client(running: Running) -> None:
    """Two rounds, each a required call whose result the next one reads."""
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    ollama = pytest.importorskip("ollama")
    seen: list[tuple[ChatMessage, ...]] = []
    prompt = Preparation.prompt

    def spied(self: Preparation, messages: tuple[ChatMessage, ...], *rest: Any) -> list[int]:
        seen.append(messages)
        return prompt(self, messages, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preparation, "prompt", spied)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
            turns: list[Any] = list(HELLO)
            for _round in range(2):
                asked = {"model": "mixtral", "messages": turns, "tools": [TOOL], "tool_choice": "required"}
                chunks = client.chat.completions.create(**asked, stream=True, max_tokens=200)
                deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
                (call,) = [each for delta in deltas for each in delta.tool_calls or ()]
                turns.append({"role": "assistant", "tool_calls": [call.model_dump(exclude={"index"})]})
                turns.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
            items: list[Any] = [{"role": "user", "content": "Hello"}]
            for _round in range(2):
                asked = {"model": "mixtral", "input": items, "tools": [flat], "tool_choice": "required"}
                (item,) = client.responses.create(**asked, max_output_tokens=200).output
                items += [item, {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}]
        with anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0) as client:
            turns = list(HELLO)
            tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
            for _round in range(2):
                asked = {"model": "mixtral", "messages": turns, "tools": [tool], "tool_choice": {"type": "any"}}
                (use,) = client.messages.create(**asked, max_tokens=200).content
                result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
                turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        turns = [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}]
        turns.append({"role": "tool", "tool_name": "weather", "content": "rain"})
        client = ollama.Client(host=running.url)
        with client._client:  # it closes no other way
            client.chat("mixtral", turns, tools=[TOOL], options={"num_predict": 2})
    assert [[turn.role for turn in messages] for messages in seen] == [
        *[["user"], ["user", "assistant", "tool"]] * 3,
        ["user", "assistant", "tool"],
    ]
    assert all(messages[-1].answers == messages[-2].tool_calls[0].id for messages in seen[1:6:2])


def test_the_anthropic_package(running: Running) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "mixtral", "messages": HELLO, "max_tokens": 8}
        assert "mixtral" in [model.display_name for model in client.models.list()]
        answer = client.messages.create(**asked)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 8)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
        called = client.messages.create(**{**asked, "max_tokens": 200}, tools=[tool], tool_choice={"type": "any"})
        assert (called.stop_reason, called.content[0].type) == ("tool_use", "tool_use")
        result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "rain"}
        turns = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**{**asked, "messages": turns}, tools=[tool]).usage.output_tokens == 8
        counted = client.messages.count_tokens(model="mixtral", messages=HELLO).input_tokens
        assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        with pytest.raises(anthropic.NotFoundError, match="no model named"):
            client.messages.create(**{**asked, "model": "nothing"})


def test_the_ollama_package(running: Running, request: pytest.FixtureRequest) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=running.url)
    request.addfinalizer(client._client.close)
    options = {"num_predict": 8, "temperature": 0}
    assert [model.model for model in client.list().models] == ["mixtral", "qwen3_moe", "broken"]
    whole = client.chat("mixtral", HELLO, options=options)
    streamed = "".join(part.message.content for part in client.chat("mixtral", HELLO, options=options, stream=True))
    assert (streamed, whole.done_reason, whole.eval_count) == (whole.message.content, "length", 8)
    assert client.generate("mixtral:latest", "Hello", options=options).response == streamed
    assert client.show("mixtral").modelinfo
    (loaded,) = client.ps().models
    # Its program shows the beginning of a digest, and takes a model that has expired for one that is going.
    assert (loaded.model, len(loaded.digest), loaded.expires_at.year > 2100) == ("mixtral", 64, True)
    with pytest.raises(ollama.ResponseError, match="no model named"):
        client.chat("nothing", HELLO)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "no messages"),
        ({"messages": [{"role": "user"}]}, "not text"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 99}, "as n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 101}, "stop strings"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "not among"),
        ({"tool_choice": "required"}, "offers no tools"),
        ({"tools": [{"type": "browser"}]}, "only functions"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "shape"}}}}, "schema"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "tokens long"),
        ({"model": 3}, "not a name"),
        ({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "not text"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2**18 + 1)}}, "logit_bias"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_wrong_is_said_in_openais_form(
    running: Running, fields: dict[str, Any], words: str, streams: bool
) -> None:
    answer = running.chat(**fields, stream=streams)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"\xff\xfe", b"{", b"[1]", b"[" * 5000 + b"]" * 5000, b""])
def test_bodies_that_are_no_requests(running: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"):
        answer = plain_http.post(running.url + path, content=body, timeout=30)
        assert answer.status_code == 400
        assert "error" in answer.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "a \ud800"}], "max_tokens": 2}'),
        ("/v1/completions", r'{"prompt": "a \ud800", "max_tokens": 2}'),
        ("/v1/responses", r'{"input": "a", "instructions": "\udc00", "max_output_tokens": 2}'),
        ("/v1/responses", r'{"input": "a", "metadata": {"\udc00": "\ud800"}, "max_output_tokens": 2}'),
        ("/v1/responses", '{"input": "a", "metadata": {"x": [NaN, 1e999]}, "max_output_tokens": 2}'),
        ("/api/chat", r'{"messages": [{"role": "user", "content": "\ud800"}], "options": {"num_predict": 2}}'),
    ],
)
def test_what_json_cannot_say_harms_nothing(running: Running, path: str, body: str) -> None:
    assert plain_http.post(running.url + path, content=body, timeout=30).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_every_interface_sends_json_whatever_a_model_writes(streams: bool) -> None:
    call = r'<tool_call>{"name": "weather", "arguments": {"city": "\ud83d", "n": [NaN, 1e999, -Infinity]}}</tool_call>'
    flat = TOOL["function"]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, "tools": [TOOL]},
        "/v1/responses": {"input": "Hi", "tools": [{"type": "function", **flat}]},
        "/v1/messages": {
            "messages": HELLO,
            "max_tokens": 5,
            "tools": [{"name": "weather", "input_schema": flat["parameters"]}],
        },
        "/api/chat": {"messages": HELLO, "tools": [TOOL]},
    }
    server = Server(Service(ScriptedBroker(ends=True, says=call), made_up_models()), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    try:
        for path, body in asked.items():
            answer = plain_http.post(url + path, json={**body, "stream": streams}, timeout=30)
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if streams and "{" in line]
            for line in lines or [answer.text]:
                json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
            assert (
                answer.status_code,
                "\ufffd" in answer.text,
                "null, 1.7976931348623157e+308, null" in answer.text,
            ) == (200, True, True)
    finally:
        server.stop()


def test_what_is_refused_before_the_first_token_has_a_status(running: Running) -> None:
    for streams in (False, True):
        answer = running.post("/v1/completions", {"prompt": "", "stream": streams})
        assert (answer.status_code, "empty" in answer.text) == (400, True)
    choice = {"messages": HELLO, "max_tokens": 5, "tool_choice": {"type": []}}
    assert running.post("/v1/messages", choice).status_code == 400


def test_anthropics_clients_learn_which_sequence_ended_the_answer(running: Running) -> None:
    asked = {"messages": HELLO, "max_tokens": 40, "temperature": 0}
    text = running.post("/v1/messages", asked).json()["content"][0]["text"]
    asked["stop_sequences"] = ["never said", text[5]]
    whole = running.post("/v1/messages", asked).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[5])
    lines = running.post("/v1/messages", {**asked, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[5]}
    read = ("input_tokens", "cache_read_input_tokens")
    assert sum(events[-2]["usage"][name] for name in read) == sum(whole["usage"][name] for name in read)


@pytest.mark.parametrize("tools", [1, 2])
def test_required_tools_may_refer_to_parts_of_their_own_schema(running: Running, tools: int) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
    }
    offered = [
        {"type": "function", "function": {"name": f"weather{number}", "parameters": parameters}}
        for number in range(tools)
    ]
    answer = running.chat(max_tokens=200, temperature=0, tools=offered, tool_choice="required")
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_clients_may_leave_out_the_version_and_give_the_schema_beside(running: Running, path: str) -> None:
    form = {"type": "json_object", "schema": {"const": 42}}
    answer = running.post(path, {"messages": HELLO, "max_tokens": 9, "response_format": form})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == 42


def test_streamed_completions_say_how_likely_their_tokens_were(running: Running) -> None:
    asked = {"prompt": "One", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    whole = running.post("/v1/completions", asked).json()["choices"][0]["logprobs"]
    lines = running.post("/v1/completions", {**asked, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [each for part in parts for each in part[name]] == whole[name]


def test_ollamas_clients_load_and_free_models_by_asking_nothing() -> None:
    with serving() as running:
        loaded = running.post("/api/generate", {"model": "qwen3_moe"}).json()
        assert (loaded["done_reason"], running.broker.state.model) == ("load", Path("qwen3_moe"))
        for nothing in (0, "0s"):
            assert running.post("/api/chat", {"messages": [], "keep_alive": "5m"}).json()["done_reason"] == "load"
            gone = {"messages": [], "keep_alive": nothing}
            assert running.post("/api/chat", gone).json()["done_reason"] == "unload"
            until(lambda: running.broker.state.model is None)
        assert running.post("/api/chat", {"model": "nothing", "messages": []}).status_code == 404
        assert running.post("/api/generate", {"model": "broken"}).status_code == 503


def test_unknown_fields_are_ignored_and_unknown_paths_are_named(running: Running) -> None:
    assert running.chat(user="me", service_tier="x", what=1).status_code == 200
    assert plain_http.get(f"{running.url}/v1/nothing").status_code == 404
    assert plain_http.get(f"{running.url}/api/chat").status_code == 405


def test_models_are_loaded_by_name_and_a_broken_one_harms_nobody(running: Running) -> None:
    assert running.chat(model="mixtral").status_code == 200
    assert running.chat(model="broken").status_code == 503
    assert running.chat(model="qwen3_moe").status_code == 200
    assert running.chat(model="mixtral").status_code == 200
    assert running.engine.loads[-3:] == ["broken", "qwen3_moe", "mixtral"]
    assert running.broker.state.under_way == 0


def test_a_client_that_goes_away_frees_its_place(running: Running) -> None:
    asked = {"messages": HELLO, "max_tokens": 200, "stream": True, "temperature": 0}
    for _ in range(5):
        with plain_http.stream("POST", f"{running.url}/v1/chat/completions", json=asked, timeout=30) as answer:
            next(answer.iter_lines())
    with socket.create_connection(("127.0.0.1", running.port)) as caller:
        body = json.dumps({**asked, "stream": False}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
        until(lambda: running.broker.state.under_way + running.broker.state.waiting > 0)
    until(lambda: running.broker.state.under_way + running.broker.state.waiting == 0)
    scheduler = running.engine.scheduler
    until(lambda: not scheduler.is_busy and (scheduler._batch is None or scheduler._batch.pool.held == 0))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"max_tokens": 9}),
        ("/api/chat", {}),
    ],
)
def test_who_leaves_in_the_middle_is_noted_as_having_left(path: str, fields: dict[str, Any]) -> None:
    served = list[Served]()
    server = Server(Service(ScriptedBroker(ends=False), made_up_models()), Address(port=0), served.append)
    url = f"http://127.0.0.1:{server.start()}{path}"
    try:
        body = {"messages": HELLO, "stream": True, **fields}
        with plain_http.stream("POST", url, json=body, timeout=30) as answer:
            next(answer.iter_lines())
        until(lambda: served)
        assert (served[0].status, served[0].outcome) == (200, "left")
    finally:
        server.stop()


def test_hundreds_of_clients_that_misbehave_leave_nothing_behind(running: Running) -> None:
    """They connect and stall, send rubbish, or vanish in the middle; others are served meanwhile."""
    silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(60)]

    def misbehave(number: int) -> None:
        with socket.create_connection(("127.0.0.1", running.port)) as caller:
            if number % 3 == 0:
                caller.sendall(b"\x00\xff rubbish\r\n\r\n")
            elif number % 3 == 1:
                caller.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{"
                )
            else:
                body = json.dumps({"messages": HELLO, "max_tokens": 100, "stream": True}).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                caller.sendall(head.encode() + body)
                caller.recv(10)

    try:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(misbehave, range(150)))
        assert running.chat().status_code == 200
    finally:
        for caller in silent:
            caller.close()
    until(lambda: running.broker.state.under_way + running.broker.state.waiting == 0)


def test_a_connection_that_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOWEST_HEAD_S", 0.05)
    with serving() as running, socket.create_connection(("127.0.0.1", running.port)) as caller:
        caller.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert caller.recv(1) == b""


def test_a_later_request_must_arrive_in_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOWEST_HEAD_S", 0.05)
    monkeypatch.setattr(connections, "IDLE_S", 1)
    with serving() as running, socket.create_connection(("127.0.0.1", running.port)) as caller:
        caller.settimeout(10)
        caller.sendall(b"GET /api/version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(1000)
        caller.sendall(b"GET /api/ver")
        with contextlib.suppress(ConnectionError):
            while caller.recv(1000):
                pass


def test_a_model_that_never_sees_tools_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyEngine, "template", TEMPLATE)
    with serving() as running:
        for fields in ({}, {"tool_choice": "required"}):
            answer = running.chat(tools=[TOOL], **fields)
            assert (answer.status_code, "no place for tools" in answer.text) == (400, True)
        assert running.chat(tools=[TOOL], tool_choice="none").status_code == 200


def test_each_interface_says_in_its_own_words_that_a_key_is_wrong() -> None:
    with serving(Address(port=0, key="secret key", origins=("http://page.example",))) as running:
        kinds = {}
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            page = {"origin": "http://page.example"}
            answer = running.post(path, {"messages": HELLO}, headers=page)
            assert answer.status_code == 401
            assert (
                answer.headers["access-control-allow-origin"] == "http://page.example"
            )  # so that the page can read it
            error = answer.json()["error"]
            kinds[path] = error["type"] if isinstance(error, dict) else ""
        assert kinds == {
            "/v1/chat/completions": "authentication_error",
            "/v1/messages": "authentication_error",
            "/api/chat": "",
        }
        assert running.chat().json()["error"]["code"] == "invalid_api_key"
        other = running.post("/v1/messages", {}, headers={"origin": "http://evil.example"})
        assert (other.status_code, other.json()["error"]["type"]) == (403, "permission_error")
        assert "access-control-allow-origin" not in other.headers


def test_anthropics_streams_say_that_they_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.answers.PING_S", 0.02)
    broker = ScriptedBroker(ends=False)
    server = Server(Service(broker, made_up_models()), Address(port=0))
    url, pings = f"http://127.0.0.1:{server.start()}", 0
    try:
        asked = {"messages": HELLO, "max_tokens": 5, "stream": True}
        with plain_http.stream("POST", f"{url}/v1/messages", json=asked, timeout=20) as answer:
            for line in answer.iter_lines():
                pings += line == "event: ping"
                if pings == 3:
                    break
        until(broker.tickets[0].is_cancelled)
    finally:
        server.stop()


def test_likely_parts_of_characters_are_given_as_bytes(running: Running) -> None:
    text = "\u00e4" * 6
    asked = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}
    answer = running.post("/v1/chat/completions", {**asked, "response_format": form}).json()["choices"][0]
    joined = bytes(byte for token in answer["logprobs"]["content"] for byte in token["bytes"])
    assert joined.decode() == answer["message"]["content"]
    assert text in joined.decode()


def test_a_turn_of_several_calls_is_one_turn(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    ask = running.broker.ask
    monkeypatch.setattr(running.broker, "ask", lambda asked, on_event: (seen.append(asked), ask(asked, on_event))[1])
    calls = [
        {"type": "function_call", "call_id": name, "name": "weather", "arguments": "{}"} for name in ("one", "two")
    ]
    results = [{"type": "function_call_output", "call_id": name, "output": "rain"} for name in ("one", "two")]
    body = {"input": [{"role": "user", "content": "Hi"}, *calls, *results], "max_output_tokens": 2}
    answer = running.post("/v1/responses", {**body, "parallel_tool_calls": False})
    assert (answer.status_code, answer.json()["parallel_tool_calls"]) == (200, False)
    turns = seen[0].messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in turns[1].tool_calls] == ["one", "two"]


def test_large_bodies_are_read_beside_the_others(running: Running) -> None:
    large = running.post("/v1/messages", {"max_tokens": 1, "messages": HELLO, "metadata": {"x": "y" * 2**20}})
    assert large.status_code == 200
    assert plain_http.post(f"{running.url}/v1/messages", content=b"{" + b" " * 2**20, timeout=20).status_code == 400


def test_who_may_ask() -> None:
    with serving(Address(port=0, key="secret key", origins=("http://page.example",))) as running:
        url, key = f"{running.url}/v1/models", {"authorization": "Bearer secret key"}
        assert plain_http.get(url).status_code == 401
        assert plain_http.get(url, headers={"authorization": "Bearer other"}).status_code == 401
        assert plain_http.get(url, headers={"x-api-key": "secret key"}).status_code == 200
        assert plain_http.get(url, headers={**key, "host": "evil.example"}).status_code == 403
        assert plain_http.get(url, headers={**key, "origin": "http://evil.example"}).status_code == 403
        allowed = plain_http.get(url, headers={**key, "origin": "http://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        asked = httpx2.options(url, headers={"origin": "http://page.example"})
        assert asked.status_code == 204
        # A browser lets scripts send a key only if its header is named.
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        assert plain_http.get(url, headers={"authorization": "bearer  secret key"}).status_code == 200
        assert plain_http.get(url, headers={**key, "x-api-key": "any"}).status_code == 200
        assert plain_http.get(url, headers={"authorization": "secret key"}).status_code == 401


@pytest.mark.parametrize(
    "address", [Address("0.0.0.0"), Address("192.168.1.5", key="short"), Address("example.org"), Address(key="short")]
)
def test_others_cannot_reach_it_without_a_key(address: Address) -> None:
    with refused(ErrorCode.INVALID_REQUEST, match="key"):
        address.check()


def test_an_unused_model_is_freed_and_comes_back() -> None:
    with serving(idle_s=0.05) as running:
        assert running.chat().status_code == 200
        until(lambda: running.engine.loaded is None)
        assert running.chat().status_code == 200
        assert running.engine.loads == ["mixtral", "mixtral"]


def test_closing_ends_everybody() -> None:
    engine, endings = TinyEngine(), list[Any]()
    broker, begun = ModelBroker(engine, engine.load), threading.Event()
    broker.start()

    def on_event(event: Any) -> None:
        begun.set()
        if isinstance(event, Finished | Failed):
            endings.append(event)

    hello = (ChatMessage("user", "Hello"),)
    for name in ("mixtral", "mixtral", "qwen3_moe"):
        broker.ask(Ask(Path(name), hello, sampling={"max_tokens": 200}), on_event)
    assert begun.wait(30)
    broker.close()
    assert len(endings) == 3
    with pytest.raises(EngineError, match="closing"):
        broker.ask(Ask(Path("mixtral"), hello), on_event)


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, '{"error": {"message": "The engine stopped'),
        ("/v1/completions", {"prompt": "x"}, '{"error": {"message": "The engine stopped'),
        ("/v1/responses", {"input": "x"}, '"type": "response.failed"'),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, 'event: error\ndata: {"type": "error"'),
        ("/api/chat", {"messages": HELLO}, '{"error": "The engine stopped'),
    ],
)
def test_an_engine_that_dies_ends_each_stream_in_its_own_form(path: str, fields: dict[str, Any], said: str) -> None:
    link = EngineLink()
    link.start()
    server = Server(Service(link, made_up_models()), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    try:
        for ends in (False, True):  # the server goes on with the next engine
            engine = BrokerLink(link.address, link.secret, ScriptedBroker(ends=ends))
            with plain_http.stream("POST", url + path, json={**fields, "stream": True}, timeout=20) as answer:
                assert answer.status_code == 200
                text = ""
                for part in answer.iter_text():
                    text += part
                    if "Hello" in text and not ends:
                        engine.close()
            assert (said in text) is not ends
            engine.close()
            until(lambda: not link.is_connected)
    finally:
        server.stop()
        link.close()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", '{"error": {"message": "'),
        ("/v1/messages", 'event: error\ndata: {"type": "error"'),
        ("/api/chat", '{"error": "'),
    ],
)
def test_a_fault_of_ours_ends_a_stream_in_its_own_form(monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    def fails(_answer: Answer, _event: Any) -> list[Any]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Answer, "_read", fails)
    served: list[Served] = []
    server = Server(Service(ScriptedBroker(ends=True), made_up_models()), Address(port=0), served.append)
    try:
        body = {"messages": HELLO, "max_tokens": 5, "stream": True}
        answer = plain_http.post(f"http://127.0.0.1:{server.start()}{path}", json=body, timeout=20)
        assert answer.status_code == 200
        assert said in answer.text
    finally:
        server.stop()
    assert [each.outcome for each in served] == ["failed"]


HI = (ChatMessage("user", "Hello"),)


class Watched(list[Any]):
    """Takes a request's events."""

    def __call__(self, event: Any) -> None:
        self.append(event)

    @property
    def ending(self) -> Any:
        return self[-1] if self and isinstance(self[-1], Finished | Failed) else None


def test_closing_ends_what_is_just_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watched = TinyEngine(), Watched()
    broker = ModelBroker(engine, engine.load)
    closing, prompt = threading.Thread(target=broker.close), Preparation.prompt

    def read(*given: Any) -> list[int]:
        closing.start()
        until(lambda: broker.is_closed)
        return prompt(*given[:2], lambda: False)

    monkeypatch.setattr(Preparation, "prompt", read)
    broker.start()
    broker.ask(Ask(Path("mixtral"), HI), watched)
    until(lambda: watched.ending)
    closing.join()
    assert isinstance(watched.ending, Failed)
    assert watched.ending.error.code is ErrorCode.BUSY


def test_closing_ends_a_model_being_loaded() -> None:
    began, watched = threading.Event(), Watched()

    def load(_path: Path, cancelled: CancelCheck) -> None:
        began.set()
        until(cancelled)
        raise RequestCancelled

    broker = ModelBroker(TinyEngine(), load)
    broker.start()
    broker.ask(Ask(Path("mixtral"), HI), watched)
    assert began.wait(30)
    broker.close()
    assert watched.ending.error.code is ErrorCode.BUSY


def test_loading_ends_when_all_who_asked_have_gone() -> None:
    ended, engine, gone, here = threading.Event(), TinyEngine(), Watched(), Watched()

    def load(path: Path, cancelled: CancelCheck) -> None:
        if path.name == "qwen3_moe":
            assert not cancelled()
            ticket.cancel()
            until(cancelled)
            ended.set()
            raise RequestCancelled
        engine.load(path, cancelled)

    broker = ModelBroker(engine, load)
    ticket = broker.ask(Ask(Path("qwen3_moe"), HI), gone)
    broker.start()
    assert ended.wait(30)
    broker.ask(Ask(Path("mixtral"), HI, sampling={"max_tokens": 3}), here)
    until(lambda: here.ending)
    broker.close()
    assert isinstance(here.ending, Finished)


def test_nothing_is_loaded_for_who_has_gone() -> None:
    engine, gone, here = TinyEngine(), Watched(), Watched()
    broker = ModelBroker(engine, engine.load)
    broker.ask(Ask(Path("qwen3_moe"), HI), gone).cancel()
    broker.ask(Ask(Path("mixtral"), HI, sampling={"max_tokens": 3}), here)
    broker.start()
    until(lambda: here.ending)
    broker.close()
    assert engine.loads == ["mixtral"]
    assert gone.ending.finish_reason == "cancelled"


@pytest.mark.parametrize("failure", [RuntimeError, BaseException])
def test_one_request_that_cannot_be_read_harms_no_other(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, good, bad = TinyEngine(), Watched(), Watched()
    broker, prompt = ModelBroker(engine, engine.load), Preparation.prompt

    def read(rows: Preparation, messages: Any, *more: Any) -> list[int]:
        if messages[0].content == "bad":
            raise failure("it breaks")
        return prompt(rows, messages, *more)

    monkeypatch.setattr(Preparation, "prompt", read)
    broker.ask(Ask(Path("mixtral"), HI, sampling={"max_tokens": 9}), good)
    broker.ask(Ask(Path("mixtral"), (ChatMessage("user", "bad"),)), bad)
    broker.start()
    until(lambda: good.ending and bad.ending)
    broker.close()
    assert (good.ending.generated_tokens, bad.ending.error.code) == (9, ErrorCode.INTERNAL)


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "x", "stream": True}), ("/v1/messages/count_tokens", {"messages": HELLO})],
)
def test_who_goes_while_waiting_is_noticed(path: str, fields: dict[str, Any]) -> None:
    broker = ModelBroker(TinyEngine(), lambda _path, _cancelled: None)  # it is never started
    server = Server(Service(broker, made_up_models()), Address(port=0))
    port = server.start()
    try:
        with socket.create_connection(("127.0.0.1", port)) as caller:
            body = json.dumps(fields).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            caller.sendall(head.encode() + body)
            until(lambda: broker.state.waiting)
        until(lambda: broker._waiting[0].is_cancelled())
    finally:
        server.stop()


def test_of_several_answers_the_first_failure_ends_the_others() -> None:
    broker = ScriptedBroker(ends=False)

    async def together() -> None:
        ask = Ask(Path("m"))
        async for index, event in Service(broker, made_up_models()).events(ask, ask):
            if index == 1 and isinstance(event, Token):
                broker.tickets[0].tell(Failed("", ErrorCode.BUSY, "no"))

    with pytest.raises(EngineError, match="no"):
        asyncio.run(together())
    assert all(ticket.is_cancelled() for ticket in broker.tickets)


def test_an_encoder_reads_what_it_reads_in_a_chat() -> None:
    loaded = as_loaded(encoder_decoder("switch_transformers"))
    assert Preparation(loaded).implied_stops == ()


def test_a_port_in_use_is_said() -> None:
    with serving() as running:
        other = Server(Service(running.broker, made_up_models()), Address(port=running.port))
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{running.port}"):
            other.start()
