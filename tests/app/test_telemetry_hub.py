"""What comes from the engine and from the sensors is kept on one thread, whatever the others are doing meanwhile."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from pytestqt.qtbot import QtBot

from app.services import analyser, telemetry_hub
from app.services.analyser import Findings, Machine, Stretch
from app.services.history.history import History
from app.services.session_library import open_session, sessions_in
from app.services.session_recording import SessionRecording
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.views.monitor.page import session_words
from app.widgets.timeline.picture import request_label
from engine.common.paths import sessions_dir
from engine.protocol import RequestPlace, TelemetryCounters, TelemetrySpans
from engine.telemetry.analysis import Waiting
from engine.telemetry.lanes import WRITTEN_ELSEWHERE
from engine.telemetry.recorder import Recorder
from engine.telemetry.records import pack
from tests.app.cache_reports import report
from tests.app.recorded import expert_map, steady_devices
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
    monkeypatch.setattr(telemetry_hub, "MOST_WAITING", 20)
    engine.recorded.emit(report())
    empty = TelemetryCounters(0, pack(np.zeros(0, np.uint8)), 0)
    for _ in range(20 + 7):
        engine.recorded.emit(empty)
    assert hub.recorder.dropped >= 7
    slow_disk.set()
    qtbot.waitUntil(lambda: hub.recorder.waiting == 0, timeout=20_000)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_recorded_session_says_which_server_answered(
    engine: WatchedEngine, settings: Settings, qtbot: QtBot, *, is_loaded: bool
) -> None:
    if not is_loaded:
        engine.model = None  # nor is one ever loaded by who asks other servers alone
    hub = TelemetryHub(engine, settings, steady_devices())  # type: ignore[arg-type]
    hub.start()
    now = time.perf_counter_ns()
    telemetry_hub = Recorder()
    for number, place in ((3, "Rack"), (4, "Cellar")):
        engine.recorded.emit(RequestPlace(number, place))
        telemetry_hub.request_did(WRITTEN_ELSEWHERE, now - 10**9, now, number, 7)
    spans = telemetry_hub.take_spans()
    engine.recorded.emit(TelemetrySpans(now, time.time(), len(spans), pack(spans), 0))
    qtbot.waitUntil(lambda: hub.history is not None and len(hub.history.requests_between(0, 2**62)) > 0, timeout=20_000)
    assert hub.history.places == {3: "Rack", 4: "Cellar"}  # though they were told before the history was there
    hub.close()
    hub.deleteLater()
    (entry,) = sessions_in(sessions_dir())
    session = open_session(entry)
    written = session.history.requests_between(*spans_range(session.history))
    labels = [request_label(span, session.history.places) for span in written]
    assert sorted(labels) == ["written at Cellar ×7", "written at Rack ×7"]
    assert session_words(session) == ("Starter · cpu · bf16" if is_loaded else "Rack · Cellar")
    assert session.history.copy().places == session.history.places


def spans_range(history: History) -> tuple[int, int]:
    assert history.start_ns is not None
    assert history.end_ns is not None
    return history.start_ns, history.end_ns + 1
