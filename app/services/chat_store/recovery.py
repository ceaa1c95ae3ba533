"""A damaged chat database: put aside with a dated name, and read out row by row into a fresh one."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.services.chat_store.database import (
    CONVERSATION_COLUMNS,
    MESSAGE_COLUMNS,
    ChatDatabase,
    conversation_from_row,
    message_from_row,
)
from app.services.chat_store.records import ROLES, Conversation, Message, MessageState
from app.services.chat_store.schema import connect, migrate
from app.services.chat_store.tree import sound

MOST_PROBES = 100_000
"""Row ids asked for one by one in a gap that cannot be walked; an arbitrary end to a hopeless search."""

PAGE_BYTES = 4096
"""SQLite's page size since 2016, which `schema.connect` leaves as it is."""

LARGEST_PADDING = 2**34
"""Bytes; a header that tells of more is damaged itself."""

RECOVERED_TITLE = "Recovered chat"

_SIDE_FILES = ("-wal", "-shm")


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of a damaged file: counts of rows read out of it, and where it is kept."""

    kept_as: Path
    conversations: int
    messages: int


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the error says that the file's contents are wrong, rather than that it cannot be written now."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def open_checked(path: Path) -> ChatDatabase:
    """The database at `path`, made if there was none.

    Raises:
        sqlite3.DatabaseError: it is damaged (see `is_damage`) or cannot be opened now.
        NewerDatabaseError: it is newer than this program.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = connect(path)
    try:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict is None or verdict[0] != "ok":
            error = sqlite3.DatabaseError(f"quick_check: {verdict}")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return ChatDatabase(connection)


def recover(path: Path) -> tuple[ChatDatabase, Recovery]:
    """Put the damaged file aside, untouched, and return a fresh database with everything that could be read.

    The fresh one is complete before the damaged one is moved.

    Raises:
        OSError, sqlite3.Error: there was no room for it, say; the damaged file is where it was.
    """
    # Read from a copy: opening a file replays its log and so changes it.
    with tempfile.TemporaryDirectory(prefix="switchyard-recovery-", dir=path.parent) as folder:
        trees = _trees(*_salvage(path, Path(folder) / "copy.sqlite3"))
        fresh = Path(folder) / "recovered.sqlite3"
        database = open_checked(fresh)
        try:
            database.add_conversations(trees)
        finally:
            database.close()
        aside = _put_aside(path)
        os.replace(fresh, path)
    return open_checked(path), Recovery(aside, len(trees), sum(len(tree) for _, tree in trees))


def _put_aside(path: Path) -> Path:
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    aside = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    os.replace(path, aside)
    for side in _SIDE_FILES:
        with suppress(FileNotFoundError):
            os.replace(f"{path}{side}", f"{aside}{side}")
    return aside


