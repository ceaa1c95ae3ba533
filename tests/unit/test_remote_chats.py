"""Chats that another server answers, in the engine process: each ends once, and the engine has no part in them."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from engine.common.chat import Tool, ToolCall
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.process.remote import RemoteRequests
from engine.process.requests import RequestQueue
from engine.protocol import Called, ChatMessage, Event, Failed, Finished, Generate, Token, decode, encode
from engine.remote.endpoint import Found, RemoteModel, endpoint_at
from engine.telemetry.lanes import ELSEWHERE, WRITTEN_ELSEWHERE
from engine.telemetry.recorder import RECORDER
from engine.worker import read_commands
from tests.bad_endpoint import MODEL, Asked, BadEndpoint

SECRET = "sk-very-secret-1234567890"


@dataclass
class Process:
    """The part of the engine process that takes chats, without an engine."""

    events: list[Event] = field(default_factory=list)
    places: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        self.requests = RequestQueue(self._take)
        self.chats = RemoteRequests(
            self.requests, self._take, lambda number, place: self.places.append((number, place))
        )

    def _take(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def ask(self, server: BadEndpoint, name: str = "r", key: str = "", **more: object) -> None:
        remote = RemoteModel(endpoint_at(server.url, "rack"), key=key, **more)  # type: ignore[arg-type]
        self.chats.begin(Generate(name, (ChatMessage("user", "Hello"),), SamplingParams(), remote))

    def wait_for(self, kind: type, name: str = "r") -> Event:
        def found() -> list[Event]:
            return [each for each in self.events if isinstance(each, kind) and each.request_id == name]  # type: ignore[union-attr]

        with self._news:
            assert self._news.wait_for(found, 30), self.events
        return found()[0]


@pytest.fixture
def process() -> Iterator[Process]:
    found = Process()
    yield found
    found.requests.close()
    found.chats.close()


def test_calls_of_a_server_s_own_tools_are_shown(process: Process, server: BadEndpoint) -> None:
    def answer(asked: Asked) -> None:
        asked.begin_stream()
        function = {"name": "search", "arguments": '{"for": "rain"}'}
        asked.chunk({"tool_calls": [{"index": 0, "id": "c", "function": function}]}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    server.answer = answer
    process.ask(server)
    process.wait_for(Finished)
    text = "".join(event.text for event in process.events if isinstance(event, Token))
    assert text.strip() == '```\nsearch({"for": "rain"})\n```'


def test_tools_are_offered_and_calls_of_them_come_back(process: Process, server: BadEndpoint) -> None:
    def answer(asked: Asked) -> None:
        asked.begin_stream()
        function = {"name": "search", "arguments": '{"for": "rain"}'}
        asked.chunk({"tool_calls": [{"index": 0, "id": "c", "function": function}]}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    server.answer = answer
    tool = Tool("search", "Searches.", '{"type": "object"}')
    remote = RemoteModel(endpoint_at(server.url, "rack"))
    process.chats.begin(Generate("r", (ChatMessage("user", "Hi"),), SamplingParams(), remote, tools=(tool,)))
    called = process.wait_for(Called)
    assert called.calls == (ToolCall("c", "search", '{"for": "rain"}'),)
    process.wait_for(Finished)
    assert server.posted[0].body["tools"][0]["function"]["name"] == "search"
    unable = replace(endpoint_at(server.url, "old"), found=Found(lacks=("tools",)))
    asked = Generate("s", (ChatMessage("user", "Hi"),), SamplingParams(), RemoteModel(unable), tools=(tool,))
    process.chats.begin(asked)
    failed = process.wait_for(Failed, "s")
    assert "takes no tools" in failed.message


def test_several_at_once_and_one_is_cancelled(process: Process, server: BadEndpoint) -> None:
    may_end = threading.Event()

    def answer(asked: Asked) -> None:
        asked.begin_stream()
        asked.chunk({"content": "Hel"})
        may_end.wait(30)
        asked.chunk({"content": "lo"}, "stop")

    server.answer = answer
    for name in ("a", "b"):
        process.ask(server, name)
    for name in ("a", "b"):
        process.wait_for(Token, name)
    process.requests.cancel("a")
    cancelled = process.wait_for(Finished, "a")
    assert (cancelled.finish_reason, cancelled.generated_tokens) == ("cancelled", 1)
    may_end.set()
    finished = process.wait_for(Finished, "b")
    assert finished.finish_reason == "stop"


def test_a_failure_is_the_chats_own(process: Process, server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.error(500, "oops")
    process.ask(server)
    failed = process.wait_for(Failed)
    assert failed.code is ErrorCode.ENDPOINT_FAILED
    assert "rack" in failed.message
    server.answer = lambda asked: asked.stream("Hello")
    process.ask(server, "again")
    process.wait_for(Finished, "again")


def test_an_id_ends_once(process: Process, server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.hang()
    process.ask(server)
    process.ask(server)
    process.requests.close()
    process.ask(server, "late")
    process.chats.close()
    ended = [event.request_id for event in process.events if isinstance(event, Finished | Failed)]
    assert sorted(ended) == ["late", "r"]
    assert len(server.posted) <= 1


def test_the_lane_of_requests_shows_waiting_and_writing(process: Process, server: BadEndpoint) -> None:
    RECORDER.start()
    try:
        process.ask(server)
        process.wait_for(Finished)
        process.chats.close()
        spans = RECORDER.take_spans()
    finally:
        RECORDER.stop()
    assert spans["name"].tolist() == [ELSEWHERE, WRITTEN_ELSEWHERE]
    assert spans["count"].tolist() == [0, 2]
    assert process.places == [(int(spans["request"][0]), "rack")]


def test_a_command_travels_without_showing_its_key(server: BadEndpoint) -> None:
    found = Found("vllm", "1", (MODEL,), (100,), ("tools",))
    remote = RemoteModel(endpoint_at(server.url, "rack", price_in=0.5, found=found), MODEL, SECRET, ("seed",))
    message = Generate("r", (ChatMessage("user", "Hello"),), SamplingParams(), remote)
    assert decode(encode(message)) == message
    assert SECRET not in repr(message)


def test_commands_reach_it_whatever_the_engine_does(process: Process, server: BadEndpoint) -> None:
    theirs, ours = os.pipe()
    remote = RemoteModel(endpoint_at(server.url, "rack"))
    os.write(ours, encode(Generate("r", (ChatMessage("user", "Hello"),), SamplingParams(), remote)))
    os.close(ours)
    assert not read_commands(theirs, process.requests, None, None, None, process.chats)  # type: ignore[arg-type]
    os.close(theirs)
    process.wait_for(Finished)
