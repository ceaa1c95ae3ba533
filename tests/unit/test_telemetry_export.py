"""Traces that viewers take, tables that spreadsheets take."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
from hypothesis import given

from engine.telemetry.lanes import DISK, GPU
from engine.telemetry.records import Records, no_spans, no_steps
from engine.telemetry.trace_export import trace_events, write_spans, write_steps, write_trace
from tests.unit.recorded import span, spans, steps
from tests.unit.trace_format import check_trace

STEPS = steps((0, 5000), (5000, 9000), hits=3, on_cpu=1, h2d_bytes=70)


@given(spans())
def test_any_spans_make_a_valid_trace(records: Records) -> None:
    events = list(trace_events(records, STEPS))
    check_trace({"displayTimeUnit": "ms", "traceEvents": json.loads(json.dumps(events))})
    shown = [event for event in events if event["ph"] in "Xb"]
    assert len(shown) == len(records)
    assert sum(event["args"].get("bytes", 0) for event in shown) == int(records["nbytes"].sum())


def test_what_overlaps_is_asynchronous_and_what_nests_is_not() -> None:
    records = np.array([span(DISK, 0, 10), span(DISK, 5, 15), span(GPU, 0, 10), span(GPU, 2, 8), span(GPU, 10, 12)])
    kinds = [(event["cat"], event["ph"]) for event in trace_events(records, no_steps()) if event["ph"] in "Xb"]
    assert sorted(kinds) == [("disk", "X"), ("disk", "b"), ("gpu", "X"), ("gpu", "X"), ("gpu", "X")]


def test_a_trace_is_a_file_of_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(np.array([span(GPU, 7, 9)]), STEPS, path, {"model": "m"})
    document = json.loads(path.read_text(encoding="utf-8"))
    check_trace(document)
    assert document["otherData"] == {"model": "m"}
    counted = [event["args"] for event in document["traceEvents"] if event["ph"] == "C" and "hits" in event["args"]]
    assert counted == [{"hits": 3, "fetched": 0, "on_cpu": 1}] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_nothing_recorded_is_a_valid_trace_too(tmp_path: Path) -> None:
    write_trace(no_spans(), no_steps(), tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))


@given(spans())
def test_tables_have_a_row_for_each(records: Records) -> None:
    table = io.StringIO()
    write_spans(records, table)
    rows = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert sorted(int(row["start_ns"]) for row in rows) == [int(row["start_ns"]) for row in rows]
    assert sum(int(row["nbytes"]) for row in rows) == int(records["nbytes"].sum())
    table = io.StringIO()
    write_steps(STEPS, table)
    assert [row["hits"] for row in csv.DictReader(io.StringIO(table.getvalue()))] == ["3", "3"]
