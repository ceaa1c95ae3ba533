"""Chats that break beside a job, or among other programs' requests, are told so and harm nothing else."""

from typing import Any

import pytest

from engine.common.config import SamplingParams
from engine.process.chats import ChatService
from engine.process.requests import RequestQueue
from engine.protocol import ChatMessage, Event, Failed, Generate


class Breaking:
    """An engine that takes chats and fails to answer them."""

    def __init__(self) -> None:
        self._ends: list[Any] = []

    def begin(self, _request: Any, on_end: Any, *_args: Any, **_options: Any) -> None:
        self._ends.append(on_end)

    @property
    def scheduler(self) -> "Breaking":
        return self

    @property
    def is_answering(self) -> bool:
        return bool(self._ends)

    is_busy = is_answering

    def is_due(self) -> bool:
        return self.is_answering

    def serve(self, until: Any) -> None:
        until()
        error = MemoryError()
        ends, self._ends = self._ends, []
        for end in ends:
            end(error)
        raise error

    share = serve


@pytest.mark.parametrize("how", ["answer", "take_turns"])
def test_what_breaks_chats_ends_them_and_nothing_else(how: str) -> None:
    events = list[Event]()
    requests = RequestQueue(events.append)
    chats = ChatService(requests, events.append, Breaking(), lambda _name: None, lambda _tokens: None)
    for name in ("a", "b"):
        requests.accept(Generate(name, (ChatMessage("user", "Hello"),), SamplingParams()))
    assert chats.are_due()
    getattr(chats, how)()
    assert [(type(event), event.request_id) for event in events] == [(Failed, "a"), (Failed, "b")]  # type: ignore[union-attr]
    assert not chats.are_due()
