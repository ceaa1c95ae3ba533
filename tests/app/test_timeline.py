"""The timeline: where one looks, what lanes say, how it is drawn, and what was predicted beside what was."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from PySide6.QtCore import QPoint, QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QImage, QPainter
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.history.gauges import Floats
from app.services.history.history import History
from app.services.predicted_timeline import Predicted, RequestShape, predict, request_before
from app.theme import ThemeController
from app.views.monitor.page import LaneTable
from app.views.monitor.second import SecondTimeline, aligned_ns, assumptions, speeds
from app.widgets.timeline.blocks import averages_text, token_at
from app.widgets.timeline.lanes import Lane, LaneData, lanes_of, nice, read_lane, reading
from app.widgets.timeline.navigator import BEHIND_NS, WHOLE, Navigator, Viewport, duration
from app.widgets.timeline.picture import joined, lane_areas, read_rows, request_label, rows_of, title_font
from app.widgets.timeline.plots import LaneRaster, _draw_outlines, draw_lane
from app.widgets.timeline.view import TimelineView
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.telemetry.lanes import DECODE, ELSEWHERE, PREFILL, QUEUED, READING, WRITING, WRITTEN_ELSEWHERE
from engine.telemetry.predicted import lengthened
from engine.telemetry.recorder import Recorder
from engine.telemetry.records import STEP, Records, no_spans
from tests.app.recorded import STEP_NS, decoded, sample
from tests.unit.made_up_tuning import tiny_model

ORIGIN_NS = 10**15
STEPS = 300


@pytest.fixture
def history() -> History:
    """Six seconds of decoding, and samples of the machine."""
    result = History()
    spans, steps = decoded(STEPS, ORIGIN_NS)
    result.add_spans(spans)
    result.add_steps(steps)
    for index in range(24):
        result.add_sample(ORIGIN_NS + index * 250_000_000, sample())
    return result


@pytest.fixture
def view(qtbot: QtBot, history: History) -> Iterator[TimelineView]:
    result = TimelineView()
    qtbot.addWidget(result)
    result.resize(900, 360)
    result.navigator.set_source(history, recorded=False)
    result.show()
    result.grab()
    yield result
    result.hide()


# --- the stretch of time --------------------------------------------------------------------------


@given(st.floats(0, 1e17), st.floats(1e5, 1e13), st.integers(1, 3000), st.floats(0.01, 100), st.floats(0, 1))
def test_zooming_leaves_the_moment_under_the_mouse_where_it_is(
    start: float, span: float, width: int, factor: float, where: float
) -> None:
    before = Viewport(start, span, width)
    anchor = before.start_ns + where * before.span_ns
    after = before.zoomed(factor, anchor)
    assert after.x(anchor) == pytest.approx(before.x(anchor), abs=0.5 + 32 / after.column_ns)


@given(st.floats(1e9, 1e16), st.floats(1e5, 1e13), st.integers(1, 2000))
def test_columns_lie_on_a_grid_that_does_not_move(start: float, span: float, width: int) -> None:
    edges = Viewport(start, span, width).edges()
    assert edges[0] <= start + 1
    assert edges[-1] >= start + span - 1
    column = span / width
    assert_allclose(edges / column, np.round(edges / column), rtol=1e-9)


@given(st.floats(-1e16, 1e16))
def test_every_duration_has_a_short_text(nanoseconds: float) -> None:
    assert 0 < len(duration(nanoseconds)) < 24


def test_hours_and_minutes_are_not_rounded_up() -> None:
    minutes = 60 * 10**9
    assert [duration(each * minutes) for each in (59.5, 100, 716.5)] == ["59:30 min", "1 h 40 min", "11 h 56 min"]


@given(st.floats(1e-6, 1e15))
def test_a_scale_is_never_below_its_values(value: float) -> None:
    assert value <= nice(value) * 1.001
    assert nice(value) <= 2 * value + 1e-9


# --- following and standing still -----------------------------------------------------------------


def test_what_is_live_follows_and_what_is_frozen_does_not(history: History) -> None:
    navigator = Navigator()
    navigator.set_source(history, recorded=False)
    assert navigator.viewport.end_ns == (history.end_ns or 0) - BEHIND_NS
    navigator.toggle()
    before = navigator.viewport
    history.add_spans(decoded(10, ORIGIN_NS + 400 * STEP_NS)[0])
    navigator.follow()
    assert navigator.viewport == before
    assert navigator.history is not history
    navigator.go_live()
    assert navigator.viewport.end_ns == (history.end_ns or 0) - BEHIND_NS


@given(st.lists(st.tuples(st.sampled_from(["pan", "zoom", "preset"]), st.floats(-20, 20)), max_size=30))
def test_something_of_the_past_is_always_in_sight(moves: list[tuple[str, float]]) -> None:
    past = History()
    past.add_spans(decoded(20, ORIGIN_NS)[0])
    navigator = Navigator()
    navigator.set_source(past, recorded=True)
    for kind, amount in moves:
        if kind == "pan":
            navigator.pan(amount)
        elif kind == "zoom":
            navigator.zoom(2.0**amount, navigator.viewport.at(3.0))
        else:
            navigator.set_preset(WHOLE if amount > 0 else 10**10)
        assert navigator.viewport.start_ns <= (past.end_ns or 0)
        assert navigator.viewport.end_ns >= (past.start_ns or 0)


# --- lanes ----------------------------------------------------------------------------------------


def test_only_what_the_machine_has_gets_a_lane(history: History) -> None:
    keys = [lane.key for lane in lanes_of(history, machine=True)]
    assert keys == ["phase", "cpu", "disk", "experts", "tokens", "cpu_all", "ram", "faults"]
    history.add_spans(decoded(3, ORIGIN_NS + 400 * STEP_NS, on_device=True)[0])
    assert {"gpu", "h2d", "d2h"} <= {lane.key for lane in lanes_of(history, machine=False)}


def test_lanes_read_what_was_recorded(history: History) -> None:
    viewport = Viewport(ORIGIN_NS, 5e9, 500)
    said = {
        lane.key: reading(lane, read_lane(lane, history, viewport, {}), 250) for lane in lanes_of(history, machine=True)
    }
    assert said["tokens"] == "50.0"
    assert said["experts"] == "CPU 100%"
    assert said["cpu"] == "100%"
    assert said["cpu_all"] == "50% of 50%"


def test_a_token_says_what_it_waited_for(history: History) -> None:
    token = token_at(history, ORIGIN_NS + 10 * STEP_NS + 100, 1000.0)
    assert token.step == 9
    assert sum(end - start for start, end, _ in token.pieces) == STEP_NS
    assert "67% computing experts on the CPU" in token.text()
    assert "300 tokens at 50.0/s" in averages_text(history, ORIGIN_NS, ORIGIN_NS + STEPS * STEP_NS)


# --- the widget -----------------------------------------------------------------------------------


def test_every_key_is_harmless_and_the_picture_can_be_drawn(view: TimelineView, qtbot: QtBot) -> None:
    key = Qt.Key
    for pressed in (
        key.Key_Up, key.Key_Up, key.Key_Left, key.Key_Period, key.Key_Comma, key.Key_BracketLeft, key.Key_BracketLeft,
        key.Key_BracketRight, key.Key_Return, key.Key_Down, key.Key_PageUp, key.Key_PageDown, key.Key_Escape,
        key.Key_Space, key.Key_Home, key.Key_Down, key.Key_Home, key.Key_Space,
    ):  # fmt: skip
        qtbot.keyClick(view, pressed)
        assert not view.grab().isNull()
    qtbot.keyClick(view, key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    assert view.selection is not None


def test_the_crosshair_reads_every_lane(view: TimelineView, qtbot: QtBot) -> None:
    with qtbot.waitSignal(view.said) as said:
        view.set_cursor(ORIGIN_NS + 3e9)
    assert "Tokens/s 50.0" in said.args[0]
    assert "CPU 100%" in said.args[0]


def _at(view: TimelineView, share: float, y: int = 200) -> QPoint:
    """A place in the plots, at this share of their width."""
    area = view.view.sceneBoundingRect()
    return QPoint(round(area.left() + share * area.width()), y)


def _wheel(view: TimelineView, at: QPoint, modifiers: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
    place = QPointF(view.viewport().mapTo(view, at))
    QTest.wheelEvent(view.windowHandle(), place, QPoint(0, 120), QPoint(), modifiers)


def test_the_mouse_reads_selects_moves_and_zooms(view: TimelineView, qtbot: QtBot) -> None:
    surface, left, shift = view.viewport(), Qt.MouseButton.LeftButton, Qt.KeyboardModifier.ShiftModifier
    viewport = view.navigator.viewport
    qtbot.mouseMove(surface, _at(view, 0.5))
    assert view.cursor_ns == pytest.approx(viewport.start_ns + viewport.span_ns / 2, abs=2 * viewport.column_ns)
    assert view.navigator.is_live
    qtbot.mousePress(surface, left, pos=_at(view, 0.5))
    qtbot.mouseMove(surface, _at(view, 0.75))
    qtbot.mouseRelease(surface, left, pos=_at(view, 0.75))
    assert view.selection[1] - view.selection[0] == pytest.approx(viewport.span_ns / 4, rel=0.02)
    assert not view.navigator.is_live
    qtbot.mouseClick(surface, left, pos=_at(view, 0.5))
    assert view.selection is None
    before = view.navigator.viewport
    qtbot.mousePress(surface, Qt.MouseButton.MiddleButton, pos=_at(view, 0.5))
    qtbot.mouseMove(surface, _at(view, 0.4))
    qtbot.mouseRelease(surface, Qt.MouseButton.MiddleButton, pos=_at(view, 0.4))
    assert view.navigator.viewport.start_ns == pytest.approx(before.start_ns + before.span_ns / 10, rel=1e-3)
    before = view.navigator.viewport
    under = before.start_ns + 0.85 * before.span_ns  # where something was recorded: that stays in sight
    _wheel(view, _at(view, 0.85))
    after = view.navigator.viewport
    assert after.span_ns < before.span_ns
    assert after.x(under) == pytest.approx(before.x(under), abs=2)
    _wheel(view, _at(view, 0.25), shift)
    assert view.navigator.viewport.span_ns == after.span_ns
    assert view.navigator.viewport.start_ns < after.start_ns
    qtbot.mouseMove(surface, QPoint(5, 200))
    assert view.cursor_ns is None


@pytest.mark.parametrize(("seconds", "said"), [(60, "now"), (60, "−30 s"), (600, "−4:00 min"), (1, "200 ms")])
def test_the_axis_says_when_it_was(view: TimelineView, seconds: int, said: str, tmp_path: Path) -> None:
    view.navigator.set_preset(seconds * 10**9)
    assert view.write_picture(tmp_path / "drawing.svg")
    assert f">{said}<" in (tmp_path / "drawing.svg").read_text().replace(" </", "</")


def test_a_picture_is_as_sharp_as_a_good_screen(view: TimelineView, tmp_path: Path) -> None:
    assert view.write_picture(tmp_path / "picture.png")
    assert QImage(str(tmp_path / "picture.png")).width() == 2 * view.width()
    assert view.write_picture(tmp_path / "drawing.svg")
    drawing = (tmp_path / "drawing.svg").read_text()
    assert "Tokens/s" in drawing
    assert "<image" not in drawing
    assert not view.write_picture(tmp_path / "no" / "such" / "drawing.svg")
    assert not view.write_picture(tmp_path / "no" / "such" / "picture.png")


def test_hidden_it_does_not_draw(view: TimelineView, history: History, qtbot: QtBot) -> None:
    view.hide()
    drawn = view._drawn_revision
    history.add_spans(decoded(5, ORIGIN_NS + 500 * STEP_NS)[0])
    qtbot.wait(250)
    assert view._drawn_revision == drawn
    view.show()
    view.grab()
    assert view._drawn_revision != drawn


@pytest.mark.parametrize("choice", ["light", "dark"])
def test_an_empty_past_can_be_drawn(qtbot: QtBot, theme: ThemeController, choice: str) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    empty = TimelineView()
    qtbot.addWidget(empty)
    empty.resize(600, 300)
    assert not empty.grab().isNull()
    empty.navigator.set_source(History(), recorded=False)
    for key in (Qt.Key.Key_Up, Qt.Key.Key_Left, Qt.Key.Key_BracketLeft, Qt.Key.Key_Home):
        qtbot.keyClick(empty, key)
        assert not empty.grab().isNull()


def test_the_table_says_the_same(history: History) -> None:
    table = LaneTable()
    viewport = Viewport(ORIGIN_NS + 1e9, 4e9, 400)
    table.show_lanes([(lane, read_lane(lane, history, viewport, {})) for lane in lanes_of(history, machine=False)])
    rows = {
        str(table.data(table.index(row, 0))): [table.data(table.index(row, column)) for column in (1, 2, 3)]
        for row in range(table.rowCount())
    }
    assert rows["Tokens/s"] == ["50.0"] * 3
    assert rows["Experts, CPU"] == ["100%"] * 3
    assert table.headerData(0, Qt.Orientation.Horizontal) == "Lane"


# --- names and readings ---------------------------------------------------------------------------


@pytest.mark.parametrize("font_px", [12, 14, 20, 24])
def test_names_and_readings_have_room_left_of_the_plots(
    view: TimelineView, theme: ThemeController, qtbot: QtBot, font_px: int
) -> None:
    theme.set_font_px(font_px)
    view.explain_lanes()
    view.set_shows_machine(True)
    view.resize(480, view.minimumSizeHint().height())
    view.grab()
    qtbot.waitUntil(lambda: len(view.marks) > 5)
    titles = [label for label in view.labels() if label.is_title]
    assert [label.shown for label in titles] == [row.lane.title for row in view.rows]
    for label, row in zip(titles, view.rows, strict=True):
        needed = QFontMetricsF(title_font(view.font())).horizontalAdvance(label.shown)
        assert needed <= label.area.width()
        mark = view.marks.get(row.lane.key)
        assert mark is None or label.area.left() + needed <= mark.x()
    for row, after in itertools.pairwise(view.rows):
        assert after.area.top() > row.area.bottom()
    assert view.rows[-1].area.bottom() < view.height()
    for label in view.labels():
        if label.shown != label.whole:
            assert view.text_at(label.area.center()) == label.whole


WIDTH, HEIGHT = 300, 60
AREA = QRectF(10, 8, 280, 44)
COLUMNS = 282
XS = AREA.left() - 1 + np.arange(COLUMNS + 1, dtype=np.float64)
COLOUR = QColor("#0072B2")


def canvas(ratio: float = 1.0) -> QImage:
    image = QImage(round(WIDTH * ratio), round(HEIGHT * ratio), QImage.Format.Format_ARGB32_Premultiplied)
    image.setDevicePixelRatio(ratio)
    image.fill(QColor("white"))
    return image


def pixels(image: QImage) -> np.ndarray:
    raw = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine() // 4, 4)
    return raw[:, : image.width(), :3].astype(np.int64)


def smooth(seed: int, layers: int) -> Floats:
    rng = np.random.default_rng(seed)
    waves = np.sin(np.arange(COLUMNS) / rng.uniform(5, 30, (layers, 1)) + rng.uniform(0, 6, (layers, 1)))
    return np.asarray((waves + 1) / 2 / layers)


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0])
@pytest.mark.parametrize(
    ("kind", "layers", "with_line"),
    [("share", 2, False), ("bytes", 1, False), ("rate", 0, True), ("experts", 3, False)],
)
def test_both_ways_look_alike(qapp: QApplication, kind: str, layers: int, with_line: bool, ratio: float) -> None:
    lane = Lane("lane", "Lane", kind, "gpu")  # type: ignore[arg-type]
    values = smooth(3, layers) if layers else np.zeros((0, COLUMNS))
    if kind == "experts":
        values = values / values.sum(axis=0)
    data = LaneData(values, line=smooth(4, 1)[0] if with_line else None)
    images = []
    for draw in (draw_lane, _draw_outlines):
        image = canvas(ratio)
        painter = QPainter(image)
        painter.setClipRect(AREA)
        draw(painter, AREA, XS, lane, data, COLOUR)
        painter.end()
        images.append(pixels(image))
    # Hatches and the smoothing of edges may differ; the colour that an eye sees of each spot does not.
    spots = [
        image[: image.shape[0] // 12 * 12, : image.shape[1] // 12 * 12]
        .reshape(image.shape[0] // 12, 12, image.shape[1] // 12, 12, 3)
        .mean(axis=(1, 3))
        for image in images
    ]
    assert np.abs(spots[0] - spots[1]).mean() < 4
    assert np.abs(spots[0] - spots[1]).max() < 45


@given(st.lists(st.floats(0, 1), min_size=COLUMNS, max_size=COLUMNS), st.sampled_from([1.0, 1.25, 2.0]))
def test_an_area_covers_what_it_stands_for(shares: list[float], ratio: float) -> None:
    raster = LaneRaster(AREA, XS, ratio)
    values = np.array(shares)
    covered = raster.columns(np.zeros(COLUMNS), values)
    middle = covered[:, 140 * round(ratio) : 140 * round(ratio) + 1].sum() / ratio / AREA.height()
    column = int((AREA.left() + (140 * round(ratio) + 0.5) / ratio - XS[0]) // 1)
    assert middle == pytest.approx(values[column], abs=0.03)
    assert covered.min() >= 0
    assert covered.max() <= 1


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


START_NS = 10**12
PREFILL_NS = 300_000_000


def asked(steps: int, prompt: int = 40, request: int = 1, start_ns: int = START_NS) -> tuple[Records, Records]:
    """A request: a prompt that is read, then decode steps."""
    spans, made = decoded(steps, start_ns + PREFILL_NS)
    first = np.zeros(1, STEP)
    first["start_ns"], first["end_ns"], first["name"] = start_ns, start_ns + PREFILL_NS, PREFILL
    first["tokens"], first["request"], made["request"], spans["request"] = prompt, request, request, request
    made["step"] += 1
    spans["step"] += 1
    return spans, np.concatenate((first, made))


def history_of(*requests: tuple[Records, Records]) -> History:
    history = History()
    for spans, steps in requests:
        history.add_spans(spans)
        history.add_steps(steps)
    return history


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return tiny_model()


def shape(checkpoint: Path, device: str = "cpu", tokens: int = 50) -> RequestShape:
    return RequestShape(EngineConfig(str(checkpoint), device=device, precision="bf16", threads=2), "tiny", 40, tokens)


# --- the prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "emulated:slow-link#0"])
def test_a_request_is_predicted_step_by_step(checkpoint: Path, switchyard_home: Path, device: str) -> None:
    found = predict(shape(checkpoint, device))
    assert len(found.steps_ns) == 50
    assert found.steps_ns[0] == pytest.approx(1e9 * found.ttft_s, rel=1e-3)
    last = found.history.last_request(2**62)[-1]
    assert last.tokens == 50
    took_s = (last.end_ns - found.steps_ns[-13]) / 1e9
    assert 13 / took_s == pytest.approx(found.tokens_per_s, rel=0.35)
    assert found.history.has_copies == (device != "cpu")
    assert "cpu" in (*found.measured, *found.assumed)


def test_a_model_that_is_not_here_is_a_sentence(switchyard_home: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        predict(RequestShape(EngineConfig(str(tmp_path / "gone"), device="cpu"), "gone", 4, 4))


@given(simulated=st.integers(1, 30), wanted=st.integers(1, 90))
def test_a_long_answer_repeats_the_last_steps(simulated: int, wanted: int) -> None:
    spans, steps = asked(simulated)
    more_spans, more = lengthened(spans, steps, wanted)
    decode = more[more["name"] == DECODE]
    assert len(decode) == wanted
    assert (np.diff(more["step"]) == 1).all()
    assert (decode["start_ns"][1:] == decode["end_ns"][:-1]).all()
    assert set(more_spans["step"].tolist()) == set(decode["step"].tolist())
    for name in ("start_ns", "end_ns"):  # every step holds the same spans at the same places
        inside = more_spans[name] - START_NS - PREFILL_NS - (more_spans["step"] - 1) * STEP_NS
        assert (inside >= 0).all()
        assert (inside <= STEP_NS).all()


# --- at the same step -----------------------------------------------------------------------------


@given(st.integers(0, 29), st.integers(0, STEP_NS - 1), st.integers(1_000_000, 100_000_000))
def test_both_show_the_same_step_at_the_same_place(step: int, inside_ns: int, predicted_ns: int) -> None:
    history = history_of(asked(31))
    steps_ns = [7_000_000 + number * predicted_ns for number in range(31)]
    real_ns = START_NS + PREFILL_NS + step * STEP_NS - inside_ns
    start = aligned_ns(history, real_ns, real_ns + 10**8, steps_ns)
    if real_ns < START_NS + PREFILL_NS:  # the prompt is in sight: both begin together
        assert start == real_ns - START_NS
    else:
        assert start == steps_ns[step] - inside_ns


# --- beneath the real one -------------------------------------------------------------------------


def test_it_stands_beneath_the_real_one(
    qtbot: QtBot, qapp: QApplication, checkpoint: Path, switchyard_home: Path
) -> None:
    found: Predicted = predict(shape(checkpoint))
    first = TimelineView()
    second = SecondTimeline(first)
    for widget in (first, second):
        qtbot.addWidget(widget)
        widget.resize(900, 300)
        widget.show()
    first.navigator.set_source(history_of(asked(50)), recorded=True)
    second.show_predicted(found, 98.1)
    assert "98.1 measured" in second.caption.text()
    assert "aligned at the same step" in second.said.text()
    at = START_NS + PREFILL_NS + 20 * STEP_NS
    first.navigator.show(at, at + 5 * STEP_NS)
    viewport, mine = first.navigator.viewport, second.view.navigator.viewport
    assert mine.span_ns == viewport.span_ns
    inside = (START_NS + PREFILL_NS + 20 * STEP_NS - viewport.start_ns) % STEP_NS
    assert min(abs(mine.start_ns + inside - step) for step in found.steps_ns) < 2
    first.set_cursor(viewport.at(100))
    assert second.view.cursor_ns == pytest.approx(mine.start_ns + 100 * viewport.column_ns)
    assert not second.grab().isNull()
    second.dismiss()
    assert second.predicted is None


def test_what_was_assumed_is_said(checkpoint: Path, switchyard_home: Path) -> None:
    found = predict(shape(checkpoint, "emulated:slow-link#0"))
    said = assumptions(found)
    assert "40 tokens read and 50 written" in said
    assert "From data sheets" in said
    assert speeds(found, None).count("tokens/s") == 1


def test_the_request_in_sight_is_found() -> None:
    history = history_of(asked(30, 40, 1), asked(20, 9, 2, START_NS + 10**10))
    assert request_before(history, START_NS + 5 * 10**9) == (40, 30)
    assert request_before(history, 2**62) == (9, 20)
    assert request_before(history, START_NS) is None
