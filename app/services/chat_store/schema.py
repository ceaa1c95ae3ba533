"""The database file's tables, how an older file becomes a current one, and how a connection is set up."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

Migration = tuple[str, ...]

# Messages: `seq` is the order in which they came and the row id of the full-text index.  A message being written is
# left out of the index until it ends, so that a saving step costs one small row and not an index update.
_VERSION_1: Migration = (
    """
    CREATE TABLE conversations (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        title TEXT NOT NULL DEFAULT '',
        pinned INTEGER NOT NULL DEFAULT 0,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        system_prompt TEXT NOT NULL DEFAULT '',
        sampling TEXT,
        model TEXT NOT NULL DEFAULT '',
        draft TEXT NOT NULL DEFAULT '',
        deleted_at REAL
    )
    """,
    "CREATE INDEX conversations_by_time ON conversations (deleted_at, updated_at)",
    """
    CREATE TABLE messages (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent_id TEXT,
        role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
        content TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('streaming', 'complete', 'partial', 'failed')),
        reason TEXT NOT NULL DEFAULT '',
        reason_code TEXT NOT NULL DEFAULT '',
        model TEXT NOT NULL DEFAULT '',
        created_at REAL NOT NULL,
        stats TEXT,
        chosen INTEGER NOT NULL CHECK (chosen IN (0, 1)),
        UNIQUE (conversation_id, id),
        FOREIGN KEY (conversation_id, parent_id) REFERENCES messages (conversation_id, id) ON DELETE CASCADE
    )
    """,
    "CREATE INDEX messages_by_parent ON messages (conversation_id, parent_id)",
    "CREATE UNIQUE INDEX one_chosen_sibling ON messages (conversation_id, ifnull(parent_id, '')) WHERE chosen",
    "CREATE INDEX messages_streaming ON messages (state) WHERE state = 'streaming'",
    "CREATE VIRTUAL TABLE titles_fts USING fts5 (title, content = 'conversations', content_rowid = 'seq', "
    "tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3')",
    "CREATE VIRTUAL TABLE messages_fts USING fts5 (content, content = 'messages', content_rowid = 'seq', "
    "tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3')",
    "CREATE TRIGGER titles_in AFTER INSERT ON conversations BEGIN "
    "INSERT INTO titles_fts (rowid, title) VALUES (new.seq, new.title); END",
    "CREATE TRIGGER titles_out AFTER DELETE ON conversations BEGIN "
    "INSERT INTO titles_fts (titles_fts, rowid, title) VALUES ('delete', old.seq, old.title); END",
    "CREATE TRIGGER titles_new AFTER UPDATE OF title ON conversations BEGIN "
    "INSERT INTO titles_fts (titles_fts, rowid, title) VALUES ('delete', old.seq, old.title); "
    "INSERT INTO titles_fts (rowid, title) VALUES (new.seq, new.title); END",
    "CREATE TRIGGER messages_in AFTER INSERT ON messages WHEN new.state <> 'streaming' BEGIN "
    "INSERT INTO messages_fts (rowid, content) VALUES (new.seq, new.content); END",
    "CREATE TRIGGER messages_out AFTER DELETE ON messages WHEN old.state <> 'streaming' BEGIN "
    "INSERT INTO messages_fts (messages_fts, rowid, content) VALUES ('delete', old.seq, old.content); END",
    "CREATE TRIGGER messages_old AFTER UPDATE OF content, state ON messages WHEN old.state <> 'streaming' BEGIN "
    "INSERT INTO messages_fts (messages_fts, rowid, content) VALUES ('delete', old.seq, old.content); END",
    "CREATE TRIGGER messages_new AFTER UPDATE OF content, state ON messages WHEN new.state <> 'streaming' BEGIN "
    "INSERT INTO messages_fts (rowid, content) VALUES (new.seq, new.content); END",
)

MIGRATIONS: tuple[Migration, ...] = (_VERSION_1,)
"""Entry n turns a file of version n into one of version n + 1.  Append only."""

BUSY_TIMEOUT_MS = 2000


class NewerDatabaseError(Exception):
    """The file was written by a newer Switchyard: it is left alone."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection set up as every one here is; the caller handles transactions.

    WAL, so that a reader never waits for a writer and a crash loses no committed text.  `synchronous = FULL` makes a
    commit survive a power cut; the saving steps of a streaming answer lower it to NORMAL, which survives a crash.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing; takes the write lock at once, so that two processes queue instead of failing half-way."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version the file says it has; 0 for a new file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the file to the current version, one version and one transaction at a time.

    Raises:
        NewerDatabaseError: the file is newer than this program.
    """
    while (version := version_of(connection)) != len(migrations):
        if version > len(migrations):
            raise NewerDatabaseError
        with transaction(connection):
            if version_of(connection) != version:
                continue  # another process was quicker
            for statement in migrations[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")
