"""What one request does: it waits, its prompt is read, its answer is written; or a job: its rows are answered."""

from __future__ import annotations

import itertools
import time

from engine.telemetry.lanes import JOB, QUEUED, READING, WRITING
from engine.telemetry.recorder import RECORDER, Recorder

PIECE_NS = 500_000_000
"""A long phase is recorded in pieces of about this length, so that it can be seen while it lasts."""
_numbers = itertools.count(1)


class RequestLog:
    """Follows a request from now on; costs next to nothing while nothing is recorded."""

    def __init__(self, recorder: Recorder = RECORDER) -> None:
        self._recorder = recorder
        self._number = next(_numbers)
        self._name, self._since_ns, self._tokens, self._told = QUEUED, time.perf_counter_ns(), 0, 0

    def reads(self, tokens: int) -> None:
        """It is its turn: a prompt of so many tokens is read."""
        self._end()
        self._name, self._tokens = READING, tokens

    def has_written(self, tokens: int) -> None:
        """So many tokens of the answer are there."""
        if self._name != WRITING:
            self._end()
            self._name, self._tokens, self._told = WRITING, 0, 0
        self._tokens = tokens
        if time.perf_counter_ns() - self._since_ns >= PIECE_NS:
            self._end()

    def has_answered(self, tokens: int) -> None:
        """For a job: its rows have so many tokens of answers."""
        if self._name != JOB:
            self._end()
            self._name, self._tokens, self._told = JOB, 0, 0
        self._tokens = tokens
        if time.perf_counter_ns() - self._since_ns >= PIECE_NS:
            self._end()

    def ends(self) -> None:
        """It is over, however it ended."""
        self._end()

    def _end(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._recorder.on:
            tokens = self._tokens - self._told if self._name in (WRITING, JOB) else self._tokens
            self._recorder.request_did(self._name, self._since_ns, now_ns, self._number, tokens)
        self._since_ns, self._told = now_ns, self._tokens