def _salvage(path: Path, copy: Path) -> tuple[list[Conversation], list[Message]]:
    """Read what can be read of the file at `path`, by way of `copy`."""
    shutil.copyfile(path, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(f"{path}-wal", f"{copy}-wal")
    _pad(copy)
    conversation_rows, message_rows = _read_out(copy)
    if not conversation_rows and not message_rows and _replace_first_page(copy):
        conversation_rows, message_rows = _read_out(copy)
    deleted = {row[0] for row in conversation_rows if row[-1] is not None}
    conversations = [
        conversation_from_row(row[:-1]) for row in conversation_rows if row[-1] is None and _fits(row, _CONVERSATION)
    ]
    messages = [message_from_row(row) for row in message_rows if row[1] not in deleted and _fits(row, _MESSAGE)]
    return conversations, messages


_Rows = list[tuple[Any, ...]]


def _read_out(copy: Path) -> tuple[_Rows, _Rows]:
    with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
        conversations = list(_rows(connection, "conversations", f"{CONVERSATION_COLUMNS}, deleted_at"))
        return conversations, list(_rows(connection, "messages", MESSAGE_COLUMNS))


def _replace_first_page(copy: Path) -> bool:
    """Give a file whose first page is lost that of a new database: its tables begin on the same pages in every file."""
    for side in _SIDE_FILES:
        Path(f"{copy}{side}").unlink(missing_ok=True)
    pages = copy.stat().st_size // PAGE_BYTES
    if pages < 2:
        return False
    fresh = copy.with_name("fresh.sqlite3")
    with closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        migrate(connection)
    first = bytearray(fresh.read_bytes()[:PAGE_BYTES])
    # The header counts the pages of its file, and begins a list of free ones: see sqlite.org/fileformat.html, 1.3.
    first[28:32] = pages.to_bytes(4, "big")
    first[32:40] = bytes(8)
    with copy.open("r+b") as file:
        file.write(first)
    return True


def _pad(copy: Path) -> None:
    """Give a truncated file the length that its header tells: SQLite refuses the whole of a shorter one."""
    with copy.open("r+b") as file:
        header = file.read(32)
        if header.startswith(b"SQLite format 3\0") and len(header) == 32:
            page_size = int.from_bytes(header[16:18], "big")
            length = (65536 if page_size == 1 else page_size) * int.from_bytes(header[28:32], "big")
            if copy.stat().st_size < length <= LARGEST_PADDING:
                file.truncate(length)


_TEXT, _OPTIONAL, _NUMBER = (str,), (str, type(None)), (int, float)
_CONVERSATION = (_TEXT, _TEXT, _NUMBER, _NUMBER, _NUMBER, _TEXT, _OPTIONAL, _TEXT, _TEXT)
_MESSAGE = (_TEXT, _TEXT, _OPTIONAL, _TEXT, _TEXT, _TEXT, _TEXT, _TEXT, _TEXT, _NUMBER, _OPTIONAL, _NUMBER)


def _fits(row: tuple[Any, ...], types: tuple[tuple[type, ...], ...]) -> bool:
    """Whether the values are of the columns' types: a damaged page can yield anything."""
    if not all(isinstance(value, allowed) for value, allowed in zip(row, types, strict=False)):
        return False
    return types is not _MESSAGE or (row[3] in ROLES and row[5] in set(MessageState))


def _rows(connection: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """Every row that can be read: forwards to the damage, backwards to it, then one row id at a time between."""
    first, last = 0, None
    try:
        connection.execute(f"SELECT seq, {columns} FROM {table} WHERE 0")
    except sqlite3.Error:
        return  # not even the table is known: there is no row to ask for
    try:
        for seq, *row in connection.execute(f"SELECT seq, {columns} FROM {table} NOT INDEXED ORDER BY seq"):
            first = seq
            yield tuple(row)
        return
    except (sqlite3.Error, OverflowError):
        pass
    backwards: list[tuple[Any, ...]] = []
    with suppress(sqlite3.Error, OverflowError):
        for seq, *row in connection.execute(
            f"SELECT seq, {columns} FROM {table} NOT INDEXED WHERE seq > ? ORDER BY seq DESC", (first,)
        ):
            last = seq
            backwards.append(tuple(row))
    probes = range(first + 1, min(last, first + MOST_PROBES) if last is not None else first + MOST_PROBES)
    for seq in probes:
        try:
            row = connection.execute(f"SELECT {columns} FROM {table} WHERE seq = ?", (seq,)).fetchone()
        except (sqlite3.Error, OverflowError):
            continue
        if row is not None:
            yield tuple(row)
    yield from reversed(backwards)


def _trees(conversations: list[Conversation], messages: list[Message]) -> list[tuple[Conversation, list[Message]]]:
    """Messages under their conversations; those whose conversation is lost get one of their own."""
    known = {conversation.id: conversation for conversation in conversations}
    grouped: dict[str, list[Message]] = {}
    seen: set[str] = set()
    for message in messages:
        if message.id not in seen:
            seen.add(message.id)
            grouped.setdefault(message.conversation_id, []).append(message)
    for conversation_id, orphans in grouped.items():
        if conversation_id not in known:
            times = [message.created_at for message in orphans]
            known[conversation_id] = Conversation(
                conversation_id, title=RECOVERED_TITLE, created_at=min(times), updated_at=max(times)
            )
    return [(conversation, sound(grouped.get(id_, ()))) for id_, conversation in known.items()]
