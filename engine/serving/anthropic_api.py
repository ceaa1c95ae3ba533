"""Anthropic's interface: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from engine.batch_files.openai_requests import (
    BadRequestError,
    read_call,
    read_content,
    read_id,
    read_text,
    without_pictures,
)
from engine.common.chat import ChatMessage, FinishReason, ToolCall
from engine.common.errors import EngineError
from engine.protocol import Ask, Began, Finished, Progress
from engine.serving.answers import (
    Blocks,
    Call,
    Endpoint,
    Kind,
    counted,
    event_line,
    listed_tools,
    read_offer,
    read_tool,
    respond,
)
from engine.serving.service import Offer

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOPS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "context": "max_tokens",
    "cancelled": "end_turn",
}


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    kind = _KINDS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def messages(call: Call) -> Any:
    name, ask = await _ask(call)
    if call.body.get("max_tokens") is None:
        raise BadRequestError("has no max_tokens")
    return await respond(call, [ask], _Answer(name, ask), streams=call.body.get("stream"))


async def _ask(call: Call) -> tuple[str, Ask]:
    offer, turns = _offer(call.body), _messages(call.body)
    # Whoever ends with the model's turn has written how its answer begins.
    is_begun = turns[-1].role == "assistant" and turns[-1].content.strip()
    return await call.service.ask_of(call.body, "messages", turns, offer, "continue" if is_begun else "answer")


PATHS = (Endpoint("POST", "/v1/messages", messages), Endpoint("POST", "/v1/messages/count_tokens", counted(_ask)))


class _Answer(Blocks):
    error_body = staticmethod(error_body)
    beat = event_line({"type": "ping"}, "ping")

    def __init__(self, name: str, ask: Ask) -> None:
        super().__init__(ask)
        self._blocks: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": name,
        }

    def whole(self) -> dict[str, Any]:
        return {**self._head, "content": self._blocks, **self._stop, "usage": _usage(self.ended)}

    def begins(self, began: Began) -> list[dict[str, Any]]:
        begun = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(Finished("", "stop", began.prompt_tokens, 0, 0))
        return [{"type": "message_start", "message": {**begun, "usage": usage}}, {"type": "ping"}]

    def ends(self) -> list[dict[str, Any]]:
        delta = {"type": "message_delta", "delta": self._stop, "usage": _usage(self.ended)}
        return [*self.closed(), delta, {"type": "message_stop"}]

    def reads(self, _read: Progress, _index: int) -> str:
        return self.beat

    @property
    def _stop(self) -> dict[str, str | None]:
        ended = self.ended
        reason = _STOPS[ended.finish_reason]
        if ended.finish_reason == "stop_string" and ended.stopped_by not in self.ask.sampling.get("stop", ()):
            reason = "end_turn"  # what ends every turn of this model
        if self.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": ended.stopped_by if reason == "stop_sequence" else None}

    def opened(self, kind: Kind) -> list[dict[str, Any]]:
        return [self._started({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})]

    def more(self, kind: Kind, text: str) -> dict[str, Any]:
        self._blocks[-1][kind] += text
        return self._delta({"type": f"{kind}_delta", kind: text})

    def called(self, call: ToolCall) -> list[dict[str, Any]]:
        begun = self._started({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._blocks[-1]["input"] = json.loads(call.arguments)
        return [begun, self._delta({"type": "input_json_delta", "partial_json": call.arguments})]

    def closed(self) -> list[dict[str, Any]]:
        if not self._blocks:
            return []
        # Clients wait for the signature of a thought, of which there is none.
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if "signature" in self._blocks[-1] else []
        return [*signed, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _started(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(dict(block))
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(ended: Finished) -> dict[str, int]:
    return {
        "input_tokens": ended.prompt_tokens - ended.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": ended.reused_tokens,
        "output_tokens": ended.generated_tokens,
    }


def _offer(body: Mapping[str, Any]) -> Offer:
    offered = listed_tools(body)
    for entry in offered:
        if entry.get("type") not in (None, "custom"):
            foreign = str(entry["type"])[:40]
            raise BadRequestError(f"offers a tool of the type {foreign!r}, which this server cannot run; leave it out")
    tools = [read_tool(entry.get("name"), entry.get("description"), entry.get("input_schema")) for entry in offered]
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}
    if not isinstance(kind, str) or kind not in kinds:
        raise BadRequestError(f"has the tool_choice {str(kind)[:40]!r}; use auto, any, tool or none")
    several = not choice.get("disable_parallel_tool_use")
    return read_offer(tools, kinds[kind], str(choice.get("name", "")), several=several)


def _messages(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    messages = []
    if body.get("system"):
        messages.append(ChatMessage("system", read_text(body["system"])))
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise BadRequestError("has no messages")
    for entry in given:
        role = entry.get("role") if isinstance(entry, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise BadRequestError(f"has a message with the role {str(role)[:20]!r}; use user or assistant")
        messages += _turns(role, entry.get("content"))
    return tuple(messages)


def _turns(role: Any, content: Any) -> list[ChatMessage]:
    """One message may hold results of tools and text: each result is a turn of its own.

    Its pictures go to the user's, as templates have them nowhere else.
    """
    if isinstance(content, str):
        return [ChatMessage(role, content)]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadRequestError("has a message that is not text")
    turns, said, thought, calls = list[ChatMessage](), list[Any](), "", list[ToolCall]()
    for block in content:
        kind = block.get("type")
        if kind == "tool_result":
            result, pictures = without_pictures(block.get("content", ""))
            turns.append(ChatMessage("tool", read_text(result), answers=read_id(block.get("tool_use_id"))))
            said += pictures
        elif kind == "tool_use":
            calls.append(read_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "thinking":
            thought += read_text(block.get("thinking"))
        elif kind != "redacted_thinking":
            said.append(block)
    text, parts = read_content(said, role)
    if text or parts or thought or calls or not turns:
        turns.append(ChatMessage(role, text, thought, tuple(calls), parts=parts))
    return turns
