"""Engine clients with workers that do as a test says, and what they said."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.services.engine_client import EngineClient, EngineState
from engine.common.config import SamplingParams
from engine.protocol import (
    PROTOCOL_VERSION,
    ChatMessage,
    Ready,
    encode,
)

HERE = Path(__file__).parents[1]


SCRIPTED = [sys.executable, "-P", str(HERE / "scripted_worker.py")]


POSIX = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


WAIT_MS = 30_000


class Watch:
    """What a client said, in order."""

    def __init__(self, client: EngineClient) -> None:
        self.states: list[EngineState] = []
        self.events: list[Any] = []
        self.text: dict[str, str] = {}
        self.generated: dict[str, int] = {}
        self.progress: list[Any] = []
        self.telemetry: list[Any] = []
        client.state_changed.connect(self.states.append)
        client.finished.connect(self.events.append)
        client.token.connect(self._on_token)
        client.progress.connect(self.progress.append)
        client.telemetry.connect(self.telemetry.append)

    def _on_token(self, token: Any) -> None:
        self.text[token.request_id] = self.text.get(token.request_id, "") + token.text
        self.generated[token.request_id] = token.generated_tokens

    def ended(self, *request_ids: str) -> bool:
        return set(request_ids) <= {event.request_id for event in self.events}

    def end_of(self, request_id: str) -> Any:
        (event,) = [event for event in self.events if event.request_id == request_id]
        return event


Make = Callable[..., tuple[EngineClient, Watch]]


def ask(client: EngineClient, prompt: str) -> str:
    return client.generate([ChatMessage("user", prompt)], SamplingParams())


def worker_saying(*lines: bytes, then: str = "sys.stdin.read()") -> list[str]:
    """A worker that is not ours: writes these lines, then does that."""
    script = f"import sys, os, time; sys.stdout.buffer.write({b''.join(lines)!r}); sys.stdout.flush(); {then}"
    return [sys.executable, "-c", script]


READY = encode(Ready(PROTOCOL_VERSION, 1))
