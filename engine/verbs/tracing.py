"""`--trace FILE`: a timeline of a command, for a trace viewer or a spreadsheet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile
from engine.verbs.output import note

if TYPE_CHECKING:
    from engine.runtime.engine import Engine
    from engine.telemetry.records import Records


@contextmanager
def traced(engine: Engine, path: Path | None) -> Iterator[None]:
    """If `path` is given, records the block and writes it there: a table of spans (`.csv`), otherwise a trace.

    Raises:
        EngineError: `INVALID_REQUEST`, if it cannot be written.
    """
    if path is None:
        yield
        return
    from engine.telemetry.trace_export import collected

    telemetry, info = engine.telemetry, engine.info
    if telemetry is not None:
        telemetry.start()
    try:
        with collected() as collection:
            yield
    finally:
        if telemetry is not None:
            telemetry.stop()
    about = {"model": info.name, "device": info.device, "precision": info.precision} if info is not None else {}
    write_timeline(collection.spans, collection.steps, path, about, lost=collection.dropped)


def write_timeline(spans: Records, steps: Records, path: Path, about: dict[str, str], *, lost: int = 0) -> None:
    """Writes spans, as a table if the path ends in `.csv`, otherwise as a trace, and notes it on stderr.

    Args:
        lost: number of dropped spans.

    Raises:
        EngineError: `INVALID_REQUEST`, if it cannot be written.
    """
    from engine.telemetry.trace_export import write_spans, write_trace

    table = path.suffix.lower() == ".csv"
    try:
        if table:
            with NewFile(path) as new:
                with new.path.open("w", encoding="utf-8", newline="") as file:
                    write_spans(spans, file)
                new.take_place()
        else:
            write_trace(spans, steps, path, about)
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"Cannot write the trace to {path}: {error.strerror or error}."
        ) from error
    viewer = "" if table else ", for ui.perfetto.dev or chrome://tracing"
    note(f"switchyard: wrote {len(spans):,} spans to {path}{viewer}" + (f"; {lost:,} more were lost" if lost else ""))
