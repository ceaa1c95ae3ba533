"""Chats as JSON, with every version and branch, so that importing an export restores it exactly.

Chats as Markdown: the visible path, readable anywhere, and importable again.

Each turn starts with a comment line that a viewer hides, an answer's heading says which model gave it and where, and
reasoning is a section that viewers fold; a line of a message that looks like such a comment is escaped with a
backslash.  Markdown from other programs is split at its headings ("## You", "## Assistant").
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.records import (
    ROLES,
    AnswerStats,
    Attachment,
    Conversation,
    Fold,
    Folder,
    Message,
    MessageState,
    attachment_from_dict,
    attachment_to_dict,
    clean_text,
    made_id,
    new_id,
    parts_from_list,
    sampling_from_dict,
    shown_sources,
    sources_from_list,
    steps_from_list,
)
from app.services.chat_store.tree import sound, without_deleted
from engine.common.chat import Picture
from engine.common.pictures import media_of
from engine.protocol import Role
from engine.remote.endpoint import is_remote

_MARK = "<!-- switchyard:"
_HEADINGS: dict[Role, str] = {"system": "System prompt", "user": "You", "assistant": "Assistant"}
_TURN = re.compile(r"^<!-- switchyard:(system|user|assistant) -->\n## (?:Assistant: ([^\n]+)|[^\n]*)\n\n", re.MULTILINE)
_THOUGHT = re.compile(
    r"<!-- switchyard:thought ([0-9]{1,12}(?:\.[0-9]{1,9})?) -->\n<details>\n<summary>[^\n]*</summary>\n\n"
    r"(.*?)\n\n</details>\n<!-- switchyard:answer -->\n\n",
    re.DOTALL,
)
_SHOWN = re.compile(r"<!-- switchyard:pictures -->\n(?:[^\n]*\n)*?<!-- switchyard:text -->\n\n")
_FOREIGN = re.compile(r"^#{1,6}[ \t]*(you|user|human|assistant|system|system prompt)[ \t]*:?[ \t]*\r?$", re.I | re.M)
_FOREIGN_ROLES: dict[str, Role] = {"assistant": "assistant", "system": "system", "system prompt": "system"}


@dataclass(frozen=True, slots=True)
class _Read:
    role: Role
    content: str
    reasoning: str = ""
    reasoning_s: float = 0.0
    model: str = ""


def to_markdown(conversation: Conversation, path: Iterable[Message]) -> str:
    title = " ".join(conversation.title.split()) or "Chat"
    parts = [f"# {title}\n\n"]
    if conversation.system_prompt:
        parts.append(_turn("system", conversation.system_prompt))
    for message in path:
        by = " ".join(message.model.split()) if message.role == "assistant" else ""
        parts.append(_turn(message.role, message.content, _shown(message) + _folded(message), by))
    return "".join(parts)


def _turn(role: Role, content: str, before: str = "", by: str = "") -> str:
    heading = f"{_HEADINGS[role]}: {by}" if by else _HEADINGS[role]
    return f"{_MARK}{role} -->\n## {heading}\n\n{before}{_escaped(content)}\n\n"


def _folded(message: Message) -> str:
    if not message.reasoning:
        return ""
    summary = f"<summary>Thought for {message.reasoning_s:.0f} s</summary>"
    head = f"{_MARK}thought {message.reasoning_s:.2f} -->\n<details>\n{summary}\n\n"
    return f"{head}{_escaped(message.reasoning)}\n\n</details>\n{_MARK}answer -->\n\n"


def _called(message: Message) -> str:
    parts = []
    for step in message.steps:
        for call in step.calls:
            summary = f"<summary>{_plain(call.name)}({_plain(call.arguments)[:200]})</summary>"
            parts.append(f"<details>\n{summary}\n\n{_escaped(call.result)}\n\n</details>\n")
    return "".join(parts)


def _shown(message: Message) -> str:
    """That a message had pictures and documents, which are not in this one, or an answer calls and sources."""
    count = len(message.pictures)
    named = [] if not count else ["A picture"] if count == 1 else [f"{count} pictures"]
    named += [_plain(one.name) for one in message.attachments]
    shown = f"{', '.join(named)}, not in this file: an export as JSON has them." if named else ""
    if shown_sources(message):
        shown = "Sources: " + "; ".join(
            f"[{one.number}] {_plain(one.name)}{f', page {one.page}' if one.page else ''}"
            for one in shown_sources(message)
        )
    shown = _called(message) + (f"*{shown}*\n" if shown else "")
    return f"{_MARK}pictures -->\n{shown}{_MARK}text -->\n\n" if shown else ""


def _plain(name: str) -> str:
    return " ".join(re.sub(r"([*_<>`\[\]\\])", r"\\\1", name).split())


def _escaped(text: str) -> str:
    return re.sub(rf"^(\\*{re.escape(_MARK)})", r"\\\1", text, flags=re.MULTILINE)


def _unescaped(text: str) -> str:
    return re.sub(rf"^\\(\\*{re.escape(_MARK)})", r"\1", text, flags=re.MULTILINE)


def from_markdown(text: str) -> Whole:
    """The conversation in a document; it has a single path.

    Raises:
        NotAChatFileError: no turns were found.
    """
    text = clean_text(text).removeprefix("\ufeff")
    title, turns = _own(text) or _foreign(text)
    if not turns:
        raise NotAChatFileError('it has no turns, such as "## You" and "## Assistant"')
    now = time.time()
    # Ids are made from the text: a document that is imported again is recognised.
    id_ = made_id("markdown", text)
    conversation = Conversation(
        id=id_,
        title="" if title == "Chat" else title,
        created_at=now,
        updated_at=now,
        system_prompt="\n\n".join(turn.content for turn in turns if turn.role == "system"),
    )
    messages: list[Message] = []
    for turn in turns:
        if turn.role != "system":
            parent = messages[-1].id if messages else None
            message = Message(
                made_id(id_, str(len(messages))),
                id_,
                parent,
                turn.role,
                turn.content,
                MessageState.COMPLETE,
                created_at=now,
                reasoning=turn.reasoning,
                reasoning_s=turn.reasoning_s,
                model=turn.model,
            )
            messages.append(message)
    return conversation, messages


def _own(text: str) -> tuple[str, list[_Read]] | None:
    # An editor may have changed the line endings of the markers; those inside a message belong to the message.
    if not _TURN.search(text) and "\r\n" in text:
        text = text.replace("\r\n", "\n")
    marks = list(_TURN.finditer(text))
    if not marks:
        return None
    turns: list[_Read] = []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=True):
        content = text[mark.end() : end].removesuffix("\n").removesuffix("\n")
        content = content[shown.end() :] if (shown := _SHOWN.match(content)) else content
        thought = _THOUGHT.match(content)
        reasoning, seconds = (_unescaped(thought[2]), float(thought[1])) if thought else ("", 0.0)
        content = _unescaped(content[thought.end() :] if thought else content)
        role = _role(mark[1])
        turns.append(_Read(role, content, reasoning, seconds, mark[2] or "" if role == "assistant" else ""))
    return _title(text[: marks[0].start()]), turns


def _foreign(text: str) -> tuple[str, list[_Read]]:
    marks = list(_FOREIGN.finditer(text))
    if not marks:
        return "", []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    turns = [
        _Read(_FOREIGN_ROLES.get(mark[1].lower(), "user"), text[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]
    return _title(text[: marks[0].start()]), turns


def _role(name: str) -> Role:
    return next(role for role in _HEADINGS if role == name)


def _title(head: str) -> str:
    found = re.search(r"^#[ \t]+(.+?)[ \t]*$", head, re.MULTILINE)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Merged:
    """Chats of a file: new ones, those that have more messages now, and those that were there already.  `folders` are
    new, too."""

    added: tuple[Conversation, ...] = ()
    grown: tuple[Conversation, ...] = ()
    known: tuple[Conversation, ...] = ()
    folders: tuple[Folder, ...] = ()


def merge(database: ChatDatabase, chats: Iterable[Whole], folders: Sequence[Folder] = ()) -> Merged:
    """Adds chats, all or none, with those of a file's `folders` that they lie in.

    One that is there already gets the messages that it lacks, and stays in its folder.  Where a message of it says
    something else by now, the chat of the file becomes one of its own.
    """
    merging = _Merging(database, folders)
    with database.changing():
        for conversation, messages in chats:
            if is_remote(conversation.model):  # a file does not say where text goes: people do
                conversation = replace(conversation, model="")
            merging.take((conversation, messages))
    return Merged(tuple(merging.added), tuple(merging.grown), tuple(merging.known), tuple(merging.made))


@dataclass(slots=True)
class _Merging:
    database: ChatDatabase
    folders: Sequence[Folder]
    added: list[Conversation] = field(default_factory=list)
    grown: list[Conversation] = field(default_factory=list)
    known: list[Conversation] = field(default_factory=list)
    made: list[Folder] = field(default_factory=list)

    def take(self, chat: Whole) -> None:
        conversation, messages = chat
        database = self.database
        database.forget_deleted(conversation.id)
        there = database.conversation(conversation.id)
        if there is None and database.is_taken(conversation.id, messages):
            self.take(_copy(chat, "elsewhere"))
            return
        if there is None:
            conversation = replace(conversation, folder_id=self._place(conversation.folder_id))
            database.add_whole(conversation, messages)
            self.added.append(conversation)
            return
        old = {message.id: message for message in database.messages(conversation.id)}
        if any(message.id in old and _differ(old[message.id], message) for message in messages):
            says = [part for message in messages for part in (message.id, *_said(message))]
            self.take(_copy(chat, *says))
            return
        new = _lacking(old.values(), messages)
        if not new:
            self.known.append(there)
            return
        now = replace(there, updated_at=max(there.updated_at, conversation.updated_at))
        database.grow(now, new)
        self.grown.append(now)

    def _place(self, folder_id: str) -> str:
        """The folder here for one of the file: the same, else one of that name, else a new one; or none."""
        here = self.database.folders()
        if any(folder.id == folder_id for folder in here):
            return folder_id
        brought = next((folder for folder in self.folders if folder.id == folder_id), None)
        if brought is None:
            return ""
        named = next((folder for folder in here if folder.name == brought.name), None)
        if named is None:
            self.database.add_folder(brought)
            self.made.append(brought)
        return (named or brought).id


def _differ(old: Message, new: Message) -> bool:
    """Whether they say different things; one that was deleted says nothing."""
    return not (old.deleted_at or new.deleted_at) and _said(old) != _said(new)


def _said(message: Message) -> tuple[str, str, str]:
    return message.role, message.content, message.reasoning


def _lacking(old: Iterable[Message], messages: Sequence[Message]) -> list[Message]:
    """The messages that are new; none takes the place of a version that is shown."""
    ids = {message.id for message in old}
    shown = {message.parent_id for message in old if message.chosen}
    return [
        replace(message, chosen=message.chosen and message.parent_id not in shown)
        for message in messages
        if message.id not in ids
    ]


def _copy(chat: Whole, *because: str) -> Whole:
    """The chat under other ids, which are the same whenever the same file is imported."""
    conversation, messages = chat
    id_ = made_id("copy", conversation.id, *because)
    fresh = {message.id: made_id(id_, message.id) for message in messages}
    documents = {one.id: made_id(id_, one.id) for message in messages for one in message.attachments}
    return replace(conversation, id=id_), [
        replace(
            message,
            id=fresh[message.id],
            conversation_id=id_,
            parent_id=None if message.parent_id is None else fresh[message.parent_id],
            attachments=tuple(replace(one, id=documents[one.id]) for one in message.attachments),
            sources=tuple(
                replace(one, attachment=documents.get(one.attachment, one.attachment)) for one in message.sources
            ),
        )
        for message in messages
    ]


def to_export(database: ChatDatabase, conversation_id: str) -> tuple[Message, ...]:
    """The messages without what was deleted, with the texts of their documents, each once, and not with where those
    lie on this PC."""
    told: set[str] = set()
    messages: list[Message] = []
    for message in without_deleted(database.messages(conversation_id)):
        attachments: list[Attachment] = []
        for one in message.attachments:
            parts = database.document_parts(one.id) if one.id not in told else ()
            attachments.append(replace(one, path="", parts=parts))
            told.add(one.id)
        messages.append(replace(message, attachments=tuple(attachments)))
    return tuple(messages)


FORMAT = "switchyard-chats"
VERSION = 1

Whole = tuple[Conversation, list[Message]]


class NotAChatFileError(Exception):
    """The file holds no readable chats; the argument is a clause that says why."""


def to_json(chats: Iterable[tuple[Conversation, Iterable[Message]]], folders: Iterable[Folder] = ()) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "folders": [dataclasses.asdict(folder) for folder in folders],
            "conversations": [
                {
                    **dataclasses.asdict(conversation),
                    "messages": [_message_fields(message) for message in messages],
                }
                for conversation, messages in chats
            ],
        },
        ensure_ascii=False,
        indent=1,
    )


def _message_fields(message: Message) -> dict[str, Any]:
    fields = dataclasses.asdict(message)
    del fields["conversation_id"]
    for name in ("attachments", "sources", "steps"):
        if not fields[name]:
            del fields[name]
    if message.attachments:
        fields["attachments"] = [
            {**attachment_to_dict(one), "parts": [[part.page, part.heading, part.text] for part in one.parts]}
            for one in message.attachments
        ]
    return fields


def is_ours(raw: object) -> bool:
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def from_json(raw: Any) -> tuple[list[Whole], int]:
    """The chats of a parsed document, each a valid tree; and how many were too damaged to be read."""
    if raw.get("version") != VERSION:
        raise NotAChatFileError("it was written by a newer Switchyard: update this one")
    entries = raw.get("conversations")
    chats: list[Whole] = []
    damaged = 0
    for entry in entries if isinstance(entries, list) else ():
        try:
            chats.append(_conversation(entry))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            damaged += 1
    if not chats and (damaged or not isinstance(entries, list)):
        raise NotAChatFileError("every conversation in it is incomplete or damaged")
    return chats, damaged


def folders_in(raw: Any) -> list[Folder]:
    entries = raw.get("folders")
    found: list[Folder] = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            id_, name, at = _text(entry["id"]), _text(entry["name"]).strip(), _time(entry.get("created_at", 0.0))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
        if id_ and name:
            found.append(Folder(id_, name, bool(entry.get("is_open", True)), at))
    return found


def _conversation(raw: dict[str, Any]) -> Whole:
    conversation = Conversation(
        id=_text(raw.get("id", "")) or new_id(),
        title=_text(raw.get("title", "")),
        pinned=bool(raw.get("pinned", False)),
        created_at=_time(raw.get("created_at", 0.0)),
        updated_at=_time(raw.get("updated_at", 0.0)),
        system_prompt=_text(raw.get("system_prompt", "")),
        sampling=sampling_from_dict(raw.get("sampling")),
        model=_text(raw.get("model", "")),
        draft=_text(raw.get("draft", "")),
        folder_id=_text(raw.get("folder_id", "")),
        # What may be called unasked is for this PC's own owner to say.
        tools="[]" if raw.get("tools") else "",
    )
    return conversation, sound(_message(entry, conversation.id) for entry in raw["messages"])


def _message(raw: dict[str, Any], conversation_id: str) -> Message:
    if raw["role"] not in ROLES:
        raise ValueError("unknown role")
    parent = raw.get("parent_id")
    state = MessageState(raw.get("state", "complete"))
    stats = raw.get("stats")
    return Message(
        id=_text(raw["id"]),
        conversation_id=conversation_id,
        parent_id=None if parent is None else _text(parent),
        role=raw["role"],
        content=_text(raw["content"]),
        state=MessageState.PARTIAL if state is MessageState.STREAMING else state,
        reason=_text(raw.get("reason", "")),
        reason_code=_text(raw.get("reason_code", "")),
        model=_text(raw.get("model", "")),
        created_at=_time(raw.get("created_at", 0.0)),
        stats=None if stats is None else _stats(stats),
        chosen=bool(raw.get("chosen", False)),
        reasoning=_text(raw.get("reasoning", "")),
        reasoning_s=_time(raw.get("reasoning_s", 0.0)),
        pictures=tuple(map(_picture, raw.get("pictures", ()))),
        attachments=tuple(map(_attachment, raw.get("attachments", ()))),
        sources=sources_from_list(raw.get("sources", [])),
        steps=steps_from_list(raw.get("steps", [])),
        fold=_fold(raw.get("fold")),
        deleted_at=max(_time(raw.get("deleted_at", 0.0)), 0.0),
    )


def _fold(raw: dict[str, Any] | None) -> Fold | None:
    if raw is None:
        return None
    return Fold(
        summary=_text(raw["summary"]),
        is_on=bool(raw["is_on"]),
        changed_at=_time(raw.get("changed_at", 0.0)),
        model=_text(raw.get("model", "")),
        turns=_text(raw.get("turns", "")),
    )


def _attachment(raw: dict[str, Any]) -> Attachment:
    """A document with its text.  Where it lay is not taken over: a stranger could name what is to be read here."""
    found = attachment_from_dict(raw)
    if found is None:
        raise ValueError("no document")
    return dataclasses.replace(found, path="", parts=parts_from_list(raw.get("parts", [])), is_read=True)


def _picture(raw: dict[str, Any]) -> Picture:
    data = base64.b64decode(raw["data"], validate=True)
    if media_of(data) != raw["media"]:
        raise ValueError("no picture of that kind")
    return Picture(raw["media"], base64.b64encode(data).decode("ascii"))


def _stats(raw: dict[str, Any]) -> AnswerStats:
    return AnswerStats(
        finish_reason=_text(raw.get("finish_reason", "")),
        prompt_tokens=int(raw.get("prompt_tokens", 0)),
        generated_tokens=int(raw.get("generated_tokens", 0)),
        ttft_s=_time(raw.get("ttft_s", 0.0)),
        tokens_per_s=_time(raw.get("tokens_per_s", 0.0)),
        guessed_tokens=int(raw.get("guessed_tokens", 0)),
        accepted_tokens=int(raw.get("accepted_tokens", 0)),
        gave_way=_text(raw.get("gave_way", "")),
        pictures=int(raw.get("pictures", 0)),
        pictures_kept=int(raw.get("pictures_kept", 0)),
        pictures_s=_time(raw.get("pictures_s", 0.0)),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return clean_text(value)


def _time(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number
