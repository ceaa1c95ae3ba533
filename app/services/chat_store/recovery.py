"""Recovery of a damaged chat database: moved to a dated name, and copied row by row into a new one."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from app.services.chat_store.database import (
    CONVERSATION_COLUMNS,
    MESSAGE_COLUMNS,
    ChatDatabase,
    conversation_from_row,
    fold_from_row,
    folder_from_row,
    message_from_row,
    text_of,
    unpacked,
)
from app.services.chat_store.pages import Pages, Record, Value
from app.services.chat_store.records import (
    ROLES,
    Attachment,
    Conversation,
    Folder,
    Message,
    MessageState,
    Source,
    attachment_from_dict,
    sources_from_json,
    steps_from_json,
)
from app.services.chat_store.schema import check_contents, check_header, connect, damaged, is_damage, migrate
from app.services.chat_store.tree import sound
from engine.common.chat import Picture
from engine.common.files import is_no_file, private_file, private_folder, restrict_files
from engine.common.pictures import media_of

RECOVERED_TITLE = "Recovered chat"
CUT_OFF = "The rest of this message was on a damaged part of the chat file."

_SURE_CHARACTERS = 16
"""Ids of at least this length do not collide by chance."""

_MESSAGE_VALUES = tuple(1 + len(MESSAGE_COLUMNS.split(",")) - newer for newer in (0, 2))
"""Columns of a message, and of one that was written before there was reasoning."""

_DELETED_AT = len(CONVERSATION_COLUMNS.split(",")) - 1
"""The column of a conversation, which stands before its folder."""

_SIDE_FILES = ("-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a recovery: how much was read, and where the damaged file is kept."""

    kept_as: Path
    conversations: int
    messages: int
    lost: int


def open_checked(path: Path) -> ChatDatabase:
    """The database at `path`, created if there was none."""
    private_folder(path.parent)
    private_file(path)
    restrict_files(path.parent.glob(f"{path.stem}*"))  # its log and earlier damaged files too
    check_header(path)
    try:
        connection = connect(path)
        try:
            check_contents(connection)
            migrate(connection)
        except BaseException:
            connection.close()
            raise
    except UnicodeDecodeError as error:  # SQLite's own message quotes the damaged name verbatim
        raise damaged("a name in the schema") from error
    return ChatDatabase(connection)


def recover(path: Path) -> tuple[ChatDatabase, Recovery]:
    """Move the damaged file to a dated name and return a new database with everything that could be read.

    The new one is complete before the damaged one is moved.

    Raises:
        OSError, sqlite3.Error: it could not be written, for lack of space for example; the damaged file stays in place.
    """
    with tempfile.TemporaryDirectory(prefix="switchyard-recovery-", dir=path.parent) as folder:
        salvaged = _salvage(path)
        trees = _trees(salvaged.conversations, salvaged.messages)
        fresh = Path(folder) / "recovered.sqlite3"
        database = open_checked(fresh)
        try:
            for place in salvaged.folders:
                database.put_folder(place)
            database.add_conversations(trees)
            for conversation, _ in trees:
                if pictures := _in_places(salvaged.shown.get(conversation.id, ())):
                    database.set_unsent_pictures(conversation.id, pictures)
                if documents := _in_places(salvaged.attached.get(conversation.id, ())):
                    database.set_unsent_attachments(conversation.id, documents)
        finally:
            database.close()
        moved = _rename_damaged(path)
        os.replace(fresh, path)
    kept = sum(len(tree) for _, tree in trees)
    return open_checked(path), Recovery(moved, len(trees), kept, max(0, salvaged.known - kept))


def can_be_written(path: Path) -> bool:
    """Whether the database at `path` can be written to; True if there is none yet."""
    for odd in (path, *(path.with_name(f"{path.name}{side}") for side in _SIDE_FILES)):
        if is_no_file(odd, (odd.name,)):
            raise OSError(f"{odd.name} is not a file")
    return not path.exists() or (os.access(path.parent, os.W_OK) and os.access(path, os.W_OK))


