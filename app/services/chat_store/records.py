"""A chat's records: plain frozen dataclasses, passed between the store's thread and the window."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

from engine.batch_files.documents import Part
from engine.common.chat import Picture
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.protocol import Role
from engine.tools.rounds import CallState, Step, ToolUse

MAX_TITLE = 60


def title_from(text: str) -> str:
    line = next((line for line in text.splitlines() if any(c.isalnum() for c in line)), text)
    words = line.strip().lstrip("#>*-` ").split()
    title = ""
    for word in words:
        if title and len(title) + 1 + len(word) > MAX_TITLE:
            return title.rstrip(",;:–-") + "…"
        title = f"{title} {word}".strip()
    return title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"


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
        gave_way: sentences of the engine on what it did not do as planned.
        pictures: in the prompt; `pictures_kept` of them had been read before, the others took `pictures_s`.
    """

    finish_reason: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    gave_way: str = ""
    pictures: int = 0
    pictures_kept: int = 0
    pictures_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """A document that goes with a message: a file, whose text is kept with the chat, or a folder, which is read anew.

    Attributes:
        path: where it lies on this PC; empty if it came with an imported chat.
        pages, characters, tokens: of its text; tokens are about as many as the model makes of it, 0 if unknown.
        files: of a folder, how many were read.
        problem: why it has no text, completing a sentence about it.
        remark: what was left out of it, in a sentence.
        is_read: whether reading it has ended.
        parts: its text; only on the way into a database or out of it into a file.
    """

    id: str
    name: str
    kind: Literal["file", "folder"] = "file"
    path: str = ""
    pages: int = 0
    characters: int = 0
    tokens: int = 0
    files: int = 0
    problem: str = ""
    remark: str = ""
    is_read: bool = False
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A numbered part of a document that an answer was given to read.

    Attributes:
        number: by which the answer cites it.
        attachment: the id of the document; `name` is that of the file, within a folder with its path.
        first, last: places of its pieces in the index.
        text: of a passage; empty where the whole document was given, which has it.
        is_best: among those that fit the question best: shown if the answer cites none.
    """

    number: int
    attachment: str
    name: str
    page: int = 0
    heading: str = ""
    first: int = 0
    last: int = 0
    text: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Fold:
    """What a model gets instead of a message and all turns before it, on every path that leads through it.

    Attributes:
        summary: of these turns; empty: they are left out.
        is_on: False once it was undone.
        changed_at: when what is sent last changed by it.
        model: who wrote the summary; empty for a person, or for none.
        turns: `digest_of` the turns that it stands for, as they were then.
    """

    summary: str = ""
    is_on: bool = True
    changed_at: float = 0.0
    model: str = ""
    turns: str = ""


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
        attachments: documents that go with a user's message.
        sources: what an answer was given to read of documents.
        steps: what came before `content` in an answer that called tools.
        fold: what is sent instead of it and of the turns before it, if anything is.
        deleted_at: when it was deleted, or 0; its place in the tree is kept for what follows it.
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
    attachments: tuple[Attachment, ...] = ()
    sources: tuple[Source, ...] = ()
    steps: tuple[Step, ...] = ()
    fold: Fold | None = None
    deleted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages.  `sampling` is None for the model's own; times are Unix seconds.

    Attributes:
        folder_id: the folder that it lies in, or empty.
        tools: empty where the model is offered none; else a JSON list of those that it may call unasked here.
    """

    id: str
    title: str = ""
    pinned: bool = False
    created_at: float = 0.0
    updated_at: float = 0.0
    system_prompt: str = ""
    sampling: SamplingParams | None = None
    model: str = ""
    draft: str = ""
    folder_id: str = ""
    tools: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    id: str
    name: str
    is_open: bool = True
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A conversation found by a search.  Matches in `snippet` stand between MATCH_START and MATCH_END."""

    conversation: Conversation
    snippet: str
    message_id: str | None = None


EDITED = "edited"
"""The `reason_code` of an answer whose text a person has changed."""

MATCH_START = "\x02"
MATCH_END = "\x03"


def new_id() -> str:
    """A fresh id; made by the window, so that nothing has to wait for the disk."""
    return uuid.uuid4().hex


_NAMED = uuid.UUID("5b1d0a5e-6f0b-4f43-9d0e-6f6d0f0a7c11")


def made_id(*names: str) -> str:
    return uuid.uuid5(_NAMED, "\x1f".join(clean_text(name) for name in names)).hex


def new_conversation(**fields: Any) -> Conversation:
    now = time.time()
    return Conversation(id=new_id(), created_at=now, updated_at=now, **fields)


def digest_of(messages: Iterable[Message]) -> str:
    """Of what these turns say: another one once one of them was edited, deleted or added."""
    whole = hashlib.blake2b(digest_size=16)
    for message in messages:
        content = message.content.encode("utf-8", "replace")
        whole.update(f"{message.role} {len(content)} ".encode() + content)
    return whole.hexdigest()


def clean_text(text: str) -> str:
    """`text` as SQLite and UTF-8 can store it: a lone surrogate or a NUL becomes U+FFFD."""
    if "\x00" in text:
        text = text.replace("\x00", "�")
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def attachment_to_dict(attachment: Attachment) -> dict[str, Any]:
    fields = dataclasses.asdict(dataclasses.replace(attachment, parts=()))
    del fields["parts"]
    return fields


def attachment_from_dict(raw: object) -> Attachment | None:
    """The record of parsed JSON; None if that is none.  Unknown keys are ignored, so that newer files can be read."""
    found = _record(Attachment, raw)
    return found if isinstance(found, Attachment) and found.id and found.kind in ("file", "folder") else None


def parts_from_list(listed: object) -> tuple[Part, ...]:
    """Parts of `[page, heading, text]`."""
    if not isinstance(listed, list):
        raise ValueError("no list of parts")
    parts = []
    for entry in listed:
        if not isinstance(entry, list) or list(map(type, entry)) != [int, str, str]:
            raise ValueError("no part of a document")
        parts.append(Part(clean_text(entry[2]), entry[0], clean_text(entry[1])))
    return tuple(parts)


_CITED = re.compile(r"[\[【]\s*(\d{1,4}(?:\s*[,;–-]\s*\d{1,4})*)\s*[^\]】\d]{0,12}[\]】]")


def cited(content: str) -> frozenset[int]:
    numbers: set[int] = set()
    for found in _CITED.finditer(content):
        for one in re.split(r"[,;]", found[1]):
            first, *last = map(int, re.split(r"[–-]", one))
            numbers.update(range(first, min(last[0], first + 50) + 1) if last else (first,))
    return frozenset(numbers)


def shown_sources(message: Message) -> tuple[Source, ...]:
    """What stands under an answer: the sources that it cites, or else those that fit the question best."""
    numbers = cited(message.content) if message.sources else frozenset()
    named = tuple(source for source in message.sources if source.number in numbers)
    return named or tuple(source for source in message.sources if source.is_best)


def sources_to_json(sources: Iterable[Source]) -> str:
    return json.dumps([dataclasses.asdict(source) for source in sources], ensure_ascii=False)


def sources_from_json(text: str) -> tuple[Source, ...]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return sources_from_list(raw)


def sources_from_list(raw: object) -> tuple[Source, ...]:
    found = [_record(Source, entry) for entry in raw] if isinstance(raw, list) else []
    return tuple(one for one in found if isinstance(one, Source))


def steps_to_json(steps: Iterable[Step]) -> str:
    return json.dumps({"steps": [dataclasses.asdict(step) for step in steps]}, ensure_ascii=False)


def steps_from_json(text: str) -> tuple[Step, ...]:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return steps_from_list(raw.get("steps")) if isinstance(raw, dict) else ()


def steps_from_list(raw: object) -> tuple[Step, ...]:
    found = []
    for entry in raw if isinstance(raw, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("calls"), list):
            calls = (_record(ToolUse, call) for call in entry["calls"])
            uses = tuple(call for call in calls if isinstance(call, ToolUse) and call.state in get_args(CallState))
            text, thought = (
                clean_text(said) if isinstance(said := entry.get(name), str) else "" for name in ("text", "reasoning")
            )
            found.append(Step(text, thought, uses))
    return tuple(found)


def _record(kind: type[Attachment] | type[Source] | type[ToolUse], raw: object) -> Attachment | Source | ToolUse | None:
    """A record of plain fields; None if one that has no default is missing, or one is of another type."""
    if not isinstance(raw, dict):
        return None
    types = {field.name: type(field.default) for field in dataclasses.fields(kind) if field.name != "parts"}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        wanted = types.get(name)
        if wanted is None:
            continue
        if wanted is type(dataclasses.MISSING):
            wanted = int if name == "number" else str
        if type(value) is not wanted:
            return None
        values[name] = clean_text(value) if isinstance(value, str) else value
    try:
        return kind(**values)
    except TypeError:
        return None


def sampling_to_json(sampling: SamplingParams | None) -> str | None:
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
