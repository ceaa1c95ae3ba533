"""What comes from the engine and from the sensors is kept on one thread, whatever the others are doing meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from pytestqt.qtbot import QtBot

from app.services import analyser, recorder
from app.services.analyser import Findings, Machine, Stretch
from app.services.recorder import Recorded
from app.services.session_recording import SessionRecording
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from engine.telemetry.analysis import Waiting
from engine.telemetry.messages import TelemetryCounters, TelemetrySpans
from engine.telemetry.records import pack
from tests.app.cache_reports import report
from tests.app.recorded import STEP_NS, decoded, expert_map, steady_devices
from tests.app.test_monitor_page import WatchedEngine, tell


@pytest.fixture
def engine(qapp: object) -> Iterator[WatchedEngine]:
    result = WatchedEngine()
    yield result
    result.deleteLater()


@pytest.fixture
def hub(engine: WatchedEngine, settings: Settings, qtbot: QtBot) -> Iterator[TelemetryHub]:
    result = TelemetryHub(engine, settings, steady_devices())  # type: ignore[arg-type]
    with qtbot.waitSignal(result.ready, timeout=20_000):
        result.start()
    yield result
    result.close()
    result.deleteLater()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, the recorder's thread hangs in writing a report."""
    goes_on = threading.Event()
    written = SessionRecording.report

    def report_later(self: SessionRecording, at_ns: int, said: object) -> None:
        goes_on.wait(60)
        written(self, at_ns, said)  # type: ignore[arg-type]

    monkeypatch.setattr(SessionRecording, "report", report_later)
    yield goes_on
    goes_on.set()


def test_a_report_that_is_still_being_recorded_does_not_come_back_after_the_engines_death(
    hub: TelemetryHub, engine: WatchedEngine, slow_disk: threading.Event, qtbot: QtBot
) -> None:
    engine.recorded.emit(report())
    engine.recorded.emit(expert_map())
    assert hub.report is not None
    assert hub.experts is not None
    engine.die()
    slow_disk.set()
    with qtbot.waitSignal(hub.recorder.recorded, timeout=20_000):
        tell(engine, 1)  # comes after all that was waiting
    assert hub.report is None
    assert hub.experts is None


def test_what_the_recorder_hands_over_cannot_be_changed(hub: TelemetryHub, engine: WatchedEngine, qtbot: QtBot) -> None:
    seen: list[Recorded] = []
    hub.recorder.recorded.connect(seen.append)
    now = time.perf_counter_ns() - 3_600_000_000_000  # a clock that is an hour slow: moments are moved
    spans, steps = decoded(3, now - 3 * STEP_NS)
    engine.recorded.emit(TelemetrySpans(now, 0.0, len(spans), pack(spans), 0))
    engine.recorded.emit(TelemetryCounters(len(steps), pack(steps), 0))
    qtbot.waitUntil(lambda: len(seen) == 2, timeout=20_000)
    assert seen[0].clock_jumped
    for records in (seen[0].spans, seen[1].steps):
        assert records is not None
        with pytest.raises(ValueError, match="read-only"):
            records["start_ns"] = 0


def test_the_window_goes_on_during_an_analysis(
    hub: TelemetryHub, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    goes_on, threads = threading.Event(), []
    analysed = analyser._findings

    def slow(stretch: Stretch, machine: Machine) -> Findings:
        threads.append(threading.current_thread())
        goes_on.wait(60)
        return analysed(stretch, machine)

    monkeypatch.setattr(analyser, "_findings", slow)
    page = object()
    hub.subscribe(page)
    tell(engine, 60)
    history = hub.history
    assert history is not None
    qtbot.waitUntil(lambda: len(history.last_steps(100)) == 60 and bool(threads), timeout=20_000)
    assert hub.findings is None
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        goes_on.set()
    assert isinstance(hub.findings, Findings)
    assert isinstance(hub.findings.waiting, Waiting)
    assert threading.main_thread() not in threads
    hub.unsubscribe(page)


def test_messages_that_nobody_has_time_for_are_counted(
    hub: TelemetryHub,
    engine: WatchedEngine,
    slow_disk: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    qtbot: QtBot,
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 20)
    engine.recorded.emit(report())
    empty = TelemetryCounters(0, pack(np.zeros(0, np.uint8)), 0)
    for _ in range(20 + 7):
        engine.recorded.emit(empty)
    assert hub.recorder.dropped >= 7
    slow_disk.set()
    qtbot.waitUntil(lambda: hub.recorder.waiting == 0, timeout=20_000)


def test_what_happened_before_the_history_was_there_is_marked_in_it(
    engine: WatchedEngine, settings: Settings, qtbot: QtBot
) -> None:
    hub = TelemetryHub(engine, settings, steady_devices())  # type: ignore[arg-type]
    with qtbot.waitSignal(hub.ready, timeout=20_000):
        hub.start()
        engine.die()
    assert hub.history is not None
    assert len(hub.history.marks_between(0, 2**62)) >= 1
    hub.close()
    hub.deleteLater()
