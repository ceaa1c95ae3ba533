"""The chat database's operations, as plain synchronous calls on one connection."""

from __future__ import annotations

import base64
import dataclasses
import json
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from app.services.chat_store.records import (
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
    parts_from_list,
    sampling_from_json,
    sampling_to_json,
    sources_from_json,
    sources_to_json,
    steps_from_json,
    steps_to_json,
)
from app.services.chat_store.schema import transaction
from engine.batch_files.documents import Part
from engine.common.chat import Picture
from engine.common.config import SamplingParams

PURGE_AFTER_S = 3600.0
"""How long a deleted chat can be restored; the next start after that purges it."""

_LEAST_MOMENT, _LAST_MOMENT = 1.0, 2.0**32

CONVERSATION_COLUMNS = (
    "id, title, pinned, created_at, updated_at, system_prompt, sampling, model, draft, folder_id, tools"
)
MESSAGE_COLUMNS = (
    "id, conversation_id, parent_id, role, content, state, reason, reason_code, model, created_at, stats, chosen, "
    "reasoning, reasoning_s"
)
_PLACES = ",".join("?" * len(MESSAGE_COLUMNS.split(",")))


def conversation_from_row(row: tuple[Any, ...]) -> Conversation:
    id_, title, pinned, created, updated, system_prompt, sampling, model, draft, folder_id, tools = row
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
        folder_id=text_of(folder_id),
        tools=text_of(tools),
    )


