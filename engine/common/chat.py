"""The turns of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length", "stop_string", "context", "cancelled"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, as plain text."""

    role: Role
    content: str


# --- commands: window -> worker -------------------------------------------------------------------
