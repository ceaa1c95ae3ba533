"""The one thread that accesses the chat database, and its queue.

Jobs run in order.  A write that fails for now (disk full, locked, gone) stays at the head of the queue and is
retried; reads overtake it.  A damaged database is recovered when it is found.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.recovery import Recovery, can_be_written, open_checked, open_copy, recover
from app.services.chat_store.schema import NewerDatabaseError, connect, is_damage, migrate
from engine.common.errors import EngineError, ErrorCode

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
    """Runs jobs on its own thread.

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
