"""The index of documents: one SQLite file with the pieces of all documents in chats, and a full-text index over them.

All of it can be made again, from the texts that the chats keep and from the files of folders: an index that is damaged
or of another version is thrown away. Not encrypted, like the chats themselves; a document's pieces go with its chat.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.services.documents.chunks import Chunk, asked_words, chunked, match_for, searchable
from engine.batch_files.documents import Document
from engine.common.files import private_file, private_folder

FILE_NAME = "documents.sqlite3"
VERSION = 1
_BUSY_MS = 5000
_SCHEMA = (
    "CREATE TABLE documents (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session TEXT NOT NULL)",
    """
    CREATE TABLE files (
        seq INTEGER PRIMARY KEY,
        document INTEGER NOT NULL REFERENCES documents (seq) ON DELETE CASCADE,
        name TEXT NOT NULL,
        size INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        digest TEXT NOT NULL,
        pages INTEGER NOT NULL,
        characters INTEGER NOT NULL,
        problem TEXT NOT NULL,
        UNIQUE (document, name)
    )
    """,
    """
    CREATE TABLE chunks (
        seq INTEGER PRIMARY KEY,
        file INTEGER NOT NULL REFERENCES files (seq) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        page INTEGER NOT NULL,
        heading TEXT NOT NULL,
        text TEXT NOT NULL
    )
    """,
    "CREATE INDEX chunks_by_place ON chunks (file, place)",
    # Of a word its stem, without accents. It has no content of its own: what is removed is told to it again.
    "CREATE VIRTUAL TABLE words USING fts5 (name, heading, text, content = '', "
    "tokenize = 'porter unicode61 remove_diacritics 2')",
)
_WEIGHTS = "0.5, 1.5, 1.0"
"""Of a word in the file's name, in the heading, and in the text."""
_MOST_HITS = 60


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells whether a file has changed."""

    size: int
    mtime_ns: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk in its document: `place` counts those of its file from 0."""

    seq: int
    document: str
    name: str
    place: int
    page: int
    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a document: files that have text, pages and characters, and those that could not be read."""

    files: int = 0
    pages: int = 0
    characters: int = 0
    unread: tuple[tuple[str, str], ...] = ()


_PIECE = "c.seq, d.id, f.name, c.place, c.page, c.heading, c.text"
_JOINED = "chunks c JOIN files f ON f.seq = c.file JOIN documents d ON d.seq = f.document"


class DocumentIndex:
    """One connection; not for two threads at once, but several of them may use the same file.

    Args:
        session: of this run of the program: `keep_only` leaves what was added in it.
    """

    def __init__(self, path: Path, session: str = "") -> None:
        self._path, self._session = path, session
        self._open: sqlite3.Connection | None = None

    def close(self) -> None:
        """Closes the file; a later call opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    # --- what is in it ---

    def has(self, document: str) -> bool:
        """Whether anything is known of a document."""
        return bool(self._ask("SELECT 1 FROM documents WHERE id = ?", document))

    def states(self, document: str) -> dict[str, FileState]:
        """Of a document's files, by their names."""
        rows = self._ask(
            "SELECT f.name, f.size, f.mtime_ns, f.digest FROM files f JOIN documents d ON d.seq = f.document "
            "WHERE d.id = ?",
            document,
        )
        return {name: FileState(*state) for name, *state in rows}

    def figures(self, document: str) -> Figures:
        """How much of a document there is."""
        rows = self._ask(
            "SELECT f.name, f.pages, f.characters, f.problem FROM files f JOIN documents d ON d.seq = f.document "
            "WHERE d.id = ? ORDER BY f.name",
            document,
        )
        read = [row for row in rows if not row[3]]
        unread = tuple((name, problem) for name, _, _, problem in rows if problem)
        return Figures(len(read), sum(row[1] for row in read), sum(row[2] for row in read), unread)

    def pieces(self, document: str) -> list[Piece]:
        """All of a document, in the order of its files' names."""
        rows = self._ask(f"SELECT {_PIECE} FROM {_JOINED} WHERE d.id = ? ORDER BY f.name, c.place", document)
        return [Piece(*row) for row in rows]

    def spread(self, document: str, most: int) -> list[Piece]:
        """So many pieces from all over a document, the first among them; it may be larger than memory."""
        ((count,),) = self._ask(f"SELECT count(*) FROM {_JOINED} WHERE d.id = ?", document)
        rows = self._ask(
            f"SELECT {_PIECE} FROM {_JOINED} WHERE c.seq IN (SELECT seq FROM (SELECT c.seq AS seq, "
            f"ROW_NUMBER() OVER (ORDER BY f.name, c.place) AS number FROM {_JOINED} WHERE d.id = ?) "
            "WHERE (number - 1) % ? = 0 LIMIT ?) ORDER BY f.name, c.place",
            document,
            max(-(-count // most), 1),
            most,
        )
        return [Piece(*row) for row in rows]

    def pieces_at(self, document: str, name: str, first: int, last: int) -> list[Piece]:
        """Those of a file from one place to another, as far as they are there."""
        rows = self._ask(
            f"SELECT {_PIECE} FROM {_JOINED} WHERE d.id = ? AND f.name = ? AND c.place BETWEEN ? AND ? "
            "ORDER BY c.place",
            document,
            name,
            first,
            last,
        )
        return [Piece(*row) for row in rows]

    def search(self, documents: Collection[str], question: str, most: int = _MOST_HITS) -> list[Piece]:
        """Those that fit a question, best first; none if it has no word that is there.

        What is chosen of them needs their order alone: a search by meaning would be another such list, merged with it.
        """
        match = match_for(asked_words(question))
        if not match or not documents:
            return []
        rows = self._ask(
            f"SELECT {_PIECE} FROM words JOIN chunks c ON c.seq = words.rowid JOIN files f ON f.seq = c.file "
            f"JOIN documents d ON d.seq = f.document WHERE words MATCH ? AND d.id IN ({_places(documents)}) "
            f"ORDER BY bm25(words, {_WEIGHTS}), c.seq LIMIT ?",
            match,
            *documents,
            most,
        )
        return [Piece(*row) for row in rows]

    # --- what comes in and goes ---

    def put(self, document: str, name: str, state: FileState, read: Document) -> int:
        """A file of a document in place of what was known of it; returns how many pieces it has."""

        def run(c: sqlite3.Connection) -> int:
            c.execute("INSERT OR IGNORE INTO documents (id, session) VALUES (?, ?)", (document, self._session))
            (owner,) = c.execute("SELECT seq FROM documents WHERE id = ?", (document,)).fetchone()
            self._remove(c, "f.document = ? AND f.name = ?", owner, name)
            chunks = list(chunked(read.parts))
            characters = sum(len(chunk.text) for chunk in chunks)
            file = c.execute(
                "INSERT INTO files (document, name, size, mtime_ns, digest, pages, characters, problem) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (owner, name, state.size, state.mtime_ns, state.digest, read.pages, characters, read.problem),
            ).lastrowid
            assert file is not None
            self._add(c, file, name, chunks)
            return len(chunks)

        return self._write(run)

    def touch(self, document: str, name: str, state: FileState) -> None:
        """A file has another date, but says the same."""
        self._write(
            lambda c: c.execute(
                "UPDATE files SET size = ?, mtime_ns = ? WHERE name = ? AND document = "
                "(SELECT seq FROM documents WHERE id = ?)",
                (state.size, state.mtime_ns, name, document),
            )
        )

    def drop_files(self, document: str, names: Iterable[str]) -> None:
        def run(c: sqlite3.Connection) -> None:
            for name in names:
                self._remove(c, "f.name = ? AND f.document = (SELECT seq FROM documents WHERE id = ?)", name, document)

        self._write(run)

    def add_empty(self, document: str) -> None:
        """A folder in which nothing is found yet."""
        added = "INSERT OR IGNORE INTO documents (id, session) VALUES (?, ?)"
        self._write(lambda c: c.execute(added, (document, self._session)))

    def forget(self, documents: Collection[str]) -> None:
        """Removes documents, also from the pages of the file that held them."""
        gone = [one for one in documents if self.has(one)]
        if not gone:
            return

        def run(c: sqlite3.Connection) -> None:
            for document in gone:
                self._remove(c, "f.document = (SELECT seq FROM documents WHERE id = ?)", document)
                c.execute("DELETE FROM documents WHERE id = ?", (document,))

        self._write(run)
        # Words of what was removed are in the full-text index until its parts are merged.
        self._write(lambda c: c.execute("INSERT INTO words (words) VALUES ('optimize')"))
        with suppress(sqlite3.Error):
            self._connected().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def keep_only(self, documents: Collection[str]) -> None:
        """Forgets all others of earlier sessions: their chats are gone."""
        rows = self._ask("SELECT id FROM documents WHERE session <> ?", self._session)
        self.forget([id_ for (id_,) in rows if id_ not in documents])

    # --- inside ---

    @staticmethod
    def _add(c: sqlite3.Connection, file: int, name: str, chunks: Sequence[Chunk]) -> None:
        for place, chunk in enumerate(chunks):
            seq = c.execute(
                "INSERT INTO chunks (file, place, page, heading, text) VALUES (?,?,?,?,?)",
                (file, place, chunk.page, chunk.heading, chunk.text),
            ).lastrowid
            c.execute(
                "INSERT INTO words (rowid, name, heading, text) VALUES (?,?,?,?)",
                (seq, *map(searchable, (name, chunk.heading, chunk.text))),
            )

    @staticmethod
    def _remove(c: sqlite3.Connection, which: str, *values: object) -> None:
        rows = c.execute(
            f"SELECT c.seq, f.name, c.heading, c.text FROM chunks c JOIN files f ON f.seq = c.file WHERE {which}",
            values,
        ).fetchall()
        c.executemany(
            "INSERT INTO words (words, rowid, name, heading, text) VALUES ('delete', ?, ?, ?, ?)",
            [(seq, *map(searchable, texts)) for seq, *texts in rows],
        )
        c.execute(f"DELETE FROM files WHERE seq IN (SELECT f.seq FROM files f WHERE {which})", values)

    def _ask(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._mending(lambda c: c.execute(statement, values).fetchall())
        return rows

    def _write(self, run: Callable[[sqlite3.Connection], object]) -> int:
        def whole(c: sqlite3.Connection) -> object:
            c.execute("BEGIN IMMEDIATE")
            try:
                result = run(c)
                c.execute("COMMIT")
            except BaseException:
                if c.in_transaction:
                    c.execute("ROLLBACK")
                raise
            return result

        result = self._mending(whole)
        return result if isinstance(result, int) else 0

    def _mending(self, run: Callable[[sqlite3.Connection], Any]) -> Any:
        """Does it; a damaged index is made anew, and it is tried once more."""
        try:
            return run(self._connected())
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
        self._throw_away()
        return run(self._connected())

    def _throw_away(self) -> None:
        self.close()
        for side in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self._path.with_name(f"{self._path.name}{side}").unlink()

    def _connected(self) -> sqlite3.Connection:
        if self._open is not None:
            return self._open
        self._open = c = self._connect()
        if c.execute("PRAGMA user_version").fetchone()[0] not in (0, VERSION):
            self._throw_away()
            self._open = c = self._connect()
        c.execute("BEGIN IMMEDIATE")
        if c.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _SCHEMA:
                c.execute(statement)
            c.execute(f"PRAGMA user_version = {VERSION}")
        c.execute("COMMIT")
        return c

    def _connect(self) -> sqlite3.Connection:
        private_folder(self._path.parent)
        private_file(self._path)
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            for setting in (f"busy_timeout = {_BUSY_MS}", "journal_mode = WAL", "synchronous = NORMAL"):
                connection.execute(f"PRAGMA {setting}")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")
        except BaseException:
            connection.close()
            raise
        return connection


def digest_of(content: bytes) -> str:
    """What tells whether a file with another date says the same."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _places(values: Collection[object]) -> str:
    return ",".join("?" * len(values))
