"""The chat database's operations, as plain synchronous calls on one connection."""

from __future__ import annotations

import base64
import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator
from typing import Any

from app.services.chat_store.records import (
    AnswerStats,
    Conversation,
    Message,
    MessageState,
    clean_text,
    sampling_from_json,
    sampling_to_json,
)
from app.services.chat_store.schema import transaction
from engine.common.chat import Picture
from engine.common.config import SamplingParams

PURGE_AFTER_S = 3600.0
"""How long a deleted chat can be restored; the next start after that purges it."""

_LAST_MOMENT = 2.0**32

CONVERSATION_COLUMNS = "id, title, pinned, created_at, updated_at, system_prompt, sampling, model, draft"
MESSAGE_COLUMNS = (
    "id, conversation_id, parent_id, role, content, state, reason, reason_code, model, created_at, stats, chosen, "
    "reasoning, reasoning_s"
)
_PLACES = ",".join("?" * len(MESSAGE_COLUMNS.split(",")))


def conversation_from_row(row: tuple[Any, ...]) -> Conversation:
    """A record from a row of CONVERSATION_COLUMNS."""
    id_, title, pinned, created, updated, system_prompt, sampling, model, draft = row
    return Conversation(
        id=text_of(id_),
        title=text_of(title),
        pinned=bool(pinned),
        created_at=_moment(created),
        updated_at=_moment(updated),
        system_prompt=text_of(system_prompt),
        sampling=sampling_from_json(text_of(sampling)),
        model=text_of(model),
        draft=text_of(draft),
    )


def conversation_values(conversation: Conversation) -> tuple[Any, ...]:
    """A record's values, in the order of CONVERSATION_COLUMNS."""
    return (
        conversation.id,
        clean_text(conversation.title),
        int(conversation.pinned),
        conversation.created_at,
        conversation.updated_at,
        clean_text(conversation.system_prompt),
        sampling_to_json(conversation.sampling),
        clean_text(conversation.model),
        clean_text(conversation.draft),
    )


def message_from_row(row: tuple[Any, ...]) -> Message:
    """A record from a row of MESSAGE_COLUMNS, or one from a file's pages that lacks the last two."""
    id_, conversation_id, parent_id, role, content, state, reason, reason_code, model, created, *rest = row
    stats, chosen, reasoning, reasoning_s = rest if len(rest) == 4 else (*rest, "", 0.0)
    return Message(
        id=text_of(id_),
        conversation_id=text_of(conversation_id),
        parent_id=None if parent_id is None else text_of(parent_id),
        role=role,
        content=text_of(content),
        state=MessageState(state),
        reason=text_of(reason),
        reason_code=text_of(reason_code),
        model=text_of(model),
        created_at=_moment(created),
        stats=_stats(stats),
        chosen=bool(chosen),
        reasoning=text_of(reasoning),
        reasoning_s=_moment(reasoning_s),
    )


def text_of(value: object) -> str:
    """A column's text.  One flipped bit can turn a TEXT value into bytes, or into text that is not valid UTF-8."""
    if isinstance(value, str):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _moment(value: object) -> float:
    """Seconds, such as those since 1970; 0 for a value that cannot be any."""
    return float(value) if isinstance(value, int | float) and 0 <= value < _LAST_MOMENT else 0.0


