"""Chats as JSON, with every version and branch, so that importing an export restores it exactly."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
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
    sources_from_list,
    steps_from_list,
)
from app.services.chat_store.tree import sound, without_deleted
from engine.common.chat import Picture
from engine.common.pictures import media_of
from engine.remote.endpoint import is_remote


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
