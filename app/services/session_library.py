"""Recorded sessions: the list, and reading one as a history."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.services.history.history import MOST_SPAN_NS, History
from engine.common.errors import EngineError
from engine.common.files import NewFile
from engine.common.plain_text import plain_line
from engine.protocol import CacheReport, ExpertMap, RequestPlace, decode
from engine.telemetry.records import Records
from engine.telemetry.session_file import RecordedSession, list_sessions, model_of, read_session
from engine.telemetry.trace_export import write_spans, write_steps, write_trace

PATIENCE_NS = 3_600_000_000_000


def export_trace(history: History, path: Path, about: dict[str, str]) -> int:
    """All spans that are kept singly, as Chrome trace JSON; returns how many."""
    spans, steps = _all(history)
    write_trace(spans, steps, path, about)
    return len(spans)


def export_tables(history: History, path: Path) -> int:
    """Spans to `path`, steps to a file beside it, as CSV; returns the number of spans."""
    spans, steps = _all(history)
    with NewFile(path) as new_spans, NewFile(path.with_name(f"{path.stem}-steps{path.suffix}")) as new_steps:
        with new_spans.path.open("w", encoding="utf-8", newline="") as file:
            write_spans(spans, file)
        with new_steps.path.open("w", encoding="utf-8", newline="") as file:
            write_steps(steps, file)
        new_spans.take_place()
        new_steps.take_place()
    return len(spans)


def _all(history: History) -> tuple[Records, Records]:
    start, end = history.start_ns or 0, (history.end_ns or 0) + 1
    return history.spans_between(start - PATIENCE_NS, end), history.steps_between(start - PATIENCE_NS, end)


_PIECE = 2**15
_LONGEST_PLACE = 40
"""Characters of a server's name."""
_GAP_NS = 60_000_000_000
OPENED_SPANS = 2**21
"""Kept singly of an opened session: 113 MB; older ones are shown as sums."""


@dataclass(frozen=True)
class SessionEntry:
    """A session in the list."""

    name: str
    paths: tuple[Path, ...]
    nbytes: int
    started_s: float
    model: str = ""


@dataclass
class OpenedSession:
    """A session that has been read."""

    name: str
    about: dict[str, Any]
    history: History
    recorded: RecordedSession
    maps: list[tuple[int, ExpertMap]]
    reports: list[tuple[int, CacheReport]]


def sessions_in(folder: Path) -> list[SessionEntry]:
    entries = []
    for name, paths in list_sessions(folder).items():
        try:
            nbytes = sum(path.stat().st_size for path in paths)
            started = time.mktime(time.strptime(name[:15], "%Y%m%d-%H%M%S")) - time.timezone
        except (OSError, ValueError, OverflowError):
            continue
        entries.append(SessionEntry(name, tuple(paths), nbytes, started, plain_line(model_of(paths[0]))))
    return entries[::-1]


def open_session(entry: SessionEntry) -> OpenedSession:
    """Reads a session; takes seconds for a long one: not for the GUI thread.

    Raises:
        EngineError: it is not a session, or cannot be read.
    """
    recorded = read_session(list(entry.paths))
    history = History(most_spans=OPENED_SPANS, most_steps=2**18)
    for spans in _pieces(recorded.spans):
        history.add_spans(spans)
    for steps in _pieces(recorded.steps):
        history.add_steps(steps)
    maps: list[tuple[int, ExpertMap]] = []
    reports: list[tuple[int, CacheReport]] = []
    for kind, at_ns, content in recorded.notes:
        if kind == "machine":
            history.add_gauges(at_ns, {name: value for name, value in content.items() if _is_number(value)})
            continue
        names = {"experts": "ExpertMap", "cache": "CacheReport", "place": "RequestPlace"}
        message = _message(names.get(kind, ""), content)
        if isinstance(message, ExpertMap):
            maps.append((at_ns, message))
        elif isinstance(message, CacheReport):
            reports.append((at_ns, message))
        elif isinstance(message, RequestPlace):
            history.places[message.number] = plain_line(message.place)[:_LONGEST_PLACE]
    return OpenedSession(entry.name, recorded.about, history, recorded, maps, reports)


def _pieces(records: Records) -> list[Records]:
    sound = (records["end_ns"] >= records["start_ns"]) & (records["start_ns"] >= 0)
    sound &= records["end_ns"] - np.maximum(records["start_ns"], 0) < MOST_SPAN_NS
    records = records[sound]
    records = records[np.argsort(records["start_ns"], kind="stable")]
    gaps = np.flatnonzero(np.diff(records["start_ns"]) > _GAP_NS) + 1
    borders = sorted({0, len(records), *gaps.tolist(), *range(0, len(records), _PIECE)})
    return [records[first:last] for first, last in itertools.pairwise(borders)]


def _message(name: str, content: dict[str, Any]) -> object:
    try:
        return decode(json.dumps({"type": name, **content}).encode())
    except (EngineError, ValueError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
