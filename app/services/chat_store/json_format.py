"""Chats as JSON, with every version and branch, so that importing an export restores it exactly."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

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
    new_id,
    parts_from_list,
    sampling_from_dict,
    sources_from_list,
    steps_from_list,
)
from app.services.chat_store.tree import sound
from engine.common.chat import Picture
from engine.common.pictures import media_of

FORMAT = "switchyard-chats"
VERSION = 1

Whole = tuple[Conversation, list[Message]]


class NotAChatFileError(Exception):
    """The file holds no readable chats; the argument is a clause that says why."""


def to_json(chats: Iterable[tuple[Conversation, Iterable[Message]]], folders: Iterable[Folder] = ()) -> str:
    """One JSON document of whole chats, and of the folders that they lie in."""
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
    """Whether this may be a document of `to_json`."""
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def from_json(raw: Any) -> tuple[list[Whole], int]:
    """The chats of a parsed document, each a valid tree; and how many were too damaged to be read.

    Raises:
        NotAChatFileError: none could be read, or it was written by a newer version.
    """
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
    """The folders of such a document, as far as they make sense."""
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
