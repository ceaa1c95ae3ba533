"""Clients of every interface say in its own words how much a model is to think."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.serving.server import Address, Server
from engine.serving.service import LibraryModels, Service
from tests import plain_http
from tests.scripted_broker import ScriptedBroker

ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": False}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ScriptedBroker]]:
    broker, models = ScriptedBroker(ends=True), LibraryModels(Path("mixtral"), "mixtral")
    models.listed = list  # type: ignore[method-assign,assignment]
    made = Server(Service(broker, models), Address(port=0))
    yield f"http://127.0.0.1:{made.start()}", broker
    made.stop()


@pytest.mark.parametrize(
    ("path", "fields", "thinking"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "high"),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "off"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"thinking": True}}, "on"),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "low"}}, "low"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "on"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "off"),
        ("/api/chat", {"think": True}, "on"),
        ("/api/chat", {"think": False}, "off"),
        ("/api/chat", {"think": "medium"}, "medium"),
    ],
)
def test_how_much_to_think_is_read(
    server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any], thinking: str | None
) -> None:
    assert _ask(server, path, fields) == 200
    (ticket,) = server[1].tickets
    assert ticket.ask.sampling.get("thinking") == thinking


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "loud"}),
        ("/v1/chat/completions", {"reasoning_effort": 3}),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": ["low"]}}),
        ("/api/chat", {"think": "loud"}),
    ],
)
def test_other_words_are_refused(server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any]) -> None:
    assert _ask(server, path, fields) == 400
    assert server[1].tickets == []


@pytest.mark.parametrize(
    "rest", [("Fo", "ur"), ("<tool_call>", '{"name": "add", ', '"arguments": {}}', "</tool_call>")]
)
@pytest.mark.parametrize(
    ("path", "details"),
    [("/v1/chat/completions", "completion_tokens_details"), ("/v1/responses", "output_tokens_details")],
)
def test_tokens_of_reasoning_are_counted_apart(path: str, details: str, rest: tuple[str, ...]) -> None:
    """A call, which is held back until it is whole, is none."""
    broker = ScriptedBroker(ends=True, says=("<think>", "hm, ", "hm.", "</think>", *rest))
    models = LibraryModels(Path("mixtral"), "mixtral")
    models.listed = list  # type: ignore[method-assign,assignment]
    made = Server(Service(broker, models), Address(port=0))
    add = {"name": "add", "parameters": {"type": "object"}}
    try:
        asked = {**ASKED, "input": "2 + 2?", "tools": [{"type": "function", "function": add, **add}]}
        answer = plain_http.post(f"http://127.0.0.1:{made.start()}{path}", json=asked, timeout=30).json()
    finally:
        made.stop()
    assert answer["usage"][details] == {"reasoning_tokens": 3}


def _ask(server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any]) -> int:
    url, broker = server
    broker.tickets.clear()
    return plain_http.post(url + path, json={**ASKED, **fields}, timeout=30).status_code
