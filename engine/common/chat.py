"""The turns of a conversation, pictures in them, and the tools that a model may call in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
PromptEnd = Literal["answer", "continue", "whole"]
"""How the prompt of a conversation ends: where an answer begins, in the middle of its last turn, or after that turn."""
FinishReason = Literal["stop", "length", "stop_string", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask its caller to run; `parameters` is a JSON schema, as JSON text."""

    name: str
    description: str
    parameters: str


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer may, or must, hold.

    Attributes:
        must: the answer is a call, and no more than one.
        names: of the tools that may be called; empty for all that are offered.
        several: more than one call may come.
    """

    must: bool = False
    names: tuple[str, ...] = ()
    several: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asks its caller to run; `arguments` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


def calls_text(calls: Iterable[ToolCall]) -> str:
    """Calls of tools for people to read, one on each line: `weather({"city": "Paris"})`."""
    return "\n".join(f"{call.name}({call.arguments})" for call in calls)


def calls_listed(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Calls of tools in OpenAI's form."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def calls_as_json(calls: Iterable[ToolCall]) -> str:
    """Calls of tools in OpenAI's form, as JSON; empty without any."""
    return json.dumps(listed, ensure_ascii=False) if (listed := calls_listed(calls)) else ""


def tool_described(tool: Tool) -> dict[str, Any]:
    described = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": described}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in a turn; `media` is its type, such as `image/png`, and `data` its file in base64."""

    media: str
    data: str

    @property
    def url(self) -> str:
        """All of it as an address (RFC 2397)."""
        return f"data:{self.media};base64,{self.data}"


def picture_part(picture: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture.url}}


def parts_with(text: str, pictures: Iterable[Picture]) -> str:
    """`ChatMessage.parts` of a text about pictures, which come first; empty without any."""
    parts = list(map(picture_part, pictures))
    if parts and text:
        parts.append({"type": "text", "text": text})
    return json.dumps(parts, ensure_ascii=False) if parts else ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation: its text, and what else belongs to it.

    Attributes:
        reasoning: what an assistant thought before its answer.
        tool_calls: what an assistant asked to run; `answers` is the id of the call whose result a tool's turn is.
        parts: the content as a list in OpenAI's form, as JSON, where it holds more than text, such as pictures. Other
            servers get it as it is; a model here that sees is given texts and pictures in this order, whose addresses
            are `data:` ones.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    parts: str = ""