def open_copy(path: Path) -> tuple[ChatDatabase, Recovery | None]:
    """An in-memory copy of a database that cannot be written to, and the recovery if it was damaged.

    Raises:
        OSError, sqlite3.Error: it cannot be read.
        NewerDatabaseError: it was written by a newer version.
    """
    with tempfile.TemporaryDirectory(prefix="switchyard-chats-") as folder:
        copy = Path(folder) / path.name
        shutil.copyfile(path, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}-wal", f"{copy}-wal")
        recovery = None
        try:
            database = open_checked(copy)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            database, recovery = recover(copy)
            recovery = replace(recovery, kept_as=path)
        memory = connect(Path(":memory:"))
        try:
            database.connection.backup(memory)
        finally:
            database.close()
    return ChatDatabase(memory), recovery


def _rename_damaged(path: Path) -> Path:
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    moved = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    number = 1
    while moved.exists():
        number += 1
        moved = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    os.replace(path, moved)
    for side in _SIDE_FILES:
        with suppress(FileNotFoundError):
            os.replace(f"{path}{side}", f"{moved}{side}")
    return moved


def _salvage(path: Path) -> _Salvaged:
    pages = Pages(path)
    # A damaged row id may equal another row's: both are kept, distinguished by their own ids.
    conversation_rows = {(row.rowid, row.values[1]): row for row in pages.rows(_is_conversation)}
    message_rows: dict[tuple[int, Value], Record] = {}
    for row in pages.rows(_is_message):
        message_rows.setdefault((row.rowid, row.values[1]), row)
    shown: dict[str, list[tuple[int, Picture]]] = {}
    for row in pages.rows(_is_picture):
        _, owner, place, media, data = row.values
        if row.is_whole and isinstance(place, int) and isinstance(data, bytes) and media_of(data) == media:
            picture = Picture(media_of(data), base64.b64encode(data).decode("ascii"))
            shown.setdefault(text_of(owner), []).append((place, picture))
    attached, sources = _documents(pages)
    steps = {text_of(row.values[1]): steps_from_json(text_of(row.values[2])) for row in pages.rows(_is_steps)}
    folds = {text_of(row.values[1]): fold_from_row(row.values[2:]) for row in pages.rows(_is_fold) if row.is_whole}
    gone = {text_of(row.values[1]): float(row.values[2]) for row in pages.rows(_is_deletion)}  # type: ignore[arg-type]
    folders = {text_of(row.values[1]): folder_from_row(row.values[1:]) for row in pages.rows(_is_folder)}
    index = _Index(pages)
    # A row that an index still lists was not deleted, no matter where it is found.
    missing_conversations = index.conversations - {rowid for rowid, _ in conversation_rows}
    missing_messages = index.messages.keys() - {rowid for rowid, _ in message_rows}
    for row in pages.doubtful_rows(lambda rowid: rowid in missing_conversations or rowid in missing_messages):
        if _is_conversation(row.values) and row.rowid in missing_conversations:
            missing_conversations.discard(row.rowid)
            conversation_rows[row.rowid, row.values[1]] = row
        elif _is_message(row.values) and row.rowid in missing_messages:
            missing_messages.discard(row.rowid)
            message_rows[row.rowid, row.values[1]] = row
    deleted = {
        row.values[1] for row in conversation_rows.values() if row.values[_DELETED_AT] is not None
    } | index.deleted
    conversations = [_conversation(row) for _, row in _in_order(conversation_rows) if row.values[1] not in deleted]
    kept = {conversation.id for conversation in conversations}
    messages = [_message(row) for _, row in _in_order(message_rows) if not _was_deleted(row, kept, deleted, index)]
    messages = [
        replace(
            each,
            pictures=_in_places(shown.get(each.id, ())),
            attachments=_in_places(attached.get(each.id, ())),
            sources=sources.get(each.id, ()),
            steps=steps.get(each.id, ()),
            fold=folds.get(each.id),
            deleted_at=gone.get(each.id, 0.0),
        )
        for each in messages
    ]
    known = sum(conversation not in deleted for conversation in index.messages.values())
    return _Salvaged(conversations, messages, shown, attached, list(folders.values()), known)