def conversation_values(conversation: Conversation) -> tuple[Any, ...]:
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
        conversation.folder_id,
        conversation.tools,
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
        self.connection.close()

    # --- conversations ---

    def conversations(self) -> tuple[Conversation, ...]:
        rows = self.connection.execute(
            f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE deleted_at IS NULL ORDER BY updated_at DESC"
        )
        return tuple(conversation_from_row(row) for row in rows)

    @property
    def is_on_disk(self) -> bool:
        """Whether it is the file itself, not what stands in for one that cannot be written to."""
        return bool(self.connection.execute("PRAGMA database_list").fetchone()[2])

    def ids(self) -> list[str]:
        rows = self.connection.execute("SELECT id FROM conversations WHERE deleted_at IS NULL")
        return [text_of(id_) for (id_,) in rows]

    def conversation(self, conversation_id: str) -> Conversation | None:
        row = self.connection.execute(
            f"SELECT {CONVERSATION_COLUMNS} FROM conversations WHERE id = ?", (conversation_id,)
        ).fetchone()
        return conversation_from_row(row) if row else None

    def is_taken(self, conversation_id: str, messages: Iterable[Message]) -> bool:
        """Whether one of the ids in this chat is taken, even by a deleted one."""
        ask = self.connection.execute
        ids = [("conversations", conversation_id)]
        for message in messages:
            ids += [("messages", message.id), *(("documents", one.id) for one in message.attachments)]
        return any(ask(f"SELECT 1 FROM {table} WHERE id = ?", (id_,)).fetchone() for table, id_ in ids)

    def add_conversations(self, whole: Iterable[tuple[Conversation, Iterable[Message]]]) -> None:
        """Add conversations with sound trees of messages (see `tree.sound`), all or none."""
        with transaction(self.connection):
            for conversation, messages in whole:
                self.add_whole(conversation, messages)

    def changing(self) -> AbstractContextManager[object]:
        return transaction(self.connection)

    def add_whole(self, conversation: Conversation, messages: Iterable[Message]) -> None:
        """As `add_conversations`, within `changing`."""
        self.connection.execute(
            f"INSERT INTO conversations ({CONVERSATION_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
            conversation_values(conversation),
        )
        for message in messages:
            self._insert(message)

    def grow(self, conversation: Conversation, messages: Iterable[Message]) -> None:
        """Adds messages to a conversation that is there, parents first, within `changing`."""
        self.connection.execute(
            "UPDATE conversations SET updated_at = ? WHERE id = ?", (conversation.updated_at, conversation.id)
        )
        for message in messages:
            self._insert(message)

    def forget_deleted(self, conversation_id: str) -> None:
        """Removes a conversation that is deleted but could be restored still, within `changing`."""
        self.connection.execute("DELETE FROM conversations WHERE id = ? AND deleted_at IS NOT NULL", (conversation_id,))

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
        rows = self.connection.execute(
            "SELECT media, data FROM unsent_pictures WHERE conversation_id = ? ORDER BY place", (conversation_id,)
        )
        return tuple(_picture(media, data) for media, data in rows if isinstance(data, bytes))

    def set_unsent_pictures(self, conversation_id: str, pictures: Iterable[Picture]) -> None:
        with transaction(self.connection) as c:
            c.execute("DELETE FROM unsent_pictures WHERE conversation_id = ?", (conversation_id,))
            c.executemany(
                "INSERT INTO unsent_pictures (conversation_id, place, media, data) VALUES (?,?,?,?)",
                _picture_values(conversation_id, pictures),
            )

    # --- documents ---

    def unsent_attachments(self, conversation_id: str) -> tuple[Attachment, ...]:
        rows = self.connection.execute(
            "SELECT d.about FROM unsent_attachments u JOIN documents d ON d.id = u.document_id "
            "WHERE u.conversation_id = ? ORDER BY u.place",
            (conversation_id,),
        )
        found = [_attachment(about) for (about,) in rows]
        return tuple(one for one in found if one is not None)

    def set_unsent_attachments(self, conversation_id: str, attachments: Iterable[Attachment]) -> None:
        """These will go with the next message, and no others; one that nothing else has is gone."""
        attachments = tuple(attachments)
        with transaction(self.connection) as c:
            # Those that stay must not be without an owner in between, which would remove their text.
            kept = [one.id for one in attachments]
            c.execute(
                "DELETE FROM unsent_attachments WHERE conversation_id = ? "
                f"AND document_id NOT IN ({','.join('?' * len(kept))})",
                (conversation_id, *kept),
            )
            c.execute("UPDATE unsent_attachments SET place = -1 - place WHERE conversation_id = ?", (conversation_id,))
            for place, attachment in enumerate(attachments):
                self._add_document(attachment)
                moved = c.execute(
                    "UPDATE unsent_attachments SET place = ? WHERE conversation_id = ? AND document_id = ?",
                    (place, conversation_id, attachment.id),
                )
                if not moved.rowcount:
                    c.execute(
                        "INSERT INTO unsent_attachments (conversation_id, place, document_id) VALUES (?, ?, ?)",
                        (conversation_id, place, attachment.id),
                    )

    def update_document(self, attachment: Attachment, parts: Sequence[Part] | None) -> None:
        with transaction(self.connection) as c:
            c.execute("UPDATE documents SET about = ? WHERE id = ?", (_about(attachment), attachment.id))
            if parts is not None:
                c.execute("UPDATE documents SET parts = ? WHERE id = ?", (packed(parts), attachment.id))

    def document_parts(self, document_id: str) -> tuple[Part, ...]:
        row = self.connection.execute("SELECT parts FROM documents WHERE id = ?", (document_id,)).fetchone()
        return unpacked(row[0]) if row and isinstance(row[0], bytes) else ()

    def documents_of(self, conversation_id: str | None = None, *, live: bool = False) -> set[str]:
        """Ids of documents: of one conversation, or of all; `live` are those of conversations that are not deleted."""
        where = " AND c.id = ?" if conversation_id is not None else ""
        where += " AND c.deleted_at IS NULL" if live else ""
        values = (conversation_id,) if conversation_id is not None else ()
        rows = self.connection.execute(
            "SELECT a.document_id FROM attachments a JOIN messages m ON m.id = a.message_id "
            f"JOIN conversations c ON c.id = m.conversation_id WHERE 1{where} "
            "UNION SELECT u.document_id FROM unsent_attachments u JOIN conversations c ON c.id = u.conversation_id "
            f"WHERE 1{where}",
            (*values, *values),
        )
        return {text_of(id_) for (id_,) in rows}

    def set_sources(self, message: Message) -> None:
        with transaction(self.connection):
            self._insert_sources(message)

    def set_steps(self, message: Message) -> None:
        with transaction(self.connection):
            self._insert_steps(message)

    def set_deleted(self, conversation_id: str, at: float | None) -> None:
        with transaction(self.connection) as c:
            c.execute("UPDATE conversations SET deleted_at = ? WHERE id = ?", (at, conversation_id))

    def purge(self, now: float | None = None) -> int:
        limit = (time.time() if now is None else now) - PURGE_AFTER_S
        with transaction(self.connection) as c:
            self._purge_messages(limit)
            return c.execute("DELETE FROM conversations WHERE deleted_at < ?", (limit,)).rowcount

    def _purge_messages(self, limit: float) -> None:
        """Removes messages that were deleted before `limit`; of those that others follow only what they said."""
        ask = self.connection.execute
        gone = "SELECT message_id FROM deleted_messages WHERE deleted_at < ?"
        ask(f"UPDATE messages SET content = '', reasoning = '', stats = NULL WHERE id IN ({gone})", (limit,))
        for what in ("pictures", "attachments", "sources", "steps"):
            ask(f"DELETE FROM {what} WHERE message_id IN ({gone})", (limit,))
        leaves = (
            f"DELETE FROM messages WHERE id IN ({gone}) AND NOT EXISTS "
            "(SELECT 1 FROM messages child WHERE child.conversation_id = messages.conversation_id "
            "AND child.parent_id = messages.id)"
        )
        while ask(leaves, (limit,)).rowcount:
            pass

    # --- folders ---

    def asked_since(self, at: float) -> list[tuple[float, str]]:
        rows = self.connection.execute(
            "SELECT m.created_at, substr(m.content, 1, 80) FROM messages m JOIN conversations c "
            "ON c.id = m.conversation_id WHERE m.role = 'user' AND c.deleted_at IS NULL AND m.created_at >= ? "
            "AND m.id NOT IN (SELECT message_id FROM deleted_messages) ORDER BY m.created_at",
            (at,),
        )
        return [(float(created), str(text)) for created, text in rows]

    def folders(self) -> tuple[Folder, ...]:
        rows = self.connection.execute("SELECT id, name, is_open, created_at FROM folders ORDER BY seq")
        return tuple(folder_from_row(row) for row in rows)

    def put_folder(self, folder: Folder) -> None:
        with transaction(self.connection):
            self.add_folder(folder)

    def add_folder(self, folder: Folder) -> None:
        """As `put_folder`, within `changing`."""
        self.connection.execute(
            "INSERT INTO folders (id, name, is_open, created_at) VALUES (?,?,?,?) "
            "ON CONFLICT (id) DO UPDATE SET name = excluded.name, is_open = excluded.is_open",
            (folder.id, clean_text(folder.name), int(folder.is_open), folder.created_at),
        )

    def remove_folder(self, folder_id: str) -> None:
        with transaction(self.connection) as c:
            c.execute("UPDATE conversations SET folder_id = '' WHERE folder_id = ?", (folder_id,))
            c.execute("DELETE FROM folders WHERE id = ?", (folder_id,))

    # --- messages ---

    def messages(self, conversation_id: str) -> tuple[Message, ...]:
        rows = self.connection.execute(
            f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE conversation_id = ? ORDER BY seq", (conversation_id,)
        )
        of_messages = partial(self._of_messages, conversation_id)
        pictures: dict[str, list[Picture]] = {}
        for id_, media, data in of_messages("media, data", "pictures", "message_id, place"):
            if isinstance(data, bytes):
                pictures.setdefault(id_, []).append(_picture(media, data))
        attachments: dict[str, list[Attachment]] = {}
        joined = "attachments JOIN documents ON documents.id = document_id"
        for id_, about in of_messages("about", joined, "message_id, place"):
            if (attachment := _attachment(about)) is not None:
                attachments.setdefault(id_, []).append(attachment)
        sources = {id_: sources_from_json(text_of(listed)) for id_, listed in of_messages("listed", "sources")}
        steps = {id_: steps_from_json(text_of(listed)) for id_, listed in of_messages("listed", "steps")}
        columns = "summary, is_on, changed_at, model, turns"
        folds = {id_: fold_from_row(tuple(rest)) for id_, *rest in of_messages(columns, "folds")}
        deleted = {id_: _moment(at) or _LEAST_MOMENT for id_, at in of_messages("deleted_at", "deleted_messages")}
        return tuple(
            dataclasses.replace(
                each,
                pictures=tuple(pictures.get(each.id, ())),
                attachments=tuple(attachments.get(each.id, ())),
                sources=sources.get(each.id, ()),
                steps=steps.get(each.id, ()),
                fold=folds.get(each.id),
                deleted_at=deleted.get(each.id, 0.0),
            )
            for each in map(message_from_row, rows)
        )

    def _of_messages(self, conversation_id: str, columns: str, table: str, order: str = "1") -> Iterator[list[Any]]:
        for id_, *rest in self.connection.execute(
            f"SELECT message_id, {columns} FROM {table} "
            f"WHERE message_id IN (SELECT id FROM messages WHERE conversation_id = ?) ORDER BY {order}",
            (conversation_id,),
        ):
            yield [text_of(id_), *rest]

    def _insert(self, message: Message) -> None:
        self.connection.execute(f"INSERT INTO messages ({MESSAGE_COLUMNS}) VALUES ({_PLACES})", message_values(message))
        self.connection.executemany(
            "INSERT INTO pictures (message_id, place, media, data) VALUES (?,?,?,?)",
            _picture_values(message.id, message.pictures),
        )
        self._attach("attachments", "message_id", message.id, message.attachments)
        if message.sources:
            self._insert_sources(message)
        if message.steps:
            self._insert_steps(message)
        if message.fold is not None:
            self._put_fold(message.id, message.fold)
        if message.deleted_at:
            self._put_deleted(message.id, message.deleted_at)

    def _insert_sources(self, message: Message) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO sources (message_id, listed) VALUES (?, ?)",
            (message.id, sources_to_json(message.sources)),
        )

    def _insert_steps(self, message: Message) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO steps (message_id, listed) VALUES (?, ?)",
            (message.id, steps_to_json(message.steps)),
        )

    def _attach(self, table: str, column: str, owner: str, attachments: Iterable[Attachment]) -> None:
        for place, attachment in enumerate(attachments):
            self._add_document(attachment)
            self.connection.execute(
                f"INSERT INTO {table} ({column}, place, document_id) VALUES (?, ?, ?)", (owner, place, attachment.id)
            )

    def _add_document(self, attachment: Attachment) -> None:
        self.connection.execute(
            "INSERT OR IGNORE INTO documents (id, about, parts) VALUES (?, ?, ?)",
            (attachment.id, _about(attachment), packed(attachment.parts) if attachment.parts else None),
        )

    def _put_fold(self, message_id: str, fold: Fold) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO folds (message_id, summary, is_on, changed_at, model, turns) VALUES (?,?,?,?,?,?)",
            (
                message_id,
                clean_text(fold.summary),
                int(fold.is_on),
                fold.changed_at,
                clean_text(fold.model),
                fold.turns,
            ),
        )

    def _put_deleted(self, message_id: str, at: float) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO deleted_messages (message_id, deleted_at) VALUES (?,?)", (message_id, at)
        )

    def set_fold(self, message_id: str, fold: Fold | None) -> None:
        with transaction(self.connection) as c:
            if fold is None:
                c.execute("DELETE FROM folds WHERE message_id = ?", (message_id,))
            elif c.execute("SELECT 1 FROM messages WHERE id = ?", (message_id,)).fetchone():
                self._put_fold(message_id, fold)

    def set_message_deleted(self, message_id: str, at: float | None) -> None:
        with transaction(self.connection) as c:
            if at is None:
                c.execute("DELETE FROM deleted_messages WHERE message_id = ?", (message_id,))
            elif c.execute("SELECT 1 FROM messages WHERE id = ?", (message_id,)).fetchone():
                self._put_deleted(message_id, at)

    def add_messages(self, messages: Iterable[Message]) -> None:
        """Add messages, parents before children, and put all of them on the visible path; all or none."""
        with transaction(self.connection):
            for message in messages:
                self._unchoose(message.conversation_id, message.parent_id)
                self._insert(dataclasses.replace(message, chosen=True))

    def remove_messages(self, message_ids: Iterable[str]) -> None:
        with transaction(self.connection) as c:
            c.executemany("DELETE FROM messages WHERE id = ?", [(id_,) for id_ in message_ids])

    def add_message(self, message: Message) -> None:
        self.add_messages([message])

    def update_message(self, message: Message) -> None:
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
        with transaction(self.connection) as c:
            return c.execute(
                "UPDATE messages SET state = 'partial', reason = ?, reason_code = 'interrupted' "
                "WHERE state = 'streaming'",
                (reason,),
            ).rowcount


