"""OpenAI's `/v1/responses`: the same answers as chat completions, as a list of items and their events.

Nothing is stored between requests: a `previous_response_id` is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from engine.batch_files.openai_requests import (
    BadRequestError,
    read_call,
    read_content,
    read_id,
    read_messages,
    read_text,
    without_pictures,
)
from engine.common.chat import ChatMessage, ToolCall
from engine.common.errors import EngineError
from engine.protocol import Ask, Began, Finished
from engine.serving.answers import Blocks, Call, Endpoint, Kind, openai_tools, respond, versioned


async def create(call: Call) -> Any:
    name, ask = await _ask(call)
    return await respond(call, [ask], _Answer(name, call.body, ask), streams=call.body.get("stream"))


async def count(call: Call) -> Any:
    _name, ask = await _ask(call)
    tokens = await call.service.prompt_length(call.request, ask)
    return {"object": "response.input_tokens", "input_tokens": tokens}


async def _ask(call: Call) -> tuple[str, Ask]:
    offer = openai_tools(call.body, flat=True)
    return await call.service.ask_of(call.body, "responses", _messages(call.body), offer)


PATHS = versioned((Endpoint("POST", "/responses", create), Endpoint("POST", "/responses/input_tokens", count)))


_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_THOUGHT: dict[str, Any] = {"type": "reasoning_text", "text": ""}


class _Answer(Blocks):
    """One response, as a list of items of which the last may be open."""

    def __init__(self, name: str, body: Mapping[str, Any], ask: Ask) -> None:
        super().__init__(ask)
        self._number = 0
        self._is_open = False
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": name,
            "output": [],
            "parallel_tool_calls": ask.choice.several,
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [tool for tool in body.get("tools") or [] if tool["type"] == "function"],
            "top_p": body.get("top_p"),
            "usage": None,
        }

    def begins(self, _began: Began) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._line(kind, response=dict(self._response)) for kind in kinds]

    def ends(self) -> list[dict[str, Any]]:
        is_cut = self.ended.finish_reason in ("length", "context")
        status = self._response["status"] = "incomplete" if is_cut else "completed"
        lines = self.closed(status)
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["usage"] = _usage(self.ended, self.thought_tokens)
        return [*lines, self._line(f"response.{status}", response=self._response)]

    def whole(self) -> dict[str, Any]:
        return self._response

    def breaks(self, error: EngineError) -> str:
        if self._is_open:
            self._item["status"] = "incomplete"
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self.wire(self._line("response.failed", response=self._response))

    def opened(self, kind: Kind) -> list[dict[str, Any]]:
        if kind == "thinking":
            return self._begun({"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}, _THOUGHT)
        head = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
        begun = self._begun(head, _TEXT)
        return [*begun, self._at("response.content_part.added", content_index=0, part=dict(_TEXT))]

    def more(self, _kind: Kind, text: str) -> dict[str, Any]:
        (part,) = self._item["content"]
        part["text"] += text
        return self._of_part("delta", part, delta=text)

    def called(self, call: ToolCall) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name}
        lines = self._begun({**item, "arguments": "", "status": "in_progress"})
        self._item["arguments"] = call.arguments
        lines.append(self._at("response.function_call_arguments.delta", delta=call.arguments))
        lines.append(self._at("response.function_call_arguments.done", arguments=call.arguments, name=call.name))
        return [*lines, *self.closed()]

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self._response["output"][-1]
        return item

    def _begun(self, item: dict[str, Any], *content: dict[str, Any]) -> list[dict[str, Any]]:
        if content:
            item["content"] = []
        place = len(self._response["output"])
        begun = self._line("response.output_item.added", output_index=place, item=deepcopy(item))
        item |= {"content": [dict(part) for part in content]} if content else {}
        self._response["output"].append(item)
        self._is_open = True
        return [begun]

    def closed(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open, item, lines = False, self._item, []
        for part in item.get("content", ()):
            lines.append(self._of_part("done", part, text=part["text"]))
            if item["type"] == "message":
                lines.append(self._at("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        place = len(self._response["output"]) - 1
        return [*lines, self._line("response.output_item.done", output_index=place, item=item)]

    def _of_part(self, what: str, part: dict[str, Any], **fields: Any) -> dict[str, Any]:
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._at(f"response.{part['type']}.{what}", content_index=0, **fields, **more)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = len(self._response["output"]) - 1
        return self._line(kind, item_id=self._item["id"], output_index=place, **fields)

    def _line(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _usage(ended: Finished, thought_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": ended.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ended.reused_tokens},
        "output_tokens": ended.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": ended.prompt_tokens + ended.generated_tokens,
    }


def _messages(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    messages = []
    if body.get("instructions"):
        messages.append(ChatMessage("system", read_text(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
        return (*messages, ChatMessage("user", given))
    if not isinstance(given, list) or not given:
        raise BadRequestError("has no input")
    for item in given:
        for turn in _turn(item):
            last = messages[-1] if messages else None
            if turn.tool_calls and last is not None and last.role == "assistant":
                # One turn of the model may be several items: what it says, and each of its calls.
                messages[-1] = replace(last, tool_calls=(*last.tool_calls, *turn.tool_calls))
            else:
                messages.append(turn)
    return tuple(messages)


def _turn(item: Any) -> list[ChatMessage]:
    if not isinstance(item, Mapping):
        raise BadRequestError("has an input item that is not an object")
    kind = item.get("type", "message")
    if kind == "message":
        return list(read_messages([item]))
    if kind == "function_call":
        call = read_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        return [ChatMessage("assistant", "", tool_calls=(call,))]
    if kind == "function_call_output":
        output, pictures = without_pictures(item.get("output"))
        turns = [ChatMessage("tool", read_text(output), answers=read_id(item.get("call_id")))]
        text, parts = read_content(pictures)  # of the user, as templates have no others
        return [*turns, ChatMessage("user", text, parts=parts)] if parts else turns
    if kind == "reasoning":
        return []
    raise BadRequestError(f"has an input item of the type {str(kind)[:40]!r}, which this server does not take")
