"""The chat store for the window: calls return at once and answer by signals."""

from __future__ import annotations

import errno
import logging
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PySide6.QtCore import QObject, Qt, Signal, SignalInstance

from app.services.chat_store.database import CONVERSATION_COLUMNS, ChatDatabase, conversation_from_row
from app.services.chat_store.records import (
    MATCH_END,
    MATCH_START,
    Attachment,
    Conversation,
    Fold,
    Folder,
    Message,
    SearchHit,
    clean_text,
)
from app.services.chat_store.recovery import Recovery, can_be_written, open_checked, open_copy, recover
from app.services.chat_store.schema import NewerDatabaseError, connect, is_damage, migrate
from engine.batch_files.documents import Part
from engine.common.chat import Picture
from engine.common.errors import EngineError, ErrorCode
from engine.common.kept_context import forget_chat, forget_other_chats
from engine.common.paths import data_dir

_log = logging.getLogger("switchyard.chats")

RETRY_S = 2.0
_PASSING = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
    }
)


@dataclass(slots=True)
class Job:
    """One job for the database thread.

    Attributes:
        run: called on the thread; its result goes to `done`, also on the thread.
        writes: whether it must not be lost: it is retried until it succeeds.
        replaces: a queued write with the same key is replaced by this one.
    """

    run: Callable[[ChatDatabase], Any]
    done: Callable[[Any], None] | None = None
    failed: Callable[[EngineError], None] | None = None
    writes: bool = True
    replaces: str = ""


