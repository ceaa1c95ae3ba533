"""Buffers answers for the journal: a full disk delays them but loses none."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.batch_files.answer import Answer
from engine.batch_files.journal import Journal
from engine.common.errors import EngineError, ErrorCode

_FLUSH_S = 0.5
_MOST_WAITING = 64


class SafeKeeping:
    """Writes answers in groups, each flushed to disk. It never blocks: while it has a `problem`, its caller waits and
    starts no new rows.
    """

    def __init__(self, journal: Journal, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._waiting: list[Answer] = []
        self._flushed_s = clock()
        self.problem = ""
        """Why answers cannot be written, as a sentence; empty if they can."""

    @property
    def waiting(self) -> int:
        """Answers not yet on disk."""
        return len(self._waiting)

    def keep(self, answer: Answer) -> None:
        """Adds an answer, and writes the buffered ones when due.

        Raises:
            EngineError: the journal cannot be written, for a reason other than a full disk.
        """
        self._waiting.append(answer)
        due = len(self._waiting) >= _MOST_WAITING or self._clock() - self._flushed_s >= _FLUSH_S
        if due and not self.problem:
            self.flush()

    def flush(self) -> bool:
        """Writes all buffered answers; returns whether that worked; if not, `problem` says why.

        Raises:
            EngineError: the journal cannot be written, for a reason other than a full disk.
        """
        try:
            self._journal.record(self._waiting)
        except EngineError as error:
            if error.code != ErrorCode.DISK_FULL:
                raise
            self.problem = error.message
            return False
        self._waiting.clear()
        self.problem = ""
        self._flushed_s = self._clock()
        return True
