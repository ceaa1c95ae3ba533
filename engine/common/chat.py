"""The turns of a conversation, and the tools that a model may call in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]
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
class ToolCall:
    """What the model asks its caller to run; `arguments` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, as plain text.

    Attributes:
        reasoning: what an assistant thought before its answer.
        tool_calls: what an assistant asked to run; `answers` is the id of the call whose result a tool's turn is.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""