class StoreWorker:
    """Runs jobs on its own thread, which alone accesses the database.

    They run in order. A write that fails for now (disk full, locked, gone) stays at the head of the queue and is
    retried; reads overtake it. A damaged database is recovered when it is found.

    Args:
        on_trouble: called on the thread with the error when writes are held up, with None when they are done.
        on_recovered: called on the thread after a damaged file was recovered.
        on_newer: called on the thread when the file is newer than this program; it is not written to.
        on_read_only: called on the thread when the file is read-only: its chats are shown, and new ones live in memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_trouble: Callable[[Exception | None], None],
        on_recovered: Callable[[Recovery], None],
        on_newer: Callable[[], None],
        on_read_only: Callable[[], None] = lambda: None,
        retry_s: float = RETRY_S,
    ) -> None:
        self._path = path
        self._on_trouble = on_trouble
        self._on_recovered = on_recovered
        self._on_newer = on_newer
        self._on_read_only = on_read_only
        self._retry_s = retry_s
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._in_trouble = False
        self._database: ChatDatabase | None = None
        self._thread = threading.Thread(target=self._work, name="chat-store", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._wake:
            if job.replaces:
                for index, waiting in enumerate(self._jobs):
                    if waiting.replaces == job.replaces and waiting is not self._running:
                        self._jobs[index] = job
                        return
            self._jobs.append(job)
            self._wake.notify_all()

    def unsaved(self) -> int:
        with self._wake:
            return sum(job.writes for job in self._jobs)

    def flush(self, timeout_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: not self._jobs or not self._thread.is_alive(), timeout_s)

    def close(self, timeout_s: float) -> int:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return self.unsaved()

    # --- on the thread ---

    def _work(self) -> None:
        while (job := self._next()) is not None:
            was_in_trouble = self._in_trouble
            if not self._try(job):
                if self._wait_to_retry():
                    continue
                break
            with self._wake:
                self._jobs.remove(job)
                self._running = None
                if was_in_trouble and not self._in_trouble:  # still under the lock: it no longer counts as unsaved
                    self._on_trouble(None)
                self._wake.notify_all()
        if self._database is not None:
            self._database.close()
        with self._wake:
            self._wake.notify_all()

    def _next(self) -> Job | None:
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._closing)
            if not self._jobs:
                return None
            # While a write is held up, reads overtake it.
            reads = (job for job in self._jobs if not job.writes) if self._in_trouble and self._database else ()
            self._running = next(iter(reads), self._jobs[0])
            return self._running

    def _try(self, job: Job) -> bool:
        try:
            result = self._run_recovering(job)
        except EngineError as error:
            self._report_failure(job, error)
            return True
        except Exception as error:
            if job.writes and _may_pass(error):
                self._report_trouble(error)
                return False
            # The thread survives any error: the next write may be the user's text.
            _log.error("a job of the chat store failed (%s)", type(error).__name__)
            self._report_failure(job, EngineError(ErrorCode.INTERNAL, f"The chat database refused: {error}."))
            return True
        if job.writes:
            self._in_trouble = False
        if job.done is not None:
            job.done(result)
        return True

    def _run_recovering(self, job: Job) -> Any:
        try:
            if self._database is None:
                self._database = self._open()
            return job.run(self._database)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
        return job.run(self._recover())

    def _open(self) -> ChatDatabase:
        try:
            if can_be_written(self._path):
                return open_checked(self._path)
            database, recovery = open_copy(self._path)
            self._on_read_only()
            if recovery is not None:
                self._on_recovered(recovery)
            return database
        except NewerDatabaseError:
            # Do not touch a newer file: this session's chats live in memory, and the window says so.
            self._on_newer()
            connection = connect(Path(":memory:"))
            migrate(connection)
            return ChatDatabase(connection)

    def _recover(self) -> ChatDatabase:
        if self._database is not None:
            self._database.close()
            self._database = None
        self._database, recovery = recover(self._path)
        self._on_recovered(recovery)
        return self._database

    def _wait_to_retry(self) -> bool:
        with self._wake:
            if self._closing:
                return False
            self._wake.wait_for(
                lambda: self._closing or (self._database and any(not job.writes for job in self._jobs)),
                self._retry_s,
            )
            return True

    def _report_trouble(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            self._on_trouble(error)

    @staticmethod
    def _report_failure(job: Job, error: EngineError) -> None:
        if job.failed is not None:
            job.failed(error)


def _may_pass(error: Exception) -> bool:
    """Whether the same call can succeed later: disk full, file locked or unavailable."""
    if isinstance(error, OSError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _PASSING


FILE_NAME = "chats.sqlite3"
CLOSE_S = 10.0
_WORDS_S = 0.3
"""A menu waits no longer for what was asked."""
_WORDS = 40
"""Characters of it."""

T = TypeVar("T")

_Loaded = tuple[Conversation | None, tuple[Message, ...], tuple[Picture, ...], tuple[Attachment, ...]]


MOST_HITS = 100
_SNIPPET_WORDS = 12
_AROUND = 40
# Scripts without spaces: the index would take a whole clause for one word, so these are searched as plain text.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_LIVING = "m.id NOT IN (SELECT message_id FROM deleted_messages)"
_COLUMNS = ", ".join(f"c.{name}" for name in CONVERSATION_COLUMNS.split(", "))


def search(connection: sqlite3.Connection, text: str) -> tuple[SearchHit, ...]:
    """Conversations that contain every word of `text`, one hit each, titles before messages, best first."""
    text = clean_text(text).strip()
    if not text:
        return ()
    hits: dict[str, SearchHit] = {}
    words = re.findall(r"\w+", text)
    plain = bool(_UNSPACED.search(text)) or not words
    for hit in _containing(connection, text) if plain else _matching(connection, words):
        hits.setdefault(hit.conversation.id, hit)
        if len(hits) == MOST_HITS:
            break
    return tuple(hits.values())


def _matching(connection: sqlite3.Connection, words: list[str]) -> Iterator[SearchHit]:
    query = " ".join(f'"{word}"' for word in words) + "*"
    marks = (MATCH_START, MATCH_END)
    for *fields, snippet in connection.execute(
        f"SELECT {_COLUMNS}, highlight(titles_fts, 0, ?, ?) FROM titles_fts "
        "JOIN conversations c ON c.seq = titles_fts.rowid "
        "WHERE titles_fts MATCH ? AND c.deleted_at IS NULL ORDER BY c.updated_at DESC",
        (*marks, query),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), snippet)
    for *fields, message_id, snippet in connection.execute(
        f"SELECT {_COLUMNS}, m.id, snippet(messages_fts, 0, ?, ?, '…', {_SNIPPET_WORDS}) FROM messages_fts "
        "JOIN messages m ON m.seq = messages_fts.rowid JOIN conversations c ON c.id = m.conversation_id "
        f"WHERE messages_fts MATCH ? AND c.deleted_at IS NULL AND {_LIVING} ORDER BY messages_fts.rank LIMIT 1000",
        (*marks, query),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), _one_line(snippet), message_id)


def _containing(connection: sqlite3.Connection, text: str) -> Iterator[SearchHit]:
    pattern = "%" + re.sub(r"([%_\\])", r"\\\1", text) + "%"
    for fields in connection.execute(
        f"SELECT {_COLUMNS} FROM conversations c WHERE c.title LIKE ? ESCAPE '\\' AND c.deleted_at IS NULL "
        "ORDER BY c.updated_at DESC",
        (pattern,),
    ):
        conversation = conversation_from_row(fields)
        yield SearchHit(conversation, _around(conversation.title, text))
    for *fields, message_id, content in connection.execute(
        f"SELECT {_COLUMNS}, m.id, m.content FROM messages m JOIN conversations c ON c.id = m.conversation_id "
        f"WHERE m.content LIKE ? ESCAPE '\\' AND c.deleted_at IS NULL AND {_LIVING} ORDER BY m.seq DESC LIMIT 1000",
        (pattern,),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), _around(content, text), message_id)


def _around(content: str, text: str) -> str:
    at = max(content.lower().find(text.lower()), 0)
    start, end = max(at - _AROUND, 0), at + len(text)
    before = ("…" if start else "") + content[start:at]
    after = content[end : end + _AROUND] + ("…" if end + _AROUND < len(content) else "")
    return _one_line(f"{before}{MATCH_START}{content[at:end]}{MATCH_END}{after}")


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"[#>|]+", " ", re.sub(r"[*`]+", "", text)).split())


class ChatStore(QObject):
    """Conversations on disk.  Every call returns at once; the caller makes the records, ids included.

    Signals, all emitted on the store's own thread affinity:
        foldered: tuple[Folder, ...]; always before `listed`.
        listed: tuple[Conversation, ...], most recently used first.
        loaded: Conversation, tuple[Message, ...], parents before children, and tuple[Picture, ...] and
            tuple[Attachment, ...] that are not sent.
        missing: id of a requested conversation that does not exist.
        found: the text searched for and tuple[SearchHit, ...].
        failed: one sentence: a search failed.
        documents_known: ids of all documents in chats, once, when the file is open.
        documents_gone: ids of documents that no chat has any more, as far as a deletion told.
        trouble: one sentence when writes are held up (they are kept and retried), "" when all are done.
        notice: one sentence shown once, such as that a damaged database was recovered.
    """

    foldered = Signal(object)
    listed = Signal(object)
    loaded = Signal(object, object, object, object)
    missing = Signal(str)
    found = Signal(str, object)
    failed = Signal(str)
    documents_known = Signal(object)
    documents_gone = Signal(object)
    trouble = Signal(str)
    notice = Signal(str)

    _delivery = Signal(object)

    def __init__(self, path: Path | None = None, parent: QObject | None = None, *, retry_s: float = RETRY_S) -> None:
        super().__init__(parent)
        self.path = path or data_dir() / FILE_NAME
        # The thread passes closures; this queued connection runs them on the window's thread.
        self._delivery.connect(self._deliver, Qt.ConnectionType.QueuedConnection)
        self._worker = StoreWorker(
            self.path,
            on_trouble=self._on_trouble,
            on_recovered=self._on_recovered,
            on_newer=self._on_newer,
            on_read_only=self._on_read_only,
            retry_s=retry_s,
        )
        self._left_out: set[str] = set()
        self.known_documents: set[str] | None = None
        """As `documents_known` told, if it has."""
        self._write(self._begin, self._on_begun)

    # --- conversations ---

    def list_conversations(self) -> None:
        """Request every folder and every conversation: `foldered`, `listed`."""
        self._read(ChatDatabase.folders, self.foldered.emit)
        self._read(ChatDatabase.conversations, self.listed.emit)

    def load(self, conversation_id: str) -> None:
        def run(database: ChatDatabase) -> _Loaded:
            return (
                database.conversation(conversation_id),
                database.messages(conversation_id),
                database.unsent_pictures(conversation_id),
                database.unsent_attachments(conversation_id),
            )

        def done(result: _Loaded) -> None:
            conversation, messages, pictures, attachments = result
            if conversation is None:
                self.missing.emit(conversation_id)
            else:
                self.loaded.emit(conversation, messages, pictures, attachments)

        self._read(run, done)

    def search(self, text: str) -> None:
        self._read(lambda database: search(database.connection, text), lambda hits: self.found.emit(text, hits))

    def leave_out(self, conversation_id: str) -> None:
        self._left_out.add(conversation_id)

    def leaves_out(self, conversation_id: str) -> bool:
        return conversation_id in self._left_out

    def take_in(self, conversation: Conversation, messages: Sequence[Message]) -> None:
        self._left_out.discard(conversation.id)
        self.create(conversation, messages)

    def create(self, conversation: Conversation, messages: Sequence[Message] = ()) -> None:
        self._write(lambda database: database.add_conversations([(conversation, messages)]), of=conversation.id)

    def change(self, conversation_id: str, **changes: Any) -> None:
        self._write(lambda database: database.change_conversation(conversation_id, changes), of=conversation_id)

    def set_unsent_pictures(self, conversation_id: str, pictures: Sequence[Picture]) -> None:
        self._write(lambda database: database.set_unsent_pictures(conversation_id, pictures), of=conversation_id)

    def delete(self, conversation_id: str) -> None:
        """Hide a conversation; `restore` undoes it until a later start purges it.  Its kept context is gone at once."""
        now = time.time()

        def run(database: ChatDatabase) -> set[str]:
            documents = database.documents_of(conversation_id)
            database.set_deleted(conversation_id, now)
            forget_chat(conversation_id)
            return documents - database.documents_of(live=True)

        self._write(run, self.documents_gone.emit)

    def restore(self, conversation_id: str) -> None:
        self._write(lambda database: database.set_deleted(conversation_id, None))

    # --- documents ---

    def set_unsent_attachments(self, conversation_id: str, attachments: Sequence[Attachment]) -> None:
        some = tuple(attachments)
        self._write(lambda database: database.set_unsent_attachments(conversation_id, some), of=conversation_id)

    def update_document(self, attachment: Attachment, parts: Sequence[Part] | None = None) -> None:
        self._write(lambda database: database.update_document(attachment, parts))

    def set_sources(self, answer: Message) -> None:
        self._write(lambda database: database.set_sources(answer), of=answer.conversation_id)

    def set_steps(self, answer: Message) -> None:
        self._write(lambda database: database.set_steps(answer), of=answer.conversation_id)

    def document_parts(self, document_id: str, timeout_s: float = CLOSE_S) -> tuple[Part, ...]:
        """The text of a document; waits for the store, so not for the window's thread."""
        found: list[tuple[Part, ...]] = []
        came = threading.Event()

        def done(parts: tuple[Part, ...]) -> None:
            found.append(parts)
            came.set()

        self._worker.submit(
            Job(lambda database: database.document_parts(document_id), done, lambda _error: came.set(), writes=False)
        )
        came.wait(timeout_s)
        return found[0] if found else ()

    # --- folders ---

    def put_folder(self, folder: Folder) -> None:
        self._write(lambda database: database.put_folder(folder))

    def remove_folder(self, folder_id: str) -> None:
        self._write(lambda database: database.remove_folder(folder_id))

    # --- messages ---

    def add_message(self, message: Message) -> None:
        self.add_messages([message])

    def add_messages(self, messages: Sequence[Message]) -> None:
        added = tuple(each for each in messages if not self.leaves_out(each.conversation_id))
        self._write(lambda database: database.add_messages(added))

    def remove_messages(self, message_ids: Sequence[str]) -> None:
        ids = tuple(message_ids)
        self._write(lambda database: database.remove_messages(ids))

    def set_fold(self, message_id: str, fold: Fold | None) -> None:
        self._write(lambda database: database.set_fold(message_id, fold))

    def set_message_deleted(self, message_id: str, at: float | None) -> None:
        self._write(lambda database: database.set_message_deleted(message_id, at))

    def update_message(self, message: Message) -> None:
        self._write(lambda database: database.update_message(message), of=message.conversation_id)

    def save_step(self, message: Message) -> None:
        """Save an answer's progress.  A newer step replaces one that has not been written yet."""
        if self.leaves_out(message.conversation_id):
            return
        self._worker.submit(Job(lambda database: database.save_step(message), replaces=message.id))

    def choose(self, message_id: str) -> None:
        self._write(lambda database: database.choose(message_id))

    # --- files ---

    def ask(self, run: Callable[[ChatDatabase], T], *, writes: bool = False) -> Future[T]:
        """Runs on the store's thread, in its turn; for threads that may wait, which this one must not.

        A result is never there if the store closes first.
        """
        future: Future[T] = Future()
        self._worker.submit(Job(run, future.set_result, future.set_exception, writes))
        return future

    def first_words_after(self, times: Sequence[float]) -> list[str]:
        """What was asked first after each of these times (newest first, seconds since 1970), in a few words.

        Empty for one after which nothing was asked before the next, or of which the chat is gone; also if the store is
        busy.  Waits for the store: not for the window's thread.
        """
        between = list(zip(times, [float("inf"), *times], strict=False))
        try:
            asked = self.ask(lambda database: database.asked_since(min(times))).result(_WORDS_S)
        except (EngineError, OSError, sqlite3.Error, TimeoutError):
            asked = []
        words = [next((_one_line(text) for at, text in asked if begin <= at < end), "") for begin, end in between]
        return [f"{text[:_WORDS].rstrip()}…" if len(text) > _WORDS else text for text in words]

    # --- end ---

    @property
    def unsaved(self) -> int:
        return self._worker.unsaved()

    def flush(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until the queue is empty; False on timeout.  For tests and for closing."""
        return self._worker.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> int:
        """Write what is queued and close the file; returns how many writes failed.  Safe to call again."""
        return self._worker.close(timeout_s)

    # --- on the thread, and from it ---

    def _begin(self, database: ChatDatabase) -> set[str] | None:
        database.end_interrupted(self._interrupted())
        database.purge()
        if not database.is_on_disk:  # the file's chats, which a newer version may have written, are unknown
            return None
        forget_other_chats(database.ids())
        return database.documents_of(live=True)

    def _on_begun(self, known: set[str] | None) -> None:
        if known is not None:
            self.known_documents = known
            self.documents_known.emit(known)

    def _write(
        self, run: Callable[[ChatDatabase], Any], done: Callable[[Any], None] | None = None, *, of: str = ""
    ) -> None:
        """`of`: the conversation that it is about; nothing is written of one that is left out."""
        if not self.leaves_out(of):
            self._submit(run, done, writes=True)

    def _read(self, run: Callable[[ChatDatabase], Any], done: Callable[[Any], None]) -> None:
        self._submit(run, done, writes=False)

    def _submit(self, run: Callable[[ChatDatabase], Any], done: Callable[[Any], None] | None, *, writes: bool) -> None:
        def deliver(result: Any) -> None:
            if done is not None:
                self._delivery.emit(lambda: done(result))

        self._worker.submit(Job(run, deliver, self._on_failed, writes))

    def _deliver(self, call: Callable[[], None]) -> None:
        call()

    def _emit_later(self, signal: SignalInstance, sentence: str) -> None:
        self._delivery.emit(lambda: signal.emit(sentence))

    def _on_failed(self, error: EngineError) -> None:
        self._emit_later(self.failed, error.message)

    def _on_newer(self) -> None:
        sentence = self.tr(
            "The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost "
            "when the window closes: update Switchyard first."
        )
        self._emit_later(self.notice, sentence.format(path=self.path))

    def _on_read_only(self) -> None:
        sentence = self.tr(
            "{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost "
            "when the window closes. Make the folder writable and restart Switchyard."
        )
        self._emit_later(self.notice, sentence.format(folder=self.path.parent))

    def _on_recovered(self, recovery: Recovery) -> None:
        if recovery.lost:
            sentence = self.tr(
                "The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: "
                "{lost}. The damaged file is kept as {path}."
            )
        elif recovery.messages:
            sentence = self.tr(
                "The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); "
                "no message seems to be missing. The damaged file is kept as {path}."
            )
        else:
            sentence = self.tr(
                "The chat database was damaged and no message could be read from it. The damaged file is kept as "
                "{path}."
            )
        self._emit_later(
            self.notice,
            sentence.format(
                conversations=recovery.conversations,
                messages=recovery.messages,
                lost=recovery.lost,
                path=recovery.kept_as,
            ),
        )

    def _on_trouble(self, error: Exception | None) -> None:
        self._emit_later(self.trouble, "" if error is None else self._trouble_sentence(error))

    def _trouble_sentence(self, error: Exception) -> str:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == errno.ENOSPC:
            text = self.tr("The disk is full, so new text is not saved: free some space on the disk of {folder}.")
        elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            text = self.tr("Another program is using the chats in {folder}, so new text is not saved: close it.")
        else:
            text = self.tr("Chats cannot be saved in {folder} ({why}): check that it can be written to.")
        return text.format(folder=self.path.parent, why=error)

    def _interrupted(self) -> str:
        return self.tr("Switchyard closed during this answer.")
