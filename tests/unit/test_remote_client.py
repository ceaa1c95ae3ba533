"""The client of endpoints against a server that does everything wrong, and against our own."""

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool, ToolCall
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.protocol import Token
from engine.remote import client as module
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteAnswer, RemoteRequest
from engine.remote.client import Client, Patience
from engine.remote.endpoint import Endpoint, Found, endpoint_at
from engine.remote.failures import RemoteError, Trouble, connection_error
from tests.bad_endpoint import MODEL, Asked, BadEndpoint, write_certificate

SECRET = "sk-very-secret-1234567890"
QUICK = Patience(connect_s=2, first_s=0.3, next_s=0.3, look_s=2)
HELLO = RemoteRequest((ChatMessage("user", "Hello"),))


def of(server: BadEndpoint, **more: Any) -> Endpoint:
    return endpoint_at(server.url, "rack", **more)


def ask(
    server: BadEndpoint, request: RemoteRequest = HELLO, patience: Patience | None = None, key: str = "", **more: Any
) -> RemoteAnswer:
    with Client(of(server, **more), key, patience) as client:
        return client.ask(request)


def failure(server: BadEndpoint, patience: Patience | None = None, key: str = "", **more: Any) -> RemoteError:
    with pytest.raises(RemoteError) as failed:
        ask(server, patience=patience, key=key, **more)
    return failed.value


# What goes well


@pytest.mark.parametrize(
    "held_open", [b": still here\n\n", b"event: ping\n\n", b'data: {"choices": [{"delta": {}}]}\n\n']
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_what_only_keeps_the_connection_open_holds_nobody_for_ever(
    server: BadEndpoint, held_open: bytes, has_begun: bool
) -> None:
    is_over = threading.Event()

    def without_end(asked: Asked) -> None:
        asked.begin_stream()
        if has_begun:
            asked.chunk({"content": "Hel"})
        with contextlib.suppress(OSError):
            while not is_over.wait(0.02):
                asked.raw(held_open)

    server.answer = without_end
    failed = failure(server, QUICK)
    is_over.set()
    assert failed.kind is Trouble.UNREACHABLE
    assert "nothing more" in failed.message


def test_an_answer_that_has_ended_is_whole_although_the_connection_stays(server: BadEndpoint) -> None:
    def without_end(asked: Asked) -> None:
        asked.begin_stream()
        asked.chunk({"content": "Hello"}, "stop")
        asked.hang()

    server.answer = without_end
    assert ask(server, patience=QUICK).text == "Hello"


def test_an_answer_is_told_as_it_comes(server: BadEndpoint) -> None:
    may_go_on = threading.Event()

    def slowly(asked: Asked) -> None:
        asked.begin_stream()
        asked.chunk({"role": "assistant", "content": None})
        asked.chunk({"reasoning_content": "Hm."})
        asked.chunk({"content": "Hel"})
        may_go_on.wait(20)
        asked.raw(b": still here\n\n")
        asked.chunk({"content": "lo"}, "length")
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        asked.raw(b"data:" + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\ndata: [DONE]\r\n\r\n")

    server.answer = slowly
    told: list[Token] = []

    def on_delta(delta: Token) -> None:
        told.append(delta)
        if delta.text == "Hel":
            may_go_on.set()

    with Client(of(server), "") as client:
        answer = client.ask(HELLO, on_delta)
    assert [(each.text, each.reasoning) for each in told] == [("", "Hm."), ("Hel", ""), ("lo", "")]
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Hello", "Hm.", "length")
    assert (answer.prompt_tokens, answer.generated_tokens, answer.reused_tokens) == (7, 3, 5)
    assert answer.first_token_s is not None
    assert answer.first_token_s <= answer.total_s
    assert answer.model == MODEL
    assert server.posted[0].path == "/v1/chat/completions"
    assert server.posted[0].body["model"] == MODEL


def test_reasoning_between_marks_is_told_apart(server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.stream("<thi", "nk>Hm", ".</think>", "\n\nHello")
    answer = ask(server)
    assert (answer.text.strip(), answer.reasoning.strip()) == ("Hello", "Hm.")


def test_calls_of_tools_are_gathered(server: BadEndpoint) -> None:
    def calls(asked: Asked) -> None:
        asked.begin_stream()
        one = {"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"ci'}}
        two = {"index": 1, "id": "b", "function": {"name": "time", "arguments": ""}}
        asked.chunk({"tool_calls": [one]})
        asked.chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'ty": 1}'}}, two]}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    server.answer = calls
    tool = Tool("weather", "Of a city.", '{"type": "object"}')
    earlier = (
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "", "Hm.", (ToolCall("x", "weather", "{}"),)),
        ChatMessage("tool", "rain", answers="x"),
    )
    answer = ask(server, RemoteRequest(earlier, tools=(tool,), must_call=True))
    assert answer.tool_calls == (ToolCall("a", "weather", '{"city": 1}'), ToolCall("b", "time", "{}"))
    body = server.posted[0].body
    assert body["tool_choice"] == "required"
    assert body["messages"][1]["tool_calls"][0]["id"] == "x"
    assert body["messages"][2] == {"role": "tool", "content": "rain", "tool_call_id": "x"}
    assert "Hm." not in json.dumps(body)


