"""The timeline: where one looks, what lanes say, and a widget that takes whatever comes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QFontMetricsF, QGuiApplication, QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.history.history import History
from app.theme import ThemeController
from app.views.monitor.page import LaneTable
from app.widgets.scaffold import MARK_PX
from app.widgets.timeline.blocks import MOST_ROWS, averages_text, rows_of, token_at
from app.widgets.timeline.lanes import lanes_of, nice, read_lane, reading
from app.widgets.timeline.navigator import BEHIND_NS, WHOLE, Navigator, Viewport, duration
from app.widgets.timeline.picture import GUTTER_GAP_PX, caption_font, sizes_for, title_font
from app.widgets.timeline.view import TimelineView
from engine.telemetry.lanes import DISK, READ
from engine.telemetry.records import SPAN
from tests.app.recorded import STEP_NS, decoded, sample

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


def test_before_an_engine_did_anything_the_machine_is_shown() -> None:
    idle = History()
    assert lanes_of(idle, machine=False) == []
    idle.add_sample(ORIGIN_NS, sample())
    assert [lane.key for lane in lanes_of(idle, machine=False)] == ["cpu_all", "ram", "faults"]


def test_lanes_read_what_was_recorded(history: History) -> None:
    viewport = Viewport(ORIGIN_NS, 5e9, 500)
    said = {
        lane.key: reading(lane, read_lane(lane, history, viewport, {}), 250) for lane in lanes_of(history, machine=True)
    }
    assert said["tokens"] == "50.0"
    assert said["experts"] == "CPU 100%"
    assert said["cpu"] == "100%"
    assert said["cpu_all"] == "50% of 50%"


def test_reads_beside_each_other_have_rows_of_their_own() -> None:
    spans = np.zeros(6, SPAN)
    spans["lane"], spans["name"] = DISK, READ
    spans["start_ns"] = np.arange(6)
    spans["end_ns"] = [10, 10, 3, 10, 20, 20]
    rows = rows_of(spans)
    assert max(rows) < MOST_ROWS
    assert len({rows[0], rows[1], rows[2]}) == 3
    assert rows[3] == rows[2]  # it was free again


def test_a_token_says_what_it_waited_for(history: History) -> None:
    token = token_at(history, ORIGIN_NS + 10 * STEP_NS + 100, 1000.0)
    assert token is not None
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


def test_space_freezes_and_home_returns(view: TimelineView, qtbot: QtBot) -> None:
    assert view.navigator.is_live
    qtbot.keyClick(view, Qt.Key.Key_Space)
    assert not view.navigator.is_live
    qtbot.keyClick(view, Qt.Key.Key_Home)
    assert view.navigator.is_live


def test_zoomed_in_single_spans_show(view: TimelineView) -> None:
    view.navigator.show(ORIGIN_NS + 10 * STEP_NS, ORIGIN_NS + 12 * STEP_NS)
    view.grab()
    blocks = {row.lane.key: row.blocks for row in view.rows}
    assert blocks["cpu"] is not None
    assert len(blocks["cpu"]) >= 16


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
    assert view.selection is not None
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


def test_a_long_reading_ends_in_an_ellipsis_and_the_tooltip_says_it(view: TimelineView) -> None:
    row = view.rows[0]
    row.lane = replace(row.lane, title="A name that is much longer than the gutter is wide")
    view.set_cursor(ORIGIN_NS + 1e9)
    (label,) = [label for label in view.labels() if label.whole == row.lane.title]
    assert label.shown.endswith("…")
    assert view.text_at(label.area.center()) == row.lane.title


@pytest.mark.parametrize("font_px", [12, 14, 20])
def test_readings_of_both_directions_end_before_the_help_mark(qapp: QApplication, font_px: int) -> None:
    font = QGuiApplication.font()
    font.setPixelSize(font_px)
    read = QFontMetricsF(caption_font(font)).horizontalAdvance("↓ 880.6 ↑ 80.0 MB/s")
    assert read <= sizes_for(font).gutter - GUTTER_GAP_PX - MARK_PX
