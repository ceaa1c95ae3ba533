"""The database file's tables, their migrations, and how a connection is configured."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

Migration = tuple[str, ...]

# Messages: `seq` is the insertion order and the row id of the full-text index.  A streaming message is not indexed
# until it ends, so that saving a step writes one small row and not the index.
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

# What a model thought before its answer.  It is not searched: a search finds what was said.
_VERSION_2: Migration = (
    "ALTER TABLE messages ADD COLUMN reasoning TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE messages ADD COLUMN reasoning_s REAL NOT NULL DEFAULT 0.0",
)

# One trigger rather than two: SQLite runs several of one event in an order of its own, and where the new text was put
# into the index before the old one was taken out, a message that had not changed was found no more.  The index is
# made again, for that has happened.
_VERSION_3: Migration = (
    "DROP TRIGGER messages_old",
    "DROP TRIGGER messages_new",
    "CREATE TRIGGER messages_change AFTER UPDATE OF content, state ON messages "
    "WHEN old.content IS NOT new.content OR (old.state = 'streaming') IS NOT (new.state = 'streaming') BEGIN "
    "INSERT INTO messages_fts (messages_fts, rowid, content) "
    "SELECT 'delete', old.seq, old.content WHERE old.state <> 'streaming'; "
    "INSERT INTO messages_fts (rowid, content) SELECT new.seq, new.content WHERE new.state <> 'streaming'; END",
    "INSERT INTO messages_fts (messages_fts) VALUES ('delete-all')",
    "INSERT INTO messages_fts (rowid, content) SELECT seq, content FROM messages WHERE state <> 'streaming'",
)

# What users' messages show.  They go with their message, so with its chat.
_VERSION_4: Migration = (
    """
    CREATE TABLE pictures (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL REFERENCES messages (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        media TEXT NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (message_id, place)
    )
    """,
)

# Pictures that will go with a chat's next message, as its `draft` will.
_VERSION_5: Migration = (
    """
    CREATE TABLE unsent_pictures (
        seq INTEGER PRIMARY KEY,
        conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        media TEXT NOT NULL,
        data BLOB NOT NULL,
        UNIQUE (conversation_id, place)
    )
    """,
)

# Documents of messages, and of chats' next ones. Several may have the same: versions of a message, branches in other
# chats. One that nobody has any more goes. `about` is the record, `parts` its text, packed; folders have none.
_VERSION_6: Migration = (
    """
    CREATE TABLE documents (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        about TEXT NOT NULL,
        parts BLOB
    )
    """,
    """
    CREATE TABLE attachments (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL REFERENCES messages (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        document_id TEXT NOT NULL REFERENCES documents (id),
        UNIQUE (message_id, place)
    )
    """,
    """
    CREATE TABLE unsent_attachments (
        seq INTEGER PRIMARY KEY,
        conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        document_id TEXT NOT NULL REFERENCES documents (id),
        UNIQUE (conversation_id, place)
    )
    """,
    "CREATE INDEX attachments_by_document ON attachments (document_id)",
    "CREATE INDEX unsent_attachments_by_document ON unsent_attachments (document_id)",
    *(
        f"CREATE TRIGGER {table}_out AFTER DELETE ON {table} "
        "WHEN NOT EXISTS (SELECT 1 FROM attachments WHERE document_id = old.document_id) "
        "AND NOT EXISTS (SELECT 1 FROM unsent_attachments WHERE document_id = old.document_id) BEGIN "
        "DELETE FROM documents WHERE id = old.document_id; END"
        for table in ("attachments", "unsent_attachments")
    ),
    """
    CREATE TABLE sources (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE REFERENCES messages (id) ON DELETE CASCADE,
        listed TEXT NOT NULL
    )
    """,
)

# Folders of chats; what is sent instead of the earlier turns of a long chat; and messages that were deleted, which
# keep their place in the tree.
_VERSION_7: Migration = (
    """
    CREATE TABLE folders (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        name TEXT NOT NULL,
        is_open INTEGER NOT NULL CHECK (is_open IN (0, 1)),
        created_at REAL NOT NULL
    )
    """,
    "ALTER TABLE conversations ADD COLUMN folder_id TEXT NOT NULL DEFAULT ''",
    """
    CREATE TABLE folds (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE REFERENCES messages (id) ON DELETE CASCADE,
        summary TEXT NOT NULL,
        is_on INTEGER NOT NULL CHECK (is_on IN (0, 1)),
        changed_at REAL NOT NULL,
        model TEXT NOT NULL,
        turns TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE deleted_messages (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE REFERENCES messages (id) ON DELETE CASCADE,
        deleted_at REAL NOT NULL
    )
    """,
)

# Calls of tools in answers, and whether chats offer any.
_VERSION_8: Migration = (
    """
    CREATE TABLE steps (
        seq INTEGER PRIMARY KEY,
        message_id TEXT NOT NULL UNIQUE REFERENCES messages (id) ON DELETE CASCADE,
        listed TEXT NOT NULL
    )
    """,
    "ALTER TABLE conversations ADD COLUMN tools TEXT NOT NULL DEFAULT ''",
)

MIGRATIONS: tuple[Migration, ...] = (
    *(_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4, _VERSION_5, _VERSION_6, _VERSION_7, _VERSION_8),
)
"""Entry n migrates a file of version n to version n + 1.  Append only."""

BUSY_TIMEOUT_MS = 2000


class NewerDatabaseError(Exception):
    """The file was written by a newer Switchyard, so it is not touched."""


def connect(path: Path) -> sqlite3.Connection:
    """A connection with this program's settings; the caller handles transactions.

    WAL, so that readers never wait for a writer and a crash loses no committed text.  `synchronous = FULL` makes a
    commit survive a power cut; the saving steps of a streaming answer lower it to NORMAL, which survives a crash.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # One invalid UTF-8 byte must cost only itself, not the whole chat.
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
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
    """All or nothing; takes the write lock at once, so that two processes queue instead of failing halfway."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def version_of(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Migrate the file to the current version, one transaction per version."""
    while (version := version_of(connection)) != len(migrations):
        if version > len(migrations):
            raise NewerDatabaseError
        with transaction(connection):
            if version_of(connection) != version:
                continue  # another process migrated it first
            for statement in migrations[version]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version + 1}")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the error means that the file's contents are wrong, rather than that it cannot be written now."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def check_header(path: Path) -> None:
    """Check the header for damage that SQLite would take for settings, such as read-only.

    Raises:
        sqlite3.DatabaseError: the file is damaged (see `is_damage`).
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(100)
    # See sqlite.org/fileformat.html, 1.3: journal modes, reserved bytes, payload fractions, schema format, no
    # auto-vacuum, UTF-8, reserved bytes again.
    if header and not (
        len(header) == 100
        and header[:16] == b"SQLite format 3\0"
        and {header[18], header[19]} <= {1, 2}
        and header[20:24] == b"\x00\x40\x20\x20"
        and header[44:48] in (b"\0\0\0\0", b"\0\0\0\x04")
        and header[52:56] == header[64:68] == b"\0\0\0\0"
        and header[56:60] in (b"\0\0\0\0", b"\0\0\0\x01")
        and header[68:92] == bytes(24)
    ):
        raise damaged("the header")


def check_contents(connection: sqlite3.Connection) -> None:
    """Run every check SQLite has: tables against indices, references, and that the schema is ours.

    Takes 0.2 s for 30,000 messages.

    Raises:
        sqlite3.DatabaseError: the file is damaged (see `is_damage`).
        NewerDatabaseError: it was written by a newer version.
    """
    connection.execute("BEGIN")  # one snapshot of the file: another window may be creating it
    try:
        _check(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _check(connection: sqlite3.Connection) -> None:
    version, schema = version_of(connection), _schema(connection)
    if version > len(MIGRATIONS):
        # One bit off, with exactly this version's schema: no newer program wrote that.
        if (version ^ len(MIGRATIONS)).bit_count() == 1 and schema == _expected(len(MIGRATIONS)):
            raise damaged("the version")
        raise NewerDatabaseError
    if version < 0 or schema != _expected(version):
        raise damaged("the schema")
    for check in ("PRAGMA integrity_check(1)", "PRAGMA foreign_key_check"):
        found = connection.execute(check).fetchone()
        if found is not None and found[0] != "ok":
            raise damaged(str(found))
    if version:
        # Opens the full-text indices: a damaged one would reject the next message.
        for table in ("titles_fts", "messages_fts"):
            connection.execute(f"SELECT rowid FROM {table} WHERE {table} MATCH 'a' LIMIT 1").fetchone()


def damaged(what: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(f"damaged: {what}")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _schema(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    rows = connection.execute("SELECT type, name, tbl_name, ifnull(sql, '') FROM sqlite_master").fetchall()
    return sorted(row for row in rows if not row[1].startswith("sqlite_stat"))


@cache
def _expected(version: int) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for migration in MIGRATIONS[:version]:
            for statement in migration:
                connection.execute(statement)
        return _schema(connection)