def _stats(value: object) -> AnswerStats | None:
    text = text_of(value)
    if not text:
        return None
    try:
        stats = AnswerStats(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    fields = dataclasses.asdict(stats)
    sound = all(type(fields[each.name]) in (type(each.default), int) for each in dataclasses.fields(AnswerStats))
    return stats if sound else None


def message_values(message: Message) -> tuple[Any, ...]:
    """A record's values, in the order of MESSAGE_COLUMNS."""
    stats = None if message.stats is None else json.dumps(dataclasses.asdict(message.stats))
    return (
        message.id,
        message.conversation_id,
        message.parent_id,
        message.role,
        clean_text(message.content),
        message.state.value,
        clean_text(message.reason),
        message.reason_code,
        clean_text(message.model),
        message.created_at,
        stats,
        int(message.chosen),
        clean_text(message.reasoning),
        message.reasoning_s,
    )


class ChatDatabase:
    """The tables behind the store.  Not thread-safe: only the store's thread may use it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def close(self) -> None:
        """Close the file; SQLite checkpoints the write-ahead log into it."""
        self.connection.close()

    # --- conversations ---

    def conversations(self) -> tuple[Conversation, ...]:
        """Every conversation that is not deleted, most recently used first."""
        rows = self.connection.execute(
            f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE deleted_at IS NULL ORDER BY updated_at DESC"
        )
        return tuple(conversation_from_row(row) for row in rows)

    @property
    def is_on_disk(self) -> bool:
        """Whether it is the file itself, not what stands in for one that cannot be written to."""
        return bool(self.connection.execute("PRAGMA database_list").fetchone()[2])

    def ids(self) -> list[str]:
        """Of the same conversations, in any order."""
        rows = self.connection.execute("SELECT id FROM conversations WHERE deleted_at IS NULL")
        return [text_of(id_) for (id_,) in rows]

    def conversation(self, conversation_id: str) -> Conversation | None:
        """One conversation, deleted or not."""
        row = self.connection.execute(
            f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE id = ?", (conversation_id,)
        ).fetchone()
        return conversation_from_row(row) if row else None

    def is_taken(self, conversation_id: str, message_ids: Iterable[str]) -> bool:
        """Whether one of these ids is taken, even by a deleted chat."""
        ask = self.connection.execute
        return bool(ask("SELECT 1 FROM conversations WHERE id = ?", (conversation_id,)).fetchone()) or any(
            ask("SELECT 1 FROM messages WHERE id = ?", (id_,)).fetchone() for id_ in message_ids
        )

    def create_conversation(self, conversation: Conversation) -> None:
        """Add a conversation that has no messages yet."""
        self.add_conversations([(conversation, ())])

    def add_conversations(self, whole: Iterable[tuple[Conversation, Iterable[Message]]]) -> None:
        """Add conversations with sound trees of messages (see `tree.sound`), all or none."""
        with transaction(self.connection) as c:
            for conversation, messages in whole:
                c.execute(
                    f"INSERT INTO conversations ({CONVERSATION_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",
                    conversation_values(conversation),
                )
                for message in messages:
                    self._insert(message)

    def change_conversation(self, conversation_id: str, changes: dict[str, Any]) -> None:
        """Change only these fields, so that two windows on one file do not overwrite each other's changes."""
        columns = {field.name for field in dataclasses.fields(Conversation)} - {"id"}
        if not changes.keys() <= columns:
            raise ValueError(f"not fields of a conversation: {sorted(changes.keys() - columns)}")
        with transaction(self.connection) as c:
            c.execute(
                f"UPDATE conversations SET {', '.join(f'{name} = ?' for name in changes)} WHERE id = ?",
                (*(_column_value(value) for value in changes.values()), conversation_id),
            )

    def unsent_pictures(self, conversation_id: str) -> tuple[Picture, ...]:
        """Those that will go with the next message, in their order."""
        rows = self.connection.execute(
            "SELECT media, data FROM unsent_pictures WHERE conversation_id = ? ORDER BY place", (conversation_id,)
        )
        return tuple(_picture(media, data) for media, data in rows if isinstance(data, bytes))

    def set_unsent_pictures(self, conversation_id: str, pictures: Iterable[Picture]) -> None:
        """These will go with the next message, and no others."""
        with transaction(self.connection) as c:
            c.execute("DELETE FROM unsent_pictures WHERE conversation_id = ?", (conversation_id,))
            c.executemany(
                "INSERT INTO unsent_pictures (conversation_id, place, media, data) VALUES (?,?,?,?)",
                _picture_values(conversation_id, pictures),
            )

    def set_deleted(self, conversation_id: str, at: float | None) -> None:
        """Hide a conversation (`at` in Unix seconds), or restore it (None)."""
        with transaction(self.connection) as c:
            c.execute("UPDATE conversations SET deleted_at = ? WHERE id = ?", (at, conversation_id))

    def purge(self, now: float | None = None) -> int:
        """Remove chats whose time to be restored has passed; returns how many."""
        limit = (time.time() if now is None else now) - PURGE_AFTER_S
        with transaction(self.connection) as c:
            return c.execute("DELETE FROM conversations WHERE deleted_at < ?", (limit,)).rowcount

    # --- messages ---

    def messages(self, conversation_id: str) -> tuple[Message, ...]:
        """Every message of a conversation in insertion order: parents before children."""
        rows = self.connection.execute(
            f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE conversation_id = ? ORDER BY seq", (conversation_id,)
        )
        pictures = self._pictures(conversation_id)
        found = map(message_from_row, rows)
        return tuple(dataclasses.replace(each, pictures=tuple(pictures.get(each.id, ()))) for each in found)

    def _pictures(self, conversation_id: str) -> dict[str, list[Picture]]:
        """By the ids of their messages."""
        rows = self.connection.execute(
            "SELECT message_id, media, data FROM pictures "
            "WHERE message_id IN (SELECT id FROM messages WHERE conversation_id = ?) ORDER BY message_id, place",
            (conversation_id,),
        )
        found: dict[str, list[Picture]] = {}
        for message_id, media, data in rows:
            if isinstance(data, bytes):
                found.setdefault(text_of(message_id), []).append(_picture(media, data))
        return found

    def _insert(self, message: Message) -> None:
        self.connection.execute(f"INSERT INTO messages ({MESSAGE_COLUMNS}) VALUES ({_PLACES})", message_values(message))
        self.connection.executemany(
            "INSERT INTO pictures (message_id, place, media, data) VALUES (?,?,?,?)",
            _picture_values(message.id, message.pictures),
        )

    def add_message(self, message: Message) -> None:
        """Add a message and put it on the visible path."""
        with transaction(self.connection):
            self._unchoose(message.conversation_id, message.parent_id)
            self._insert(dataclasses.replace(message, chosen=True))

    def update_message(self, message: Message) -> None:
        """Write a message's text and reasoning, state, reason and stats."""
        _, _, _, _, content, state, reason, code, model, _, stats, _, reasoning, reasoning_s = message_values(message)
        with transaction(self.connection) as c:
            c.execute(
                "UPDATE messages SET content = ?, state = ?, reason = ?, reason_code = ?, model = ?, stats = ?, "
                "reasoning = ?, reasoning_s = ? WHERE id = ?",
                (content, state, reason, code, model, stats, reasoning, reasoning_s, message.id),
            )

    def save_step(self, message: Message) -> None:
        """As `update_message`, without an fsync: survives a crash, but a power cut may lose the last steps."""
        self.connection.execute("PRAGMA synchronous = NORMAL")
        try:
            self.update_message(message)
        finally:
            self.connection.execute("PRAGMA synchronous = FULL")

    def choose(self, message_id: str) -> None:
        """Put this message on the visible path instead of its siblings."""
        with transaction(self.connection) as c:
            row = c.execute("SELECT conversation_id, parent_id FROM messages WHERE id = ?", (message_id,)).fetchone()
            if row:
                self._unchoose(*row)
                c.execute("UPDATE messages SET chosen = 1 WHERE id = ?", (message_id,))

    def _unchoose(self, conversation_id: str, parent_id: str | None) -> None:
        self.connection.execute(
            "UPDATE messages SET chosen = 0 WHERE conversation_id = ? AND parent_id IS ? AND chosen",
            (conversation_id, parent_id),
        )

    def end_interrupted(self, reason: str) -> int:
        """Mark answers that a crash cut off as partial; returns how many."""
        with transaction(self.connection) as c:
            return c.execute(
                "UPDATE messages SET state = 'partial', reason = ?, reason_code = 'interrupted' "
                "WHERE state = 'streaming'",
                (reason,),
            ).rowcount


def _picture(media: object, data: bytes) -> Picture:
    return Picture(text_of(media), base64.b64encode(data).decode("ascii"))


def _picture_values(owner: str, pictures: Iterable[Picture]) -> Iterator[tuple[str, int, str, bytes]]:
    """One picture at a time: together they may be large."""
    for place, picture in enumerate(pictures):
        yield owner, place, picture.media, base64.b64decode(picture.data)


def _column_value(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bool):
        return int(value)
    return sampling_to_json(value) if isinstance(value, SamplingParams) else value
