"""A chat's records: plain frozen dataclasses, passed between the store's thread and the window."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.common.chat import Picture
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.protocol import Role

ROLES: tuple[Role, ...] = ("system", "user", "assistant")


class MessageState(StrEnum):
    """How far a message has come.  Values are stored on disk: never rename one."""

    STREAMING = "streaming"
    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Statistics of one answer, as measured by the engine; times in seconds.

    Attributes:
        guessed_tokens: tokens that were tried ahead; the answer went on with `accepted_tokens` of them.
    """

    finish_reason: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One turn, a node of its conversation's tree.

    Attributes:
        parent_id: the turn before it; siblings are versions of the same turn.
        reason: why an answer is partial or failed, in one sentence.
        reason_code: the `ErrorCode` (or `cancelled`, `interrupted`) behind `reason`.
        chosen: whether this sibling is on the visible path.
        reasoning: what the model thought before it answered, for `reasoning_s` seconds.
        pictures: what a user's message shows; never changed after it was added.
    """

    id: str
    conversation_id: str
    parent_id: str | None
    role: Role
    content: str
    state: MessageState = MessageState.COMPLETE
    reason: str = ""
    reason_code: str = ""
    model: str = ""
    created_at: float = 0.0
    stats: AnswerStats | None = None
    chosen: bool = True
    reasoning: str = ""
    reasoning_s: float = 0.0
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages.  `sampling` is None for the model's own; times are Unix seconds."""

    id: str
    title: str = ""
    pinned: bool = False
    created_at: float = 0.0
    updated_at: float = 0.0
    system_prompt: str = ""
    sampling: SamplingParams | None = None
    model: str = ""
    draft: str = ""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation found by a search.  Matches in `snippet` stand between MATCH_START and MATCH_END."""

    conversation: Conversation
    snippet: str
    message_id: str | None = None


MATCH_START = "\x02"
MATCH_END = "\x03"


def new_id() -> str:
    """A fresh id; made by the window, so that nothing has to wait for the disk."""
    return uuid.uuid4().hex


def new_conversation(**fields: Any) -> Conversation:
    """A conversation created now."""
    now = time.time()
    return Conversation(id=new_id(), created_at=now, updated_at=now, **fields)


def clean_text(text: str) -> str:
    """`text` as SQLite and UTF-8 can store it: a lone surrogate or a NUL becomes U+FFFD."""
    if "\x00" in text:
        text = text.replace("\x00", "�")
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sampling_to_json(sampling: SamplingParams | None) -> str | None:
    """The settings as JSON, or None for the defaults."""
    return None if sampling is None else json.dumps(dataclasses.asdict(sampling))


def sampling_from_json(text: str | None) -> SamplingParams | None:
    """The settings in `text`; None, which means the defaults, if they are invalid."""
    if not text:
        return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return sampling_from_dict(raw)


def sampling_from_dict(raw: object) -> SamplingParams | None:
    """As `sampling_from_json`, from parsed JSON.  Unknown keys are ignored, so that newer files can be read."""
    if not isinstance(raw, dict):
        return None
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    values = {key: value for key, value in raw.items() if key in known}
    for name in ("stop", "dry_breakers"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if isinstance(biases := values.get("logit_bias"), list):
        values["logit_bias"] = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in biases)
    if not all(_is_of_type(name, value) for name, value in values.items()):
        return None
    try:
        return SamplingParams(**values)
    except (EngineError, TypeError, OverflowError):
        return None


def _is_bias(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int and type(pair[1]) in (int, float)


def _is_of_type(name: str, value: object) -> bool:
    default = getattr(SamplingParams(), name)
    if isinstance(default, str):
        return isinstance(value, str)
    if name == "seed":
        return value is None or type(value) is int
    if name == "logit_bias":
        return isinstance(value, tuple) and all(_is_bias(pair) for pair in value)
    if isinstance(default, tuple):
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    return type(value) is int or (isinstance(default, float) and type(value) is float)
