"""The Monitor page with an engine that says what the test wants: chats, batches, other programs, sessions on disk."""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QAbstractButton
from pytestqt.qtbot import QtBot

from app.models.cache_figures import token_figures
from app.services.analyser import waiting_for_last
from app.services.engine_client import EngineState
from app.services.history.history import History
from app.services.session_library import SessionEntry, open_session, sessions_in
from app.services.session_recording import SessionRecording
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.monitor.page import MonitorPage, session_title
from app.views.monitor.summary import advice_sentence, time_parts, waiting_words
from app.widgets.expert_map.data import draw_map, map_data
from app.widgets.expert_map.view import ExpertMapView
from app.widgets.timeline.strip import TimelineStrip
from engine.common.errors import EngineError
from engine.common.paths import sessions_dir
from engine.protocol import TelemetryCounters, TelemetrySpans
from engine.telemetry.analysis import OTHER, Waiting
from engine.telemetry.lanes import BATCH_STEP, PREFILL
from engine.telemetry.records import Records, pack
from engine.telemetry.session_file import SessionWriter
from engine.tuning.advice import Advice
from tests.app.recorded import STEP_NS, decoded, expert_map, sample, steady_devices
from tests.app.scripted_engine import STARTER
from tests.app.scripted_engine import ScriptedEngine as ChatEngine


class WatchedEngine(ChatEngine):
    """The chat page's engine, and what can be watched of it."""

    recorded = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[tuple[bool, bool]] = []

    def watch_telemetry(self, *, on: bool, expert_map: bool = False) -> None:
        self.watched.append((on, expert_map))

    def resize_cache(self, tier: str, slots: int) -> None:
        """Nothing is resized here."""


@pytest.fixture
def engine(qapp: object) -> Iterator[WatchedEngine]:
    result = WatchedEngine()
    yield result
    result.deleteLater()


@pytest.fixture
def hub(engine: WatchedEngine, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TelemetryHub]:
    # What else this machine does is told by its real sensors, and changes what is said.
    monkeypatch.setattr("app.services.analyser.others_between", lambda *_: 0.0)
    result = TelemetryHub(engine, settings, steady_devices())  # type: ignore[arg-type]
    yield result
    result.close()
    result.deleteLater()


@pytest.fixture
def page(qtbot: QtBot, engine: WatchedEngine, hub: TelemetryHub, settings: Settings) -> Iterator[MonitorPage]:
    settings.monitor_details = True
    result = MonitorPage(engine, hub, settings)  # type: ignore[arg-type]
    qtbot.addWidget(result)
    result.resize(1072, 800)
    with qtbot.waitSignal(hub.ready, timeout=20_000):
        result.show()
    yield result
    result.hide()
    result.close_down()


def tell(engine: WatchedEngine, steps: int = 60, *, on_device: bool = False) -> tuple[Records, Records]:
    """Lets the engine say that it has decoded until now."""
    now = time.perf_counter_ns()
    spans, made = decoded(steps, now - steps * STEP_NS, on_device=on_device)
    engine.recorded.emit(TelemetrySpans(now, time.time(), len(spans), pack(spans), 0))
    engine.recorded.emit(TelemetryCounters(len(made), pack(made), 0))
    return spans, made


# --- the page -------------------------------------------------------------------------------------


def test_a_sentence_and_a_picture_come_first_and_the_rest_is_folded(
    page: MonitorPage, engine: WatchedEngine, hub: TelemetryHub, settings: Settings, qtbot: QtBot
) -> None:
    settings.monitor_details = False
    assert not page.timeline.isVisible()
    assert not page.engine_cards.isVisible()
    assert not page.ranges.isVisible()
    assert not page.summary.picture.isVisible()  # nothing has been computed
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        tell(engine)
    qtbot.waitUntil(page.summary.picture.isVisible, timeout=20_000)
    parts = time_parts(Waiting(9, 1.0, {"cpu_experts": 0.6, "cpu_attention": 0.3, OTHER: 0.1}))
    assert [(part.amount, part.hatched) for part in parts] == [(600, False), (300, True), (100, False)]
    assert parts[0].name == "60% computing experts on the CPU"
    page.unfold.click()
    assert settings.monitor_details
    assert page.timeline.isVisible()


def test_a_recording_is_named_by_its_model_and_what_was_asked(tmp_path: Path) -> None:
    entry = SessionEntry("x", (), 3 * 2**20, 1_790_000_000.0, "Qwen3")
    assert session_title(entry, "Why is the sky blue?").startswith("Qwen3: Why is the sky blue?   ")
    assert session_title(entry, "").startswith("Qwen3   ")
    assert "3 MB" in session_title(replace(entry, model=""), "")
    SessionWriter(tmp_path, {"model": "Qwen3"}).close()
    (found,) = sessions_in(tmp_path)
    assert found.model == "Qwen3"
    found.paths[0].write_bytes(b"no session")
    assert sessions_in(tmp_path)[0].model == ""


