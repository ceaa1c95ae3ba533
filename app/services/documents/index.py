"""The index of documents: one SQLite file with the pieces of all documents in chats, and a full-text index over them.

All of it can be made again, from the texts that the chats keep and from the files of folders: an index that is damaged
or of another version is thrown away. Not encrypted, like the chats themselves; a document's pieces go with its chat.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.batch_files.documents import Document, Part
from engine.common.files import private_file, private_folder

USUAL_CHARACTERS = 900
MOST_CHARACTERS = 1300
_LEAST_SHARE = 0.5
"""Of the usual size, where a piece may end early at a better place."""
_ENDS = (
    re.compile(r"\n[ \t]*\n+"),
    re.compile(r"\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s|[。！？；]"),
    re.compile(r"[,;:]\s|[、，]"),
    re.compile(r"\s"),
)
"""Where a text may be cut, best first; the cut is behind it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    text: str
    page: int = 0
    heading: str = ""


def chunked(parts: Iterable[Part]) -> Iterator[Chunk]:
    """The pieces of a document: those of a part have all of its characters, in order."""
    for part in parts:
        for text in _cut(part.text):
            yield Chunk(text, part.page, part.heading)


def _cut(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > MOST_CHARACTERS:
        end = _end(text, begin)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def _end(text: str, begin: int) -> int:
    """Where the piece that begins there ends: the better place wins, then the one nearest to the usual size."""
    least, usual, most = begin + int(USUAL_CHARACTERS * _LEAST_SHARE), begin + USUAL_CHARACTERS, begin + MOST_CHARACTERS
    for kind in _ENDS:
        places = [found.end() for found in kind.finditer(text, least, most)]
        if places:
            return min(places, key=lambda place: abs(place - usual))
    return usual


# --- words ---

# Scripts without spaces between words: pairs of their signs stand for words, in the index and in questions.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]+"
)
_WORD = re.compile(r"[^\W_]+")
_MOST_WORDS, _LONGEST_WORD = 40, 64
_MOST_PAIRED, _NEAR = 12, 12
_COMMON_WORDS = (
    "a aber about according al all als also am an and any are as at au auch auf aus aux avec be been bei bin bis but "
    "by can ce ces che chi come como con could cual da dans das dass de dei del della dem den der des describe di did "
    "die dies diese dieser do doch document documents does du durch e ein eine einem einen einer eines el ella elle "
    "ellos en er es est esta este et explain file files find for from für give gli haben had has hat have how i ich "
    "if ihr il im in into is ist it its kann la las le les leur list lo los me mentioned mit more most my más nach ne "
    "nel nicht no non not nous oder of on or ou our par para pas per pero più please por pour quale que quel quelle "
    "qui quien qué say says se should show si sich sie sind so some son sono sont su such sur sus tell text than that "
    "the their them then there these they this those to un una und une uns unter us vom von vor vous war warum was we "
    "wenn wer werden were what when where which who whom whose why wie will wir wird with wo would y you your zu zum "
    "zur"
)
_COMMON = frozenset(_COMMON_WORDS.split())
"""Words of English, German, French, Spanish and Italian that are everywhere, and what asks for a document."""


def searchable(text: str) -> str:
    """The text as the index gets it: with spaces between pairs of signs where a script has none between words."""
    if text.isascii():
        return text
    return _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(max(len(run) - 1, 1))]


def asked_words(question: str) -> list[str]:
    """What a question asks for, without words that are everywhere, each once; all its words if there are no others."""
    words = [word for run in _WORD.findall(question.lower()) for word in _words_of(run)]
    telling = [word for word in words if word not in _COMMON]
    return list(dict.fromkeys(telling or words))[:_MOST_WORDS]


def _words_of(run: str) -> Iterator[str]:
    at = 0
    for unspaced in _UNSPACED.finditer(run):
        if run[at : unspaced.start()]:
            yield run[at : unspaced.start()][:_LONGEST_WORD]
        yield from _pairs(unspaced[0])
        at = unspaced.end()
    if run[at:]:
        yield run[at:][:_LONGEST_WORD]


def match_for(words: Iterable[str]) -> str:
    """An expression for FTS5 that finds any of the words, and prefers passages in which several stand together.

    Each word is quoted, so that none is an operator. Pairs that are near each other count once more for each: of 100
    questions over 1,000 pages, 97 had their passage first, and 32 without (tests/unit/test_document_index.py).
    """
    quoted = ['"' + word.replace('"', '""') + '"' for word in words]
    near = [f"NEAR({one} {two}, {_NEAR})" for one, two in itertools.combinations(quoted[:_MOST_PAIRED], 2)]
    return " OR ".join((*quoted, *near))


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
    files: int = 0
    pages: int = 0
    characters: int = 0
    unread: tuple[tuple[str, str], ...] = ()


_PIECE = "c.seq, d.id, f.name, c.place, c.page, c.heading, c.text"
_JOINED = "chunks c JOIN files f ON f.seq = c.file JOIN documents d ON d.seq = f.document"


class DocumentIndex:
    """One connection; several of them may use the same file.

    Args:
        path: None: in memory alone, and gone with `close`.
        session: of this run of the program: `keep_only` leaves what was added in it.
    """

    def __init__(self, path: Path | None, session: str = "") -> None:
        self._path, self._session = path, session
        self._open: sqlite3.Connection | None = None
        self._using = threading.RLock()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # --- what is in it ---

    def has(self, document: str) -> bool:
        return bool(self._ask("SELECT 1 FROM documents WHERE id = ?", document))

    def states(self, document: str) -> dict[str, FileState]:
        rows = self._ask(
            "SELECT f.name, f.size, f.mtime_ns, f.digest FROM files f JOIN documents d ON d.seq = f.document "
            "WHERE d.id = ?",
            document,
        )
        return {name: FileState(*state) for name, *state in rows}

    def figures(self, document: str) -> Figures:
        rows = self._ask(
            "SELECT f.name, f.pages, f.characters, f.problem FROM files f JOIN documents d ON d.seq = f.document "
            "WHERE d.id = ? ORDER BY f.name",
            document,
        )
        read = [row for row in rows if not row[3]]
        unread = tuple((name, problem) for name, _, _, problem in rows if problem)
        return Figures(len(read), sum(row[1] for row in read), sum(row[2] for row in read), unread)

    def pieces(self, document: str) -> list[Piece]:
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
        with self._using:
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
        if self._path is None:
            return
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
        if self._path is not None:
            private_folder(self._path.parent)
            private_file(self._path)
        connection = sqlite3.connect(self._path or ":memory:", isolation_level=None, check_same_thread=False)
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
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _places(values: Collection[object]) -> str:
    return ",".join("?" * len(values))
