"""Recorded spans as a trace for Perfetto and Chrome, and as tables.

The trace event format: one process, a track per lane and device. Strictly nested spans are complete events (`X`); lanes
with overlapping work, such as disk reads and concurrent copies, use asynchronous ones (`b`, `e`), which a viewer
stacks. Counters (`C`) are per step. No text of a conversation is included.
"""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from engine.common.files import NewFile
from engine.common.lanes import TRACKS
from engine.telemetry.lanes import ALL_LANES, GRAPH, PHASE, lane_name, span_name
from engine.telemetry.recorder import RECORDER
from engine.telemetry.records import COUNTERS, Records, no_spans, no_steps

_PID = 1
_COUNTED = {
    "experts": ("hits", "fetched", "on_cpu"),
    "experts in RAM": ("ram_hits", "ram_late", "ram_misses"),
    "bytes": ("h2d_bytes", "d2h_bytes", "disk_bytes"),
}


def write_trace(spans: Records, steps: Records, path: Path, about: dict[str, str] | None = None) -> None:
    """Writes a trace as JSON, atomically.

    Args:
        about: metadata shown by the viewer: the model, the machine.
    """
    with NewFile(path) as new:
        with new.path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","otherData":')
            json.dump(about or {}, file)
            file.write(',"traceEvents":[\n')
            separator = ""
            for event in trace_events(spans, steps):
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
            file.write("\n]}\n")
        new.take_place()


def trace_events(spans: Records, steps: Records) -> Iterator[dict[str, Any]]:
    """The events, track names first; times are microseconds since the first span."""
    yield {"ph": "M", "pid": _PID, "tid": 0, "name": "process_name", "args": {"name": "Switchyard"}}
    firsts = [int(each["start_ns"].min()) for each in (spans, steps) if len(each)]
    if not firsts:
        return
    begin_ns = min(firsts)
    # Token marks are on the track of phases, whether it has spans or not.
    for lane, device in sorted({(PHASE, 0), *np.unique(spans[["lane", "device"]]).tolist()}):
        track = spans[(spans["lane"] == lane) & (spans["device"] == device)]
        tid = _tid(lane, device)
        name = lane_name(lane) if device == 0 else f"{lane_name(lane)} {device}"
        yield {"ph": "M", "pid": _PID, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        yield from _track(track, tid, name, begin_ns)
    yield from _token_marks(steps, begin_ns)
    yield from _counters(steps, begin_ns)


def write_spans(spans: Records, file: TextIO) -> None:
    """One row per span, sorted by start; times in nanoseconds of the engine's clock."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ("lane", "device", "name", "start_ns", "end_ns", "request", "step", "layer", "expert", "count", "nbytes")
    )
    for span in np.sort(spans, order=("start_ns", "end_ns")):
        numbers = (int(span[field]) for field in ("request", "step", "layer", "expert", "count", "nbytes"))
        name = lane_name(int(span["lane"])), int(span["device"]), span_name(int(span["name"]))
        writer.writerow((*name, int(span["start_ns"]), int(span["end_ns"]), *numbers))


def write_steps(steps: Records, file: TextIO) -> None:
    """One row per step: its phase, times and counters."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("request", "step", "phase", "start_ns", "end_ns", "tokens", *COUNTERS))
    for step in steps:
        counted = (int(step[name]) for name in COUNTERS)
        times = int(step["start_ns"]), int(step["end_ns"]), int(step["tokens"])
        writer.writerow((int(step["request"]), int(step["step"]), span_name(int(step["name"])), *times, *counted))


def _tid(lane: int, device: int) -> int:
    return 1 + device * len(ALL_LANES) + lane


def _track(track: Records, tid: int, name: str, begin_ns: int) -> Iterator[dict[str, Any]]:
    # Of spans that start together the longest comes first: it contains the others.
    order = np.lexsort((-track["end_ns"], track["start_ns"]))
    open_until: list[int] = []
    for number, span in enumerate(track[order]):
        start_ns, end_ns = int(span["start_ns"]), max(int(span["end_ns"]), int(span["start_ns"]))
        while open_until and open_until[-1] <= start_ns:
            open_until.pop()
        event: dict[str, Any] = {"pid": _PID, "tid": tid, "cat": name, "name": span_name(int(span["name"]))}
        start, args = _micros(start_ns - begin_ns), {"args": _args(span)}
        if open_until and end_ns > open_until[-1]:
            both = {**event, "id": f"{tid}.{number}"}
            yield {**both, "ph": "b", "ts": start, **args}
            yield {**both, "ph": "e", "ts": _micros(end_ns - begin_ns)}
            continue
        open_until.append(end_ns)
        yield {**event, "ph": "X", "ts": start, "dur": _micros(end_ns - start_ns), **args}


def _args(span: np.void) -> dict[str, int]:
    fields = ("request", "step", "layer", "expert")
    shown = {field: int(span[field]) for field in fields if span[field] >= 0}
    lane = int(span["lane"])
    counts = TRACKS[lane].counts if 0 <= lane < len(TRACKS) else "experts"
    amount = "layers" if span["name"] == GRAPH else counts
    shown |= {amount: int(span["count"])} if span["count"] > 1 else {}
    return shown | ({"bytes": int(span["nbytes"])} if span["nbytes"] else {})


def _token_marks(steps: Records, begin_ns: int) -> Iterator[dict[str, Any]]:
    for step in steps:
        if step["tokens"] > 0 and span_name(int(step["name"])) in ("sample", "decode"):
            ts = _micros(int(step["end_ns"]) - begin_ns)
            yield {"ph": "i", "s": "t", "pid": _PID, "tid": _tid(PHASE, 0), "name": "token", "ts": ts}


def _counters(steps: Records, begin_ns: int) -> Iterator[dict[str, Any]]:
    shown = {title: names for title, names in _COUNTED.items() if any(steps[name].any() for name in names)}
    for step in steps:
        ts = _micros(int(step["end_ns"]) - begin_ns)
        for title, names in shown.items():
            yield {
                "ph": "C",
                "pid": _PID,
                "tid": 0,
                "name": title,
                "ts": ts,
                "args": {name: int(step[name]) for name in names},
            }


def _micros(nanoseconds: int) -> float:
    return nanoseconds / 1000


def joined(parts: Iterable[Records], empty: Records) -> Records:
    present = list(parts)
    return np.concatenate(present) if present else empty


_TAKE_S = 0.2


@dataclass
class Collection:
    """A collected recording.

    Attributes:
        spans, steps: complete once recording has ended.
        dropped: number of lost spans.
    """

    spans: Records = field(default_factory=no_spans)
    steps: Records = field(default_factory=no_steps)
    dropped: int = 0


@contextmanager
def collected() -> Iterator[Collection]:
    """Records inside the block; unfinished work is left out."""
    result, ending = Collection(), threading.Event()
    spans: list[Records] = []
    steps: list[Records] = []

    def take() -> None:
        spans.append(RECORDER.take_spans())
        steps.append(RECORDER.take_steps())

    def serve() -> None:
        while not ending.wait(_TAKE_S):
            take()

    thread = threading.Thread(target=serve, name="telemetry", daemon=True)
    RECORDER.start()
    thread.start()
    try:
        yield result
    finally:
        RECORDER.stop()
        ending.set()
        thread.join()
        take()
        result.spans, result.steps = joined(spans, no_spans()), joined(steps, no_steps())
        result.dropped = RECORDER.dropped_spans