def test_it_says_what_to_do_first_and_watches_while_it_is_seen(
    page: MonitorPage, engine: WatchedEngine, settings: Settings
) -> None:
    assert "Ask something in Chat" in page.summary.accessibleName()
    assert page.summary.button.isHidden()
    for button in page.findChildren(QAbstractButton):
        if button.isVisibleTo(page) and button.objectName() != "qt_tableview_cornerbutton":
            assert button.accessibleName() or button.text()
    assert engine.watched[-1] == (True, True)
    page.hide()
    assert engine.watched[-1] == (True, False)  # for the recording
    page.show()
    settings.record_sessions = False
    assert engine.watched[-1] == (True, True)
    page.hide()
    assert engine.watched[-1] == (False, False)


def test_what_the_engine_says_is_shown_and_its_death_told(
    page: MonitorPage, engine: WatchedEngine, hub: TelemetryHub, qtbot: QtBot
) -> None:
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        tell(engine)
    qtbot.waitUntil(lambda: "computing experts on the CPU" in page.summary.accessibleName(), timeout=20_000)
    assert page.summary.accessibleName().startswith("Last 60 tokens, 50")
    assert "67% computing experts on the CPU" in page.summary.accessibleName()
    page.timeline.view.refresh()
    page.grab()
    assert [row.lane.key for row in page.timeline.view.rows][:2] == ["phase", "cpu"]
    engine.die()
    assert "The engine has stopped." in page.summary.accessibleName()
    history = hub.history
    qtbot.waitUntil(lambda: bool(history.marks_between(0, 2**62)), timeout=20_000)
    assert history.has_engine  # what was recorded stays
    engine.set_state(EngineState.STARTING)
    assert "starting" in page.summary.accessibleName()


def test_nonsense_harms_nothing(page: MonitorPage, engine: WatchedEngine, hub: TelemetryHub, qtbot: QtBot) -> None:
    now = time.perf_counter_ns()
    spans, _ = decoded(3, now)
    spans["end_ns"] -= 10**9
    engine.recorded.emit(TelemetrySpans(now, 0.0, 5, "no base64 %%%", 0))
    engine.recorded.emit(TelemetrySpans(-(2**60), float("inf"), len(spans), pack(spans), 0))
    engine.recorded.emit(TelemetryCounters(1, pack(np.zeros(3, np.uint8)), -5))
    broken = dataclasses.replace(expert_map(), layers=(1, 2, 3, 4, 5))
    engine.recorded.emit(broken)
    qtbot.waitUntil(lambda: hub.experts is broken, timeout=20_000)
    page._refresh()
    assert page.experts.view.data is None
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        tell(engine)
    assert hub.recorder.dropped >= 2


@pytest.mark.parametrize("choice", ["light", "dark"])
def test_it_can_be_drawn_in_every_theme(
    page: MonitorPage, engine: WatchedEngine, theme: ThemeController, qtbot: QtBot, choice: str, hub: TelemetryHub
) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        tell(engine, on_device=True)
    engine.recorded.emit(expert_map())
    qtbot.waitUntil(lambda: hub.experts is not None, timeout=20_000)
    page._refresh()
    page.timeline.machine.setChecked(True)
    page.timeline.as_table.setChecked(True)
    assert not page.grab().isNull()
    page.timeline.as_table.setChecked(False)
    assert not page.grab().isNull()


def test_the_strip_ends_where_its_frame_begins(qtbot: QtBot, hub: TelemetryHub) -> None:
    strip = TimelineStrip(hub)
    qtbot.addWidget(strip)
    strip.resize(600, strip.height())
    strip.show()
    assert strip.viewport().width() < 600, "there is no frame"
    assert strip.view.width() == strip.viewport().width()
    assert strip.view.height() == strip.viewport().height()


def test_the_strip_opens_the_monitor(qtbot: QtBot, hub: TelemetryHub, page: MonitorPage) -> None:
    strip = TimelineStrip(hub)
    qtbot.addWidget(strip)
    strip.resize(600, strip.height())
    tell(page._client, on_device=True)  # type: ignore[arg-type]
    assert not strip.grab().isNull()
    with qtbot.waitSignal(strip.opened):
        qtbot.keyClick(strip, Qt.Key.Key_Return)


# --- sentences ------------------------------------------------------------------------------------


