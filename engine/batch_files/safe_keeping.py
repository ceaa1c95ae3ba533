"""Answers on their way to the journal: a full disk delays them, and loses none."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.batch_files.answer import Answer
from engine.batch_files.journal import Journal
from engine.errors import EngineError, ErrorCode

_FLUSH_S = 0.5
_MOST_WAITING = 64
_RETRY_S = 1.0


class SafeKeeping:
    """Writes answers in groups, each put safely on the disk.

    Args:
        on_blocked: told the reason each time a write has to wait, and "" when it went on.
        cancelled: asked while waiting.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        on_blocked: Callable[[str], None],
        cancelled: Callable[[], bool],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._on_blocked = on_blocked
        self._cancelled = cancelled
        self._sleep, self._clock = sleep, clock
        self._waiting: list[Answer] = []
        self._flushed_s = clock()

    def keep(self, answer: Answer) -> None:
        """Takes one answer; returns when there is room for the next."""
        self._waiting.append(answer)
        if len(self._waiting) >= _MOST_WAITING or self._clock() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Everything taken so far is on the disk when this returns, or the caller has cancelled.

        Raises:
            EngineError: the journal cannot be written for another reason than a full disk.
        """
        blocked = False
        while self._waiting:
            try:
                self._journal.record(self._waiting)
            except EngineError as error:
                if error.code != ErrorCode.DISK_FULL:
                    raise
                blocked = True
                self._on_blocked(error.message)
                if self._cancelled():
                    return  # they are asked again at the next resume
                self._sleep(_RETRY_S)
                continue
            self._waiting.clear()
        self._flushed_s = self._clock()
        if blocked:
            self._on_blocked("")
