"""What one request does: it waits, its prompt is read, its answer is written; or a job: its rows are answered."""

from __future__ import annotations

import itertools

from engine.common import clock
from engine.telemetry.lanes import ELSEWHERE, JOB, KEPT_DISK, KEPT_RAM, QUEUED, READING, WRITING, WRITTEN_ELSEWHERE
from engine.telemetry.recorder import RECORDER, Recorder

PIECE_NS = 500_000_000
"""A long phase is recorded in pieces of about this length, so that it can be seen while it lasts."""
_numbers = itertools.count(1)


class RequestLog:
    """Follows a request from now on; costs next to nothing while nothing is recorded."""

    def __init__(self, recorder: Recorder = RECORDER, *, is_elsewhere: bool = False) -> None:
        """`is_elsewhere`: another server answers it, of whose doings only what comes from there is known."""
        self._recorder = recorder
        self._number = next(_numbers)
        self._waits, self._writes = (ELSEWHERE, WRITTEN_ELSEWHERE) if is_elsewhere else (QUEUED, WRITING)
        self._name, self._since_ns, self._tokens, self._told = self._waits, clock.now_ns(), 0, 0

    @property
    def number(self) -> int:
        return self._number

    def reads(self, tokens: int) -> None:
        """It is its turn: a prompt of so many tokens is read."""
        self._end()
        self._name, self._tokens = READING, tokens

    def reuses(self, from_ram: int, from_disk: int, seconds: float) -> None:
        """So many tokens of its prompt were brought from where they are kept, which took so long until now."""
        if not from_ram + from_disk:
            return
        now_ns = clock.now_ns()
        at_ns = max(self._since_ns, now_ns - round(seconds * 1e9))
        self._end(at_ns)
        for name, tokens in ((KEPT_RAM, from_ram), (KEPT_DISK, from_disk)):
            end_ns = at_ns + (now_ns - self._since_ns) * tokens // (from_ram + from_disk)
            if tokens and self._recorder.on:
                self._recorder.request_did(name, at_ns, end_ns, self._number, tokens)
            at_ns = end_ns
        self._since_ns = now_ns

    def has_written(self, tokens: int) -> None:
        if self._name != self._writes:
            self._end()
            self._name, self._tokens, self._told = self._writes, 0, 0
        self._tokens = tokens
        if clock.now_ns() - self._since_ns >= PIECE_NS:
            self._end()

    def has_answered(self, tokens: int) -> None:
        """For a job: its rows have so many tokens of answers."""
        if self._name != JOB:
            self._end()
            self._name, self._tokens, self._told = JOB, 0, 0
        self._tokens = tokens
        if clock.now_ns() - self._since_ns >= PIECE_NS:
            self._end()

    def ends(self) -> None:
        self._end()

    def _end(self, at_ns: int | None = None) -> None:
        now_ns = clock.now_ns() if at_ns is None else at_ns
        if self._recorder.on:
            tokens = self._tokens - self._told if self._name in (self._writes, JOB) else self._tokens
            self._recorder.request_did(self._name, self._since_ns, now_ns, self._number, tokens)
        self._since_ns, self._told = now_ns, self._tokens