def _documents(pages: Pages) -> tuple[dict[str, list[tuple[int, Attachment]]], dict[str, tuple[Source, ...]]]:
    found: dict[str, Attachment] = {}
    for row in pages.rows(_is_document):
        _, _id, about, packed_parts = row.values
        try:
            document = attachment_from_dict(json.loads(text_of(about)))
        except (ValueError, RecursionError):
            continue
        if document is not None:
            parts = unpacked(packed_parts) if isinstance(packed_parts, bytes) else ()
            found[document.id] = replace(document, parts=parts, is_read=document.is_read and bool(parts))
    attached: dict[str, list[tuple[int, Attachment]]] = {}
    for row in pages.rows(_is_attached):
        _, owner, place, id_ = row.values
        if isinstance(place, int) and text_of(id_) in found:
            attached.setdefault(text_of(owner), []).append((place, found[text_of(id_)]))
    listed = {text_of(row.values[1]): sources_from_json(text_of(row.values[2])) for row in pages.rows(_is_sources)}
    return attached, listed


def _in_order(rows: Mapping[tuple[int, Value], Record]) -> list[tuple[tuple[int, Value], Record]]:
    return sorted(rows.items(), key=lambda item: item[0][0])


def _was_deleted(row: Record, kept: Collection[str], deleted: Collection[Value], index: _Index) -> bool:
    """Whether a message belongs to a deleted conversation, even if its conversation id is damaged."""
    named = text_of(row.values[2])
    if row.values[2] in deleted:
        return True
    if named in kept or any(_differ_in_one(id_, named) for id_ in kept):
        return False
    if index.messages.get(row.rowid) in deleted:
        return True
    return len(named) >= _SURE_CHARACTERS and any(_differ_in_one(text_of(id_), named) for id_ in deleted)


@dataclass(frozen=True, slots=True)
class _Salvaged:
    """What was read, in the order it was written.

    Attributes:
        shown: pictures and their places, by the ids of their messages, or of the conversations they are to be sent in.
        attached: documents, in the same way.
        known: how many messages the indices list.
    """

    conversations: list[Conversation]
    messages: list[Message]
    shown: dict[str, list[tuple[int, Picture]]]
    attached: dict[str, list[tuple[int, Attachment]]]
    folders: list[Folder]
    known: int


class _Index:
    """The rows that the indices say their tables should hold.

    Attributes:
        conversations: row ids.
        messages: conversation id by row id; only where two indices agree.
        deleted: ids of deleted conversations that are not purged yet.
    """

    def __init__(self, pages: Pages) -> None:
        self.conversations: set[int] = set()
        self.messages: dict[int, str] = {}
        ids: dict[int, list[str]] = {}
        deleted_rows: set[int] = set()
        told_once: set[tuple[int, str]] = set()
        for entry in pages.entries():
            match entry.values:
                case (str() as id_, int() as rowid):
                    ids.setdefault(rowid, []).append(id_)
                case (str() as id_, str() | None, int() as rowid):
                    if (rowid, id_) in told_once:
                        self.messages[rowid] = id_
                    told_once.add((rowid, id_))
                case (int() | float() | None as deleted_at, int() | float(), int() as rowid):
                    self.conversations.add(rowid)
                    if deleted_at is not None:
                        deleted_rows.add(rowid)
        theirs = set(self.messages.values())
        self.deleted = {id_ for rowid in deleted_rows for id_ in ids.get(rowid, ()) if id_ in theirs}


def _is_conversation(values: tuple[Value, ...]) -> bool:
    return (
        len(values) in range(_DELETED_AT + 1, _DELETED_AT + 4)  # without a folder and tools, and with them
        and values[0] is None
        and all(isinstance(values[place], str | bytes) for place in (1, 2))
        and all(isinstance(values[place], int | float) for place in (3, 4, 5))
        and isinstance(values[_DELETED_AT], int | float | None)
    )


def _is_fold(values: tuple[Value, ...]) -> bool:
    return (
        len(values) == 7
        and values[0] is None
        and all(isinstance(values[place], str | bytes) for place in (1, 2, 5, 6))
        and isinstance(values[3], int)
        and isinstance(values[4], int | float)
    )


def _is_deletion(values: tuple[Value, ...]) -> bool:
    return len(values) == 3 and values[0] is None and isinstance(values[1], str) and isinstance(values[2], int | float)


def _is_folder(values: tuple[Value, ...]) -> bool:
    return (
        len(values) == 5
        and values[0] is None
        and all(isinstance(values[place], str) for place in (1, 2))
        and isinstance(values[3], int)
        and isinstance(values[4], int | float)
    )


def _is_picture(values: tuple[Value, ...]) -> bool:
    """Sent or not: the ids of messages and conversations differ."""
    return len(values) == 5 and values[0] is None and isinstance(values[1], str) and isinstance(values[4], bytes)


