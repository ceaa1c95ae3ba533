"""Writes recordings to the size-limited ring of sessions on disk, while the user allows it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.protocol import CacheReport, ExpertMap, RequestPlace
from engine.telemetry.records import Records
from engine.telemetry.session_file import SessionWriter

_log = logging.getLogger("switchyard.recording")

SAMPLE_EVERY_NS = 1_000_000_000
MAP_EVERY_NS = 5_000_000_000
REPORT_EVERY_NS = 5_000_000_000


class SessionRecording:
    """One session per loaded model, and one of what other servers answer before there is any; its file is created with
    the first data after `begin`.

    Nothing here raises: on a full disk the recording ends, and `problem` is called with one sentence.
    """

    def __init__(self, folder: Path, problem: Callable[[str], None]) -> None:
        self._folder, self._problem = folder, problem
        self._about: dict[str, Any] | None = None
        self._writer: SessionWriter | None = None
        self._due_ns: dict[str, int] = {}
        self._clock: tuple[int, float] | None = None
        self._failed = False
        self.is_on = True

    @property
    def name(self) -> str:
        return self._writer.name if self._writer is not None else ""

    def begin(self, about: dict[str, Any]) -> None:
        self.end()
        self._about, self._failed = about, False

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._clock, self._due_ns = None, None, {}

    def clock(self, clock_ns: int, wall_s: float) -> None:
        if self._clock is None or abs((clock_ns - self._clock[0]) / 1e9 - (wall_s - self._clock[1])) > 0.5:
            self._clock = clock_ns, wall_s
            if self._writer is not None:
                self._do(lambda writer: writer.clock(clock_ns, wall_s))

    def spans(self, spans: Records) -> None:
        if len(spans):
            self._do(lambda writer: writer.spans(spans))

    def steps(self, steps: Records) -> None:
        if len(steps):
            self._do(lambda writer: writer.steps(steps))

    def sample(self, at_ns: int, gauges: dict[str, float | None]) -> None:
        if self._writer is not None and self._is_due("machine", at_ns, SAMPLE_EVERY_NS):
            self._do(lambda writer: writer.note("machine", at_ns, gauges))

    def report(self, at_ns: int, report: CacheReport) -> None:
        if self._writer is not None and self._is_due("cache", at_ns, REPORT_EVERY_NS):
            self._do(lambda writer: writer.note("cache", at_ns, dataclasses.asdict(report)))

    def expert_map(self, at_ns: int, experts: ExpertMap) -> None:
        if self._writer is not None and self._is_due("experts", at_ns, MAP_EVERY_NS):
            self._do(lambda writer: writer.note("experts", at_ns, dataclasses.asdict(experts)))

    def place(self, at_ns: int, place: RequestPlace) -> None:
        """Which server answers a request, as a note that readers without servers' names pass over."""
        self._do(lambda writer: writer.note("place", at_ns, dataclasses.asdict(place)))

    def _is_due(self, kind: str, at_ns: int, every_ns: int) -> bool:
        due = at_ns >= self._due_ns.get(kind, 0)
        if due:
            self._due_ns[kind] = at_ns + every_ns
        return due

    def _do(self, write: Callable[[SessionWriter], None]) -> None:
        if not self.is_on or self._failed or self._about is None:
            return
        try:
            if self._writer is None:
                self._writer = SessionWriter(self._folder, self._about)
                if self._clock is not None:
                    self._writer.clock(*self._clock)
            write(self._writer)
        except OSError as error:
            _log.warning("the recording has ended: %s", type(error).__name__)
            self.end()
            self._failed = True
            self._problem(error.strerror or type(error).__name__)