@pytest.mark.parametrize(
    ("owner", "sent", "left_out"),
    [
        ("somebody", set(), {"top_k", "min_p", "repetition_penalty", "thinking", "dry"}),
        ("vllm", {"top_k", "min_p", "repetition_penalty", "chat_template_kwargs"}, {"dry"}),
        ("llamacpp", {"top_k", "min_p", "repeat_penalty", "dry_multiplier", "chat_template_kwargs"}, set()),
    ],
)
def test_settings_go_as_far_as_the_server_takes_them(
    server: BadEndpoint, owner: str, sent: set[str], left_out: set[str]
) -> None:
    server.owner = owner
    sampling = SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=3,
        stop=("x",),
        max_tokens=9,
        dry_multiplier=0.8,
        thinking="off",
    )
    answer = ask(server, replace(HELLO, sampling=sampling))
    body = server.posted[0].body
    assert {"temperature", "top_p", "seed", "stop", "max_tokens", "stream"} | sent <= body.keys()
    assert set(answer.left_out) == left_out
    assert not body.keys() & left_out


def test_a_schema_and_choices(server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.stream('{"answer": ', '"red"}')
    assert ask(server, replace(HELLO, constraint=Constraint(choices=("red", "blue")))).text == "red"
    ask(server, replace(HELLO, constraint=Constraint(grammar="start: /a/")))
    assert server.posted[-1].body["structured_outputs"] == {"grammar": "start: /a/"}
    assert ask(server, replace(HELLO, constraint=Constraint(schema='{"type": "object"}'))).text == '{"answer": "red"}'
    form = server.posted[-1].body["response_format"]
    assert form["json_schema"]["schema"] == {"type": "object"}


# What goes wrong


def then_nothing(asked: Asked) -> None:
    asked.begin_stream()
    asked.chunk({"content": "Hel"})
    asked.hang()


def broken_off(asked: Asked) -> None:
    asked.begin_stream()
    asked.chunk({"content": "Hel"})


def cut(asked: Asked) -> None:
    asked.begin_stream()
    asked.raw(b'data: {"choices": [{"delta": {"content": "Hel')


def closed(asked: Asked) -> None:
    asked.send(200, b"", content_length="1000")


def endless_line(asked: Asked) -> None:
    asked.begin_stream()
    while True:
        asked.raw(b"data: " + b"x" * 2**20)


def endless_answer(asked: Asked) -> None:
    asked.begin_stream()
    while True:
        asked.raw(b": " + b"x" * 2**18 + b"\n")


def compressed(asked: Asked) -> None:
    asked.send(200, b"\x1f\x8b\x08", content_encoding="gzip", content_type="application/json")


FAULTS: list[tuple[Callable[[Asked], None], Trouble]] = [
    (lambda asked: asked.hang(), Trouble.UNREACHABLE),
    (then_nothing, Trouble.UNREACHABLE),
    (broken_off, Trouble.UNREACHABLE),
    (cut, Trouble.UNREACHABLE),
    (closed, Trouble.UNREACHABLE),
    (endless_line, Trouble.UNREACHABLE),
    (endless_answer, Trouble.UNREACHABLE),
    (compressed, Trouble.UNREACHABLE),
    (lambda asked: asked.send(200, b'{"choices": [{"mess', content_type="application/json"), Trouble.UNREACHABLE),
    (lambda asked: asked.json([1]), Trouble.UNREACHABLE),
    (lambda asked: asked.json({"choices": 3}), Trouble.UNREACHABLE),
    (lambda asked: asked.json({"choices": []}), Trouble.UNREACHABLE),
    (lambda asked: asked.send(200, b"[" * 100_000, content_type="application/json"), Trouble.UNREACHABLE),
    (lambda asked: asked.send(200, b"<html>", content_type="text/html"), Trouble.ADDRESS),
    (lambda asked: asked.json({"detail": "Not Found"}, 404), Trouble.ADDRESS),
    (lambda asked: asked.send(301, location="http://elsewhere.example/v1"), Trouble.ADDRESS),
    (lambda asked: asked.error(404, f"The model `{MODEL}` does not exist."), Trouble.WRONG_MODEL),
    (lambda asked: asked.error(400, "No", "model_not_found"), Trouble.WRONG_MODEL),
    (lambda asked: asked.error(400, "temperature is wrong"), Trouble.REFUSED),
    (lambda asked: asked.error(422, "no"), Trouble.REFUSED),
    (lambda asked: asked.error(413, "too large"), Trouble.REFUSED),
    (lambda asked: asked.error(401, "no"), Trouble.KEY),
    (lambda asked: asked.error(403, "no"), Trouble.KEY),
    (lambda asked: asked.error(402, "no credit"), Trouble.KEY),
    (lambda asked: asked.error(429, "no credit", "insufficient_quota"), Trouble.KEY),
    (lambda asked: asked.error(429, "slow down"), Trouble.BUSY),
    (lambda asked: asked.error(503, "Loading model"), Trouble.BUSY),
    (lambda asked: asked.error(500, "oops"), Trouble.SERVER),
    (lambda asked: asked.send(502, b"<html>"), Trouble.SERVER),
]


@pytest.mark.parametrize(("answer", "kind"), FAULTS)
def test_each_fault_is_of_one_kind_and_said_in_a_sentence(
    server: BadEndpoint, answer: Callable[[Asked], None], kind: Trouble
) -> None:
    server.answer = answer
    failed = failure(server, QUICK, model=MODEL)
    assert failed.kind is kind
    assert failed.message.endswith(".")
    assert "rack" in failed.message or server.url in failed.message


def test_an_error_in_the_stream(server: BadEndpoint) -> None:
    def fails(asked: Asked) -> None:
        asked.begin_stream()
        asked.chunk({"content": "Hel"})
        asked.raw(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n')

    server.answer = fails
    assert failure(server).kind is Trouble.SERVER


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), (None, None), ("soon", None), ("-3", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_how_long_to_wait(server: BadEndpoint, value: str | None, seconds: float | None) -> None:
    headers = {} if value is None else {"retry_after": value}
    server.answer = lambda asked: asked.error(429, "slow down", **headers)
    assert failure(server).retry_after_s == seconds


def test_a_prompt_that_is_too_long(server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.error(400, "This model's maximum context length is 100 tokens.")
    failed = failure(server)
    assert (failed.kind, failed.code) == (Trouble.REFUSED, ErrorCode.PROMPT_TOO_LONG)


def test_nobody_is_there(server: BadEndpoint) -> None:
    url = server.url
    server.__exit__(None, None, None)
    with Client(endpoint_at(url, "rack"), "") as client, pytest.raises(RemoteError) as failed:
        client.models()
    assert failed.value.kind is Trouble.UNREACHABLE
    assert "refused" in failed.value.message
    server.__enter__()


def test_a_host_that_nobody_knows() -> None:
    try:
        try:
            raise socket.gaierror(-2, "Name or service not known")
        except OSError as cause:
            raise httpx2.ConnectError("all failed") from cause
    except httpx2.ConnectError as error:
        failed = connection_error(endpoint_at("http://no-such-host.invalid"), error)
    assert failed.kind is Trouble.UNREACHABLE
    assert "no host of this name" in failed.message


def test_several_models_and_none_named(server: BadEndpoint) -> None:
    server.models = ("a", "b")
    failed = failure(server)
    assert failed.kind is Trouble.WRONG_MODEL
    assert "a, b" in failed.message
    assert ask(server, replace(HELLO, model="b")).text == "Hello"


def test_names_that_could_harm_are_left_out(server: BadEndpoint) -> None:
    server.models = ("good", "ev\x1b[2Jil", "x" * 400, "", "two\nlines")
    with Client(of(server), "") as client:
        assert client.models().models == ("good",)


# Cancelling and closing


@pytest.mark.parametrize("answer", [lambda asked: asked.hang(), then_nothing])
def test_who_no_longer_waits_closes_the_connection(server: BadEndpoint, answer: Callable[[Asked], None]) -> None:
    server.answer = answer
    wanted = threading.Event()
    wanted.set()
    timer = threading.Timer(0.2, wanted.clear)
    timer.start()
    began = time.monotonic()
    with Client(of(server, model=MODEL), "") as client, pytest.raises(RequestCancelled):
        client.ask(HELLO, cancelled=lambda: not wanted.is_set())
    assert time.monotonic() - began < 30  # and not the minutes that it would have waited
    timer.join()


def test_closing_ends_who_waits(server: BadEndpoint) -> None:
    server.answer = then_nothing
    client = Client(of(server, model=MODEL), "")
    has_begun, kinds = threading.Event(), []

    def wait() -> None:
        try:
            client.ask(HELLO, lambda _delta: has_begun.set())
        except RemoteError as error:
            kinds.append(error.kind)

    thread = threading.Thread(target=wait)
    thread.start()
    assert has_begun.wait(20)
    client.close()
    client.close()
    thread.join()
    assert kinds == [Trouble.UNREACHABLE]
    with pytest.raises(RemoteError):
        client.models()


# Keys


def test_the_key_goes_below_the_address_only(server: BadEndpoint) -> None:
    ask(server, key=SECRET)
    with Client(of(server), SECRET) as client:
        about(client)
    assert {each.key for each in server.asked} == {SECRET}
    server.asked.clear()
    server.get = lambda asked: asked.json({"data": [{"id": MODEL}]} if asked.path == "/tenant/v1/models" else {})
    with Client(endpoint_at(server.url.replace("/v1", "/tenant/v1"), "rack"), SECRET) as client:
        about(client)
    assert {each.key for each in server.asked if each.path.startswith("/tenant/v1/")} == {SECRET}
    assert {each.key for each in server.asked if not each.path.startswith("/tenant/v1/")} == {""}


def test_the_key_does_not_follow_to_another_host(server: BadEndpoint) -> None:
    with BadEndpoint() as other:
        for status in (301, 302, 307, 308):
            server.answer = lambda asked, status=status: asked.send(status, location=f"{other.url}/chat/completions")
            assert failure(server, key=SECRET, model=MODEL).kind is Trouble.ADDRESS
        assert other.asked == []


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_no_failure_and_no_log_repeats_the_key(
    server: BadEndpoint, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.answer = lambda asked: asked.error(status, f"Bad key {SECRET} for the model.", SECRET)
    failed = failure(server, key=SECRET)
    assert SECRET not in f"{failed!r} {failed} {failed.__cause__!r} {failed.__context__!r}"
    assert SECRET not in caplog.text


def test_no_key_crosses_the_network_readable() -> None:
    with pytest.raises(EngineError, match="readable"):
        Client(endpoint_at("http://10.0.0.5:8000"), SECRET)


def test_a_proxy_of_the_environment_does_not_see_what_stays_here(
    server: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert ask(server, key=SECRET).text == "Hello"


# Certificates


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    both, alone = write_certificate(tmp_path)
    with BadEndpoint(certificate=both) as server:
        failed = failure(server, key=SECRET)
        assert failed.kind is Trouble.CERTIFICATE
        assert server.posted == []
        assert ask(server, key=SECRET, ca_file=str(alone)).text == "Hello"
    assert server.posted[0].key == SECRET


def test_a_servers_own_certificate_is_trusted_by_itself_and_not_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    both, alone = write_certificate(tmp_path / "a", "another.example")
    other = write_certificate(tmp_path / "b", "127.0.0.1")[1]
    with BadEndpoint(certificate=both) as server:
        assert ask(server, ca_file=str(alone)).text == "Hello"
        assert failure(server, ca_file=str(other)).kind is Trouble.CERTIFICATE


def test_a_certificate_that_has_expired(tmp_path: Path) -> None:
    both, alone = write_certificate(tmp_path, days=-1)
    with BadEndpoint(certificate=both) as server:
        assert failure(server, ca_file=str(alone)).kind is Trouble.CERTIFICATE


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nabc\n"])
def test_a_file_of_certificates_that_is_none(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EngineError) as refused:
        Client(endpoint_at("https://127.0.0.1:1", "rack", ca_file=str(file)), "")
    assert str(file) in refused.value.message


def test_https_where_none_is_spoken(server: BadEndpoint) -> None:
    wrong = endpoint_at(server.url.replace("http:", "https:"), "rack")
    with Client(wrong, "", QUICK) as client, pytest.raises(RemoteError) as failed:
        client.models()
    assert failed.value.kind is Trouble.ADDRESS


# Looking


def test_a_look_finds_the_server_and_what_it_lacks(server: BadEndpoint) -> None:
    def poor(asked: Asked) -> None:
        if {"tools", "stream_options", "top_k"} & asked.body.keys():
            asked.error(400, "Extra inputs are not permitted.")
        else:
            asked.stream("Hello", usage=None)

    server.answer, server.owner = poor, "vllm"
    server.get = lambda asked: asked.json({"version": "0.12.1"} if asked.path == "/version" else {})
    with Client(of(server), "") as client:
        seen = about(client)
    assert seen.found == Found("vllm", "0.12.1", (MODEL,), (0,), ("usage", "tools", "schema", "sampling"))
    assert seen.model == MODEL
    assert seen.first_token_s is not None
    assert seen.problem == ""


def test_a_look_says_why_a_model_does_not_answer(server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.error(500, "out of memory")
    with Client(of(server), "") as client:
        assert "out of memory" in about(client).problem
    server.answer = lambda asked: asked.error(401, "no")
    with Client(of(server), "") as client, pytest.raises(RemoteError):
        about(client)


def test_what_lacks_something_is_not_asked_for_it(server: BadEndpoint) -> None:
    found = Found("vllm", "", (MODEL,), (0,), ("stream", "tools", "schema"))
    message = {"role": "assistant", "content": "Hello"}
    server.answer = lambda asked: asked.json({"choices": [{"message": message, "finish_reason": "stop"}]})
    tool = Tool("weather", "", "{}")
    request = replace(HELLO, tools=(tool,), constraint=Constraint(schema="{}"))
    assert ask(server, request, found=found).text == "Hello"
    assert not server.posted[0].body.keys() & {"stream", "tools", "response_format"}


def test_limits_of_an_answer_hold(server: BadEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWER_BYTES", 1000)
    server.answer = lambda asked: asked.stream(*(["x" * 100] * 20))
    assert "no end" in failure(server).message