def _is_document(values: tuple[Value, ...]) -> bool:
    return (
        len(values) == 4
        and values[0] is None
        and isinstance(values[2], str)
        and values[2].startswith("{")
        and isinstance(values[3], bytes | None)
    )


def _is_attached(values: tuple[Value, ...]) -> bool:
    """To a message or a chat: their ids differ."""
    return len(values) == 4 and isinstance(values[2], int) and all(isinstance(values[at], str) for at in (1, 3))


def _is_sources(values: tuple[Value, ...]) -> bool:
    return len(values) == 3 and isinstance(values[1], str) and isinstance(values[2], str) and values[2][:1] == "["


def _is_steps(values: tuple[Value, ...]) -> bool:
    return len(values) == 3 and isinstance(values[1], str) and isinstance(values[2], str) and values[2][:1] == "{"


_Shown = TypeVar("_Shown", Picture, Attachment)


def _in_places(shown: Iterable[tuple[int, _Shown]]) -> tuple[_Shown, ...]:
    places = dict(shown)
    return tuple(places[place] for place in sorted(places))


def _is_message(values: tuple[Value, ...]) -> bool:
    return (
        len(values) in _MESSAGE_VALUES
        and values[0] is None
        and all(isinstance(values[place], str | bytes) for place in (1, 2, 4, 5))
        and isinstance(values[3], str | bytes | None)
        and _nearest(values[4], ROLES) is not None
    )


def _nearest(value: Value, allowed: Iterable[str]) -> str | None:
    """The word that a value was before one of its characters was damaged."""
    text = text_of(value)
    return next((word for word in allowed if word == text or _differ_in_one(word, text)), None)


def _conversation(row: Record) -> Conversation:
    folder_id, tools = (*row.values[_DELETED_AT + 1 :], "", "")[:2]
    return conversation_from_row((*row.values[1:_DELETED_AT], folder_id, tools))


def _message(row: Record) -> Message:
    values = list(row.values[1:])
    values[3] = _nearest(values[3], ROLES)
    values[5] = _nearest(values[5], MessageState) or MessageState.COMPLETE
    message = message_from_row(tuple(values))
    if row.is_whole:
        return message
    return replace(message, state=MessageState.PARTIAL, reason=CUT_OFF, reason_code="damaged", stats=None)


def _trees(conversations: list[Conversation], messages: list[Message]) -> list[tuple[Conversation, list[Message]]]:
    """Messages grouped by conversation; those whose conversation is lost get a new one."""
    known: dict[str, Conversation] = {}
    for conversation in conversations:
        known.setdefault(conversation.id, conversation)
    grouped: dict[str, list[Message]] = {}
    seen: set[str] = set()
    for message in messages:
        if message.id not in seen:
            seen.add(message.id)
            grouped.setdefault(message.conversation_id, []).append(message)
    _reattach(known, grouped)
    for conversation_id, orphans in grouped.items():
        if conversation_id not in known:
            times = [message.created_at for message in orphans]
            known[conversation_id] = Conversation(
                conversation_id, title=RECOVERED_TITLE, created_at=min(times), updated_at=max(times)
            )
    return [(conversation, sound(_joined(grouped.get(id_, ())))) for id_, conversation in known.items()]


def _reattach(known: Mapping[str, Conversation], grouped: dict[str, list[Message]]) -> None:
    """Move messages of an unknown conversation to the one whose id differs in one character: that is a damaged id."""
    for lost in [id_ for id_ in grouped if id_ not in known and len(id_) >= _SURE_CHARACTERS]:
        home = next((id_ for id_ in known if _differ_in_one(id_, lost)), None)
        if home is not None:
            moved = [replace(message, conversation_id=home) for message in grouped.pop(lost)]
            grouped[home] = [*grouped.get(home, ()), *moved]


def _differ_in_one(text: str, other: str) -> bool:
    return len(text) == len(other) and sum(one != two for one, two in zip(text, other, strict=True)) == 1


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Reattach each message whose parent is lost to the last one before it: what is left stays one conversation."""
    messages = list(messages)
    ids = {message.id for message in messages}
    joined: list[Message] = []
    for message in messages:
        if message.parent_id is not None and message.parent_id not in ids and joined:
            message = replace(message, parent_id=joined[-1].id)
        joined.append(message)
    return joined
