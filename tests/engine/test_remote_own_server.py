"""The client of endpoints and our own server: everything that one gives, the other takes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.common.installed import version
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import endpoint_at
from engine.remote.failures import RemoteError, Trouble
from engine.serving.server import Address
from tests.engine.test_serving import TOOL, serving

KEY = "0123456789abcdef"
HELLO = (ChatMessage("user", "Hello"),)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(Address(port=0, key=KEY)) as running, Client(endpoint_at(running.url, model="mixtral"), KEY) as found:
        found.models()  # its thread is there before the first test
        yield found


def test_it_says_who_it_is_and_lacks_nothing(client: Client) -> None:
    seen = about(client)
    assert (seen.found.server, seen.found.version, seen.found.lacks) == ("switchyard", version(), ())
    assert "mixtral" in seen.found.models
    assert seen.found.blind == ("broken", "mixtral")
    assert seen.problem == ""


def test_the_same_answer_every_time_with_its_counts(client: Client) -> None:
    told: list[str] = []
    request = RemoteRequest(HELLO, SamplingParams(max_tokens=6, top_k=20, min_p=0.01, repetition_penalty=1.1))
    first = client.ask(request, lambda delta: told.append(delta.text + delta.reasoning))
    again = client.ask(request)
    assert (first.text, first.reasoning) == (again.text, again.reasoning)
    assert "".join(told) == first.reasoning + first.text
    assert first.generated_tokens == 6
    assert first.prompt_tokens
    assert first.finish_reason == "length"
    assert set(first.left_out) <= {"dry"}


def test_schemas_choices_and_tools(client: Client) -> None:
    limits = SamplingParams(max_tokens=200)
    choices = Constraint(choices=("red", "blue"))
    assert client.ask(RemoteRequest(HELLO, limits, constraint=choices)).text in ("red", "blue")
    tool = Tool("weather", "Of a city.", json.dumps(TOOL["function"]["parameters"]))  # type: ignore[index]
    answer = client.ask(RemoteRequest(HELLO, limits, tools=(tool,), must_call=True))
    assert [call.name for call in answer.tool_calls] == ["weather"], answer


def test_its_refusals_are_understood(client: Client) -> None:
    with pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest(HELLO, model="nobody"))
    assert failed.value.kind is Trouble.WRONG_MODEL
    with pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest((ChatMessage("user", "word " * 300),)))
    assert (failed.value.kind, failed.value.code) == (Trouble.REFUSED, ErrorCode.PROMPT_TOO_LONG)
    with Client(client.endpoint, "") as stranger, pytest.raises(RemoteError) as failed:
        stranger.models()
    assert failed.value.kind is Trouble.KEY