def test_sentences() -> None:
    waited = Waiting(200, 4.0, {"cpu_experts": 0.61, OTHER: 0.3, "gpu": 0.08, "disk": 0.01})
    said = " ".join(waiting_words(waited)).strip()
    assert said.startswith("Last 200 tokens, 50")
    assert said.index("61%") < said.index("30%") < said.index("8%")
    assert "disk" not in said
    busy = " ".join(waiting_words(replace(waited, others=0.94))).strip()
    assert busy.index("94%") < busy.index("200 tokens")
    assert (
        "2 pictures were read first, in 1.3 s."
        in " ".join(waiting_words(replace(waited, pictures=2, pictures_s=1.3))).strip()
    )
    batch = " ".join(waiting_words(replace(waited, tokens=240, steps=20, is_batch=True))).strip()
    assert "Batch" in batch
    assert "12 per step" in batch
    assert " ".join(waiting_words(Waiting(0, 0.0, {}))).strip() == "Nothing has been decoded yet."
    assert "int8 weights would be about 1.5 times" in advice_sentence(Advice("precision", "int8", 1.5))
    assert advice_sentence(None) == ""


# --- the map --------------------------------------------------------------------------------------


def test_the_map_is_sorted_hovered_and_walked(qtbot: QtBot) -> None:
    view = ExpertMapView()
    qtbot.addWidget(view)
    view.resize(400, 200)
    view.show_data(map_data(expert_map()))
    assert view.text_at(1, 0).startswith("Layer 1, expert 0 · used 0 times")
    assert "in VRAM, in RAM" in view.text_at(1, 0)
    view.sort_by_use(True)
    assert view.text_at(1, 0).startswith("Layer 1, expert 7")
    with qtbot.waitSignal(view.said) as said:
        qtbot.keyClick(view, Qt.Key.Key_Right)
    assert "expert 7" in said.args[0]
    assert not view.grab().isNull()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (61, 1000), (94, 128), (2, 3)])
def test_maps_of_every_size_can_be_drawn(rows: int, columns: int) -> None:
    from PySide6.QtGui import QColor

    data = map_data(expert_map(rows, columns))
    for by_use in (False, True):
        image = draw_map(data, data.order(by_use=by_use), 317, 149, QColor("white"), QColor("black"))
        assert (image.width(), image.height()) == (317, 149)


def test_a_map_that_does_not_fit_itself_is_refused() -> None:
    for wrong in ({"experts": 9}, {"layers": ()}, {"heat": "x"}, {"record_bytes": (1,)}, {"experts": 2**40}):
        with pytest.raises(EngineError):
            map_data(dataclasses.replace(expert_map(), **wrong))


# --- sessions -------------------------------------------------------------------------------------


def record(folder: Path, steps: int = 40) -> tuple[Records, Records]:
    """A session of so many steps, with a map and the machine's gauges."""
    problems: list[str] = []
    recording = SessionRecording(folder, problems.append)
    recording.begin({"model": "Starter", "device": "cpu", "precision": "bf16"})
    spans, made = decoded(steps, 10**15)
    recording.clock(10**15, 1e9)
    recording.spans(spans)
    recording.steps(made)
    recording.expert_map(10**15, expert_map())
    recording.sample(10**15, {"cpu_all": 0.5})
    recording.end()
    assert problems == []
    return spans, made


def test_a_session_is_opened_as_it_was_recorded(tmp_path: Path, page: MonitorPage, qtbot: QtBot) -> None:
    spans, made = record(tmp_path)
    (entry,) = sessions_in(tmp_path)
    session = open_session(entry)
    start, end = int(made["start_ns"][0]), int(made["end_ns"][-1])
    assert len(session.history.spans_between(start, end)) == len(spans)
    assert session.about["model"] == STARTER.name
    assert len(session.maps) == 1
    menu = page.sessions.menu()
    words = patch.object(page.sessions, "_first_words", lambda times: ["Why is the sky blue?"] * len(times))
    with words, patch("app.views.monitor.page.sessions_dir", lambda: tmp_path):
        menu.aboutToShow.emit()
        qtbot.waitUntil(lambda: any("sky blue" in action.text() for action in menu.actions()), timeout=20_000)
    with qtbot.waitSignal(page.sessions.opened, timeout=20_000):
        page.sessions.read(entry, compare=False)
    assert not page.timeline.view.navigator.is_live
    assert page.experts.view.data is not None
    assert "67% computing experts on the CPU" in page.summary.accessibleName()
    with qtbot.waitSignal(page.sessions.compared, timeout=20_000):
        page.sessions.read(entry, compare=True)
    assert page.second.isVisibleTo(page)
    page.second.dismiss()
    page.show_now()
    assert page.timeline.view.navigator.is_live


