"""Requests as rows of the timeline."""

from __future__ import annotations

import numpy as np
from PySide6.QtGui import QFont

from app.services.history.history import History
from app.widgets.timeline.lanes import lanes_of, read_lane, reading
from app.widgets.timeline.navigator import Viewport
from app.widgets.timeline.picture import joined, lane_areas, read_rows, request_label, rows_of
from engine.telemetry.lanes import ELSEWHERE, QUEUED, READING, WRITING, WRITTEN_ELSEWHERE
from engine.telemetry.recorder import Recorder
from engine.telemetry.records import Records, no_spans

S = 1_000_000_000


def spans_of(*entries: tuple[int, int, float, float, int]) -> Records:
    """(request, name, start, end in seconds, tokens)."""
    recorder = Recorder()
    for request, name, start, end, tokens in entries:
        recorder.request_did(name, round(start * S), round(end * S), request, tokens)
    return recorder.take_spans()


TWO = spans_of(
    (7, QUEUED, 0, 1, 0),
    (7, READING, 1, 2, 30),
    (7, WRITING, 2, 2.5, 5),
    (7, WRITING, 2.5, 4, 10),
    (8, QUEUED, 1, 3, 0),
    (8, WRITING, 3, 4, 9),
    (9, WRITING, 5, 6, 1),
)


def test_what_another_server_answers_is_named_and_counted_with_the_others() -> None:
    spans = spans_of((3, ELSEWHERE, 0, 1, 0), (3, WRITTEN_ELSEWHERE, 1, 2, 7), (4, WRITING, 0, 2, 5))
    places = {3: "Rack"}
    labels = [request_label(span, places) for span in joined(spans)]
    assert labels == ["waiting for Rack", "written at Rack ×7", "writing ×5"]
    assert request_label(spans[0], {}) == "waiting elsewhere"
    history = History()
    history.add_spans(spans)
    written, _read, waiting, _jobs = history.requests(np.array([0.0, 1.0 * S, 2.0 * S])).tolist()
    assert (written, waiting) == ([1.0, 2.0], [1.0, 0.0])


def test_pieces_are_joined_and_each_request_keeps_a_row() -> None:
    whole = joined(TWO)
    assert whole["name"].tolist() == [QUEUED, READING, WRITING, QUEUED, WRITING, WRITING]
    assert whole["count"].tolist() == [0, 30, 15, 0, 9, 1]
    assert rows_of(whole) == [0, 0, 0, 1, 1, 0]  # the last one comes after both
    assert len(joined(no_spans())) == 0


def test_the_lane_counts_who_writes_reads_and_waits() -> None:
    history = History()
    assert "requests" not in [lane.key for lane in lanes_of(history, machine=False)]
    history.add_spans(TWO)
    counts = history.requests(np.array([0.0, S, 2 * S, 3 * S, 4 * S]))
    assert np.allclose(counts, [[0, 0, 1, 2], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]], atol=0.05)
    lane = next(lane for lane in lanes_of(history, machine=False) if lane.key == "requests")
    data = read_lane(lane, history, Viewport(0, 4 * S, 4), {})
    assert reading(lane, data, 3) == "2 writing"
    assert reading(lane, data, 1) == "1 reading, 1 waiting"
    copied = history.copy()
    assert len(copied.requests_between(0, 10 * S)) == len(TWO)


def test_sweeps_say_what_they_were_made_of(qapp: object) -> None:
    recorder = Recorder()
    recorder.start()
    recorder.swept(0, 8, 480)
    recorder.swept(0, 3, 0)
    recorder.swept(0, 0, 0, 64)
    spans = recorder.take_spans()
    assert spans["count"].tolist() == [8, 480, 3, 64]
    spans["start_ns"], spans["end_ns"] = (0, 0, S, S), (S, S, 2 * S, 2 * S)
    history = History()
    history.add_spans(spans)
    lane = next(lane for lane in lanes_of(history, machine=False) if lane.key == "sweeps")
    data = read_lane(lane, history, Viewport(0, 2 * S, 160), {})
    assert reading(lane, data, 0) == "8/s written, 480/s read"
    assert reading(lane, data, 159) == "3/s written, 64/s of jobs"
    rows = read_rows([lane], lane_areas([lane], 900, 300, QFont()), history, Viewport(0, 2 * S, 700), {})
    assert rows[0].blocks is not None


def test_rows_are_drawn_where_there_is_room_else_their_number(qapp: object) -> None:
    history = History()
    history.add_spans(TWO)
    lanes = lanes_of(history, machine=False)
    areas = lane_areas(lanes, 900, 600, QFont())
    for span, has_rows in ((6 * S, True), (600 * S, False)):
        rows = read_rows(lanes, areas, history, Viewport(0, span, 700), {})
        row = next(row for row in rows if row.lane.key == "requests")
        assert (row.blocks is not None) is has_rows
