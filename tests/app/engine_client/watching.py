"""Engine clients with workers that do as a test says, and what they said."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import ChatAnswer, Request
from engine.common.config import EngineConfig, SamplingParams
from engine.protocol import (
    PROTOCOL_VERSION,
    ChatMessage,
    Ready,
    encode,
)

R = TypeVar("R", bound=Request)

HERE = Path(__file__).parents[1]


SCRIPTED = [sys.executable, "-P", str(HERE / "scripted_worker.py")]


POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


WAIT_MS = 30_000


class Watch:
    """What a client said, and every request that was made of it through here, in order; requests go by their id."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.states: list[EngineState] = []
        self.events: list[Any] = []
        self.text: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.progress: list[Any] = []
        self.telemetry: list[Any] = []
        client.state_changed.connect(self.states.append)
        client.telemetry.connect(self.telemetry.append)

    def ask(self, prompt: str) -> ChatAnswer:
        answer = self.client.generate([ChatMessage("user", prompt)], SamplingParams())
        answer.token.connect(self._on_token)
        return self.follow(answer)

    def load(self, model: str) -> Request:
        return self.follow(self.client.load(EngineConfig(model)))

    def follow(self, request: R) -> R:
        request.progress.connect(self.progress.append)
        request.finished.connect(self.events.append)
        return request

    def _on_token(self, token: Any) -> None:
        self.text[token.request_id] = self.text.get(token.request_id, "") + token.text
        self.generated[token.request_id] = token.generated_tokens

    def ended(self, *requests: Request) -> bool:
        return {request.id for request in requests} <= {event.request_id for event in self.events}

    def end_of(self, request: Request) -> Any:
        (event,) = [event for event in self.events if event.request_id == request.id]
        return event


Make = Callable[..., tuple[EngineClient, Watch]]


def worker_saying(*lines: bytes, then: str = "sys.stdin.read()") -> list[str]:
    """A worker that is not ours: writes these lines, then does that."""
    script = f"import sys, os, time; sys.stdout.buffer.write({b''.join(lines)!r}); sys.stdout.flush(); {then}"
    return [sys.executable, "-c", script]


READY = encode(Ready(PROTOCOL_VERSION, 1))