def test_a_session_that_was_cut_short_is_opened_as_far_as_it_goes(tmp_path: Path, page: MonitorPage) -> None:
    record(tmp_path)
    (entry,) = sessions_in(tmp_path)
    for keep in (0.98, 0.5, 0.05):
        data = entry.paths[0].read_bytes()
        entry.paths[0].write_bytes(data[: int(len(data) * keep)])
        try:
            session = open_session(entry)
        except EngineError:
            continue
        assert not session.recorded.is_whole
        page.show_session(session)
        assert "ends early" in page.session_banner.text
        page.grab()


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    problems: list[str] = []
    recording = SessionRecording(tmp_path / "file" / "sessions", problems.append)
    recording.begin({})
    for _ in range(3):
        recording.spans(decoded(2, 10**15)[0])
    assert len(problems) == 1


def test_what_is_shown_is_exported(
    page: MonitorPage, engine: WatchedEngine, hub: TelemetryHub, qtbot: QtBot, tmp_path: Path
) -> None:
    with qtbot.waitSignal(hub.analysed, timeout=20_000):
        spans, _ = tell(engine)
    page.grab()
    for name in ("trace.json", "spans.csv"):
        with qtbot.waitSignal(page.export.reported, timeout=20_000):
            page.export.write_records(tmp_path / name)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans)
    assert (tmp_path / "spans.csv").read_text().count("\n") == len(spans) + 1
    assert (tmp_path / "spans-steps.csv").exists()
    for name in ("picture.png", "drawing.svg"):
        page.export.write_picture(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    page.export.write_picture(tmp_path / "no" / "such" / "folder.svg")
    assert sessions_dir().is_dir()


START = 10**12
ROWS = 12


def batch(steps: int, start_ns: int = START, rows: int = ROWS) -> tuple[Records, Records]:
    """Steps of many rows, whose experts the engine counts as those of a prefill."""
    spans, made = decoded(steps, start_ns)
    made["name"], made["tokens"], made["request"] = BATCH_STEP, rows, 2
    made["prefill_on_cpu"], made["on_cpu"] = 20 * rows, 0
    spans["request"] = 2
    return spans, made


def history_of(*parts: tuple[Records, Records]) -> History:
    found = History()
    for spans, steps in parts:
        found.add_spans(spans)
        found.add_steps(steps)
    return found


def test_the_experts_of_a_batch_are_counted() -> None:
    history = history_of(batch(50))
    edges = np.linspace(START, START + 50 * STEP_NS, 6)
    hit, fetched, on_cpu = history.experts(edges)
    assert (on_cpu > 0.99).all()
    assert not hit.any()
    assert not fetched.any()


def test_what_a_chat_reads_is_not_counted_as_its_tokens_experts() -> None:
    spans, steps = batch(50)
    steps["name"] = PREFILL
    assert not history_of((spans, steps)).experts(np.linspace(START, START + 50 * STEP_NS, 6)).any()


def test_figures_of_a_token_are_of_what_ran_last() -> None:
    chat, later = decoded(100, START), batch(30, START + 100 * STEP_NS)
    before = token_figures(history_of(chat))
    during = token_figures(history_of(chat, later))
    assert (before.is_batch, during.is_batch) == (False, True)
    assert (during.tokens, during.steps) == (30 * ROWS, 30)
    assert before.used == during.used == 20.0  # a token of a batch uses as many experts as one of a chat


def test_the_headline_follows_a_batch_and_comes_back_to_a_chat() -> None:
    chat, later = decoded(100, START), batch(30, START + 100 * STEP_NS)
    history = history_of(chat, later)
    waited = waiting_for_last(history, 200)
    assert waited.is_batch
    assert waited.steps == 17  # as many as have made 200 tokens
    assert waited.tokens == 17 * ROWS
    assert waited.seconds == pytest.approx(17 * STEP_NS / 1e9)
    assert waited.most == "cpu_experts"
    for part, add in zip(decoded(5, START + 130 * STEP_NS), (history.add_spans, history.add_steps), strict=True):
        add(part)
    again = waiting_for_last(history, 200)
    assert not again.is_batch
    assert again.tokens == 105


@pytest.mark.parametrize(("busy", "ours", "others"), [(0.97, 0.06, 0.94), (0.5, 1.0, 0.0), (0.9, 1.6, 0.1)])
def test_what_other_programs_take_is_told(busy: float, ours: float, others: float) -> None:
    history = history_of(decoded(100, START))
    for at_ns in range(START, START + 100 * STEP_NS, 4 * 10**8):
        history.add_sample(at_ns, replace(sample(busy=busy), cpu_ours=ours))
    assert waiting_for_last(history, 200).others == pytest.approx(others, abs=0.01)
