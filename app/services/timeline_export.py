"""Exports the visible range: as a trace for Perfetto and Chrome, or as tables."""

from __future__ import annotations

from pathlib import Path

from app.services.history.history import History
from engine.common.files import NewFile
from engine.telemetry.records import Records
from engine.telemetry.trace_export import write_spans, write_steps, write_trace

PATIENCE_NS = 3_600_000_000_000


def export_trace(history: History, path: Path, about: dict[str, str]) -> int:
    """All spans that are kept singly, as Chrome trace JSON; returns how many.

    Raises:
        OSError: it cannot be written.
    """
    spans, steps = _all(history)
    write_trace(spans, steps, path, about)
    return len(spans)


def export_tables(history: History, path: Path) -> int:
    """Spans to `path`, steps to a file beside it, as CSV; returns the number of spans.

    Raises:
        OSError: they cannot be written.
    """
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