_MOST_UNPACKED_BYTES = 256 * 2**20


def packed(parts: Iterable[Part]) -> bytes:
    listed = [[part.page, clean_text(part.heading), clean_text(part.text)] for part in parts]
    return zlib.compress(json.dumps(listed, ensure_ascii=False).encode("utf-8"), 6)


def unpacked(data: bytes) -> tuple[Part, ...]:
    try:
        inflating = zlib.decompressobj()
        listed = json.loads(inflating.decompress(data, _MOST_UNPACKED_BYTES))
        return parts_from_list(listed)
    except (zlib.error, ValueError, RecursionError):
        return ()


def _about(attachment: Attachment) -> str:
    return json.dumps(attachment_to_dict(attachment), ensure_ascii=False)


def _attachment(about: object) -> Attachment | None:
    try:
        return attachment_from_dict(json.loads(text_of(about)))
    except (ValueError, RecursionError):
        return None


def fold_from_row(row: tuple[Any, ...]) -> Fold:
    summary, is_on, changed_at, model, turns = row
    return Fold(text_of(summary), bool(is_on), _moment(changed_at), text_of(model), text_of(turns))


def folder_from_row(row: tuple[Any, ...]) -> Folder:
    id_, name, is_open, created_at = row
    return Folder(text_of(id_), text_of(name), bool(is_open), _moment(created_at))


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
