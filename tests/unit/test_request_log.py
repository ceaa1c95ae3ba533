"""What a request does is recorded as spans without gaps, whatever its lengths."""

import pytest

from engine.common import clock
from engine.telemetry import recorder as request_log
from engine.telemetry.analysis import critical_path, lane_seconds, waiting
from engine.telemetry.lanes import KEPT_DISK, KEPT_RAM, QUEUED, READING, REQUESTS, WRITING, lane_name
from engine.telemetry.recorder import Recorder, RequestLog
from engine.telemetry.records import no_steps


def test_its_phases_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    recorder.start()
    log, other = RequestLog(recorder), RequestLog(recorder)
    log.reads(30)
    log.has_written(1)
    monkeypatch.setattr(request_log, "PIECE_NS", 0)
    log.has_written(4)
    log.has_written(6)
    log.ends()
    other.reads(5)
    spans = recorder.take_spans()
    mine = spans[spans["request"] == spans["request"][0]]
    assert set(spans["lane"].tolist()) == {REQUESTS}
    assert mine["name"].tolist() == [QUEUED, READING, WRITING, WRITING, WRITING]
    assert mine["count"].tolist() == [0, 30, 4, 2, 0]
    assert mine["start_ns"][1:].tolist() == mine["end_ns"][:-1].tolist()
    assert len(spans) == len(mine) + 1
    assert lane_name(REQUESTS) == "requests"


def test_what_was_kept_of_its_prompt_stands_before_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1.0]
    monkeypatch.setattr(clock, "now_ns", lambda: round(now_s[0] * 1e9))
    recorder = Recorder()
    recorder.start()
    log = RequestLog(recorder)
    now_s[0] = 3.0
    log.reuses(64, 192, 1.0)
    log.reuses(0, 0, 1.0)
    log.reads(30)
    now_s[0] = 4.0
    log.ends()
    spans = recorder.take_spans()
    assert spans["name"].tolist() == [QUEUED, KEPT_RAM, KEPT_DISK, QUEUED, READING]
    assert spans["count"].tolist() == [0, 64, 192, 0, 30]
    assert (spans["end_ns"] / 1e9).tolist() == [2.0, 2.25, 3.0, 3.0, 4.0]


def test_nothing_waits_for_what_requests_do() -> None:
    recorder = Recorder()
    recorder.start()
    log = RequestLog(recorder)
    log.reads(3)
    log.ends()
    spans = recorder.take_spans()
    start, end = int(spans["start_ns"].min()), int(spans["end_ns"].max())
    assert [piece.span for piece in critical_path(spans, start, end + 1)] == [-1]
    assert lane_seconds(spans, start, end) == {}
    assert waiting(spans, no_steps()).tokens == 0


def test_nothing_is_recorded_while_it_is_off() -> None:
    recorder = Recorder()
    log = RequestLog(recorder)
    log.reads(3)
    log.has_written(1)
    log.ends()
    assert len(recorder.take_spans()) == 0
