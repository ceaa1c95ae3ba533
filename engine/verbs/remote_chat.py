"""`switchyard chat` where another server answers: nothing of the engine is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.common.chat import ChatMessage, FinishReason, Tool, ToolCall
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.protocol import Token
from engine.remote.chat_form import RemoteAnswer, RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import called, parse_remote
from engine.verbs.output import note

_LEFT_OUT = {"dry": "DRY", "beams": "beam search", "thinking": "--thinking"}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, as the engine gives them."""

    text: str
    reasoning: str
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    ttft_s: float
    tokens_per_s: float
    model: str
    left_out: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()


class RemoteTalk:
    """Has an endpoint's model answer as the engine would."""

    def __init__(self, client: Client, model: str, chosen: tuple[str, ...]) -> None:
        self._client, self.model, self._chosen = client, model, chosen
        self._noted: set[str] = set()

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[int, int], None],  # noqa: ARG002 - nothing is known of it
        on_text: Callable[[str, int], None],
        on_reasoning: Callable[[str, int], None],
        cancelled: Callable[[], bool],
        tools: tuple[Tool, ...] = (),
    ) -> Told:
        said: list[str] = []
        thought: list[str] = []
        pieces = 0

        def on_delta(delta: Token) -> None:
            nonlocal pieces
            pieces = delta.generated_tokens
            if delta.reasoning:
                thought.append(delta.reasoning)
                on_reasoning(delta.reasoning, pieces)
            if delta.text:
                said.append(delta.text)
                on_text(delta.text, pieces)

        if tools and "tools" in self._client.found.lacks:
            words = f"{called(self._client.endpoint)} takes no tools: leave --tools out, or choose another model."
            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, words)
        request = RemoteRequest(tuple(messages), sampling, self.model, tools, chosen=self._chosen)
        try:
            answer = self._client.ask(request, on_delta, cancelled)
        except RequestCancelled:
            return Told("".join(said), "".join(thought), "cancelled", 0, pieces, 0.0, 0.0, self.model)
        self._note_left_out(answer)
        return _told(answer)

    def _note_left_out(self, answer: RemoteAnswer) -> None:
        new = [name for name in answer.left_out if name not in self._noted]
        self._noted.update(new)
        if new:
            names = ", ".join(_LEFT_OUT.get(name, f"--{name.replace('_', '-')}") for name in new)
            note(f"switchyard: {called(self._client.endpoint)} does not take {names}; it answers without")


def run(
    args: argparse.Namespace,
    given: dict[str, Any],
    use: Callable[[RemoteTalk, str, SamplingParams], int],
) -> int:
    """Opens the endpoint that `--model` names, and hands it to `use` with a line about it and the sampling."""
    for option in ("record_routing", "trace"):
        if getattr(args, option, None) is not None:
            name = f"--{option.replace('_', '-')}"
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} needs a model on this PC: leave it out.")
    endpoint, model = parse_remote(args.model)
    with Client(endpoint) as client:
        model = model or client.only_model()
        talk = RemoteTalk(client, model, tuple(given))
        return use(talk, f"{model}, sent to {called(endpoint)}", replace(SamplingParams(), **given))


def document(told: Told, args: argparse.Namespace) -> dict[str, Any]:
    endpoint, _model = parse_remote(args.model)
    fields = ("text", "reasoning", "prompt_tokens", "generated_tokens", "ttft_s", "tokens_per_s", "finish_reason")
    return {
        **{name: getattr(told, name) for name in fields},
        "model": told.model,
        "endpoint": endpoint.name,
        "host": endpoint.host,
        "left_out": list(told.left_out),
    }


def _told(answer: RemoteAnswer) -> Told:
    return Told(
        answer.text,
        answer.reasoning,
        answer.finish_reason,
        answer.prompt_tokens or 0,
        answer.written,
        answer.first_token_s or 0.0,
        answer.tokens_per_s,
        answer.model,
        answer.left_out,
        answer.tool_calls,
    )
