"""The timeline: one chart of all lanes, and what follows the mouse and the keys."""

from __future__ import annotations

import time
from pathlib import Path

import pyqtgraph as pg
from PySide6.QtCore import QPointF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeyEvent, QPainter, QShowEvent
from PySide6.QtWidgets import QGraphicsPathItem, QGraphicsSceneWheelEvent, QSizePolicy, QWidget

from app.services.background import timer
from app.theme import themed
from app.widgets.chart import Chart
from app.widgets.scaffold import MARK_PX, HelpMark
from app.widgets.timeline.blocks import TokenPath, averages_text, path_through, token_at, token_beside
from app.widgets.timeline.lanes import LaneData, lane_help, lane_words, lanes_of, read_lane, reading, tracks_of
from app.widgets.timeline.navigator import BEHIND_NS, FAINT_ALPHA, PAN, Navigator, duration, faded, key_pressed
from app.widgets.timeline.picture import (
    GUTTER_GAP_PX,
    LANE_GAP_PX,
    RIGHT_PX,
    GutterLabel,
    LaneAxis,
    LaneRow,
    LanesItem,
    TimeAxis,
    axis_font,
    draw_rows,
    lane_areas,
    least_height,
    read_rows,
    sizes_for,
)
from engine.common.lanes import Lane

_EMPTY_PX = 233
_TICK_REACH_PX = 6.0
_TOKEN_ALPHA = 22
_SHORT_NS = 2e9
"""Shorter ranges have times relative to their own beginning: durations matter then, not when it was."""
_REFRESH_MS = (100, 1000)
_NEW_COLUMNS = 10
"""Pause between two paints."""
_PAINTING_PART = 1 / 40
"""Maximum share of time spent painting: a slow paint lengthens the pause."""


class TimeBox(pg.ViewBox):  # type: ignore[misc]
    """pyqtgraph's view, whose zooming and panning move the timeline's navigator; dragging with the left button selects
    a range instead."""

    def __init__(self, timeline: TimelineView) -> None:
        super().__init__(enableMenu=False, invertY=True, defaultPadding=0)
        self.setMouseEnabled(x=True, y=False)
        self._timeline = timeline

    def scaleBy(
        self,
        s: tuple[float | None, ...] | None = None,
        center: pg.Point | None = None,
        x: float | None = None,
        y: float | None = None,  # noqa: ARG002
    ) -> None:
        factor = x if s is None else s[0]
        if factor is not None:
            anchor_ns = None if center is None else self._timeline.at(center.x())
            self._timeline.navigator.zoom(factor, anchor_ns)

    def translateBy(
        self,
        t: tuple[float, ...] | None = None,
        x: float | None = None,
        y: float | None = None,  # noqa: ARG002
    ) -> None:
        by = x if t is None else t[0]
        if by is not None:
            navigator = self._timeline.navigator
            navigator.pan(1e9 * by / navigator.viewport.span_ns)

    def wheelEvent(self, event: QGraphicsSceneWheelEvent, axis: int | None = None) -> None:
        sideways = event.orientation() == Qt.Orientation.Horizontal
        if sideways or event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self._timeline.navigator.pan(-event.delta() / 120 * PAN)
            event.accept()
        else:
            self.updateMatrix()  # it may have moved since the last paint
            super().wheelEvent(event, axis)

    def mouseDragEvent(self, event: pg.GraphicsScene.mouseEvents.MouseDragEvent, axis: int | None = None) -> None:
        if event.button() != Qt.MouseButton.LeftButton or event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            super().mouseDragEvent(event, axis)
            return
        event.accept()
        self._timeline.navigator.freeze()  # a selection must not scroll away
        ends = (self.mapToView(event.buttonDownPos()).x(), self.mapToView(event.pos()).x())
        self._timeline.select(*sorted(map(self._timeline.at, ends)))

    def mouseClickEvent(self, event: pg.GraphicsScene.mouseEvents.MouseClickEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            event.accept()
            self._timeline.on_click(event.pos(), twice=event.double())

    def hoverEvent(self, event: pg.GraphicsScene.mouseEvents.HoverEvent) -> None:
        if event.isExit():
            self._timeline.set_cursor(None)
        elif not event.buttons():
            self._timeline.on_hover(event.pos())


class TimelineView(Chart):
    """Shows the range of `navigator`.  It neither reads nor paints while hidden.

    Signals:
        said(str): about the crosshair, the selection or the selected token; empty if there is none.
        pointed(object): the time at the crosshair, nanoseconds; None when it disappears.
    """

    said = Signal(str)
    pointed = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        self._names, self._times = LaneAxis(), TimeAxis("bottom", self._time_words, grid=True)
        self._times.setTickDensity(1.7)
        super().__init__(parent, view=TimeBox(self), left=self._names, bottom=self._times)
        self.navigator = Navigator(self)
        self._drawn = LanesItem(self.view)
        self._crosshair = pg.InfiniteLine(angle=90, movable=False)
        self._selected = pg.LinearRegionItem(movable=False)
        self._around_token = pg.LinearRegionItem(movable=False, pen=pg.mkPen(None))
        self._through_token = QGraphicsPathItem()
        for item in (self._selected, self._around_token, self._through_token, self._crosshair):
            item.hide()
            self.view.addItem(item, ignoreBounds=True)
        self._shows_machine = False
        self._ceilings: dict[str, float] = {}
        self._lanes: list[Lane] = []
        self._drawn_revision = -1
        self._drawing_s = 0.0
        self.cursor_ns: float | None = None
        self.selection: tuple[float, float] | None = None
        self.token: TokenPath | None = None
        self._token_is_kept = False
        self._said = ""
        self._marks: dict[str, HelpMark] = {}
        self._explains = False
        self._placed: list[tuple[str, QPointF]] = []
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setProperty("ring", True)
        self.setAccessibleName(self.tr("Timeline"))
        self.setAccessibleDescription(
            self.tr(
                "Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, "
                "square brackets step through tokens, Enter zooms to a token. The table has the same data as text."
            )
        )
        self._refreshing = timer(self, self.refresh)
        self.navigator.moved.connect(self._redraw)
        self.view.sigResized.connect(lambda _view: self._fit())
        self.sceneObj.sigPrepareForPaint.connect(self._prepare)
        self.dress()

    # --- what is shown ----------------------------------------------------------------------------

    @property
    def rows(self) -> list[LaneRow]:
        return self._drawn.rows

    def set_shows_machine(self, shows: bool) -> None:
        self._shows_machine = shows
        self._redraw()
        self.updateGeometry()

    @property
    def marks(self) -> dict[str, HelpMark]:
        return {lane.key: self._marks[lane.key] for lane in self._lanes if lane.key in self._marks}

    def explain_lanes(self) -> None:
        self._explains = True
        self._place_marks()

    def set_ceilings(self, ceilings: dict[str, float]) -> None:
        if ceilings != self._ceilings:
            self._ceilings = ceilings
            self._redraw()

    def labels(self) -> list[GutterLabel]:
        return self._names.labels

    def read_lanes(self) -> list[tuple[Lane, LaneData]]:
        history = self.navigator.history
        if history is None:
            return []
        self.navigator.follow()
        lanes = lanes_of(history, machine=self._shows_machine)
        return [(lane, read_lane(lane, history, self.navigator.viewport, self._ceilings)) for lane in lanes]

    def refresh(self) -> None:
        history = self.navigator.history
        if self.navigator.is_live and history is not None and history.revision != self._drawn_revision:
            self.navigator.follow()
            self._redraw()

    def sizeHint(self) -> QSize:
        return QSize(900, self.minimumSizeHint().height() + 40)

    def minimumSizeHint(self) -> QSize:
        history = self.navigator.history
        lanes = lanes_of(history, machine=self._shows_machine) if history is not None else []
        return QSize(480, least_height(lanes, self.font()) if lanes else _EMPTY_PX)

    def dress(self) -> None:
        super().dress()
        sizes = sizes_for(self.font())
        self._times.setHeight(sizes.axis)
        self._times.setTickFont(axis_font(self.font()))
        self.places.setContentsMargins(0, 0, RIGHT_PX, 0)
        self._crosshair.setPen(self.pen(themed("muted"), style=Qt.PenStyle.DashLine))
        self._selected.setBrush(faded(themed("accent"), FAINT_ALPHA))
        for line in self._selected.lines:
            line.setPen(self.pen(themed("accent")))
        self._around_token.setBrush(faded(themed("muted"), _TOKEN_ALPHA))
        self._through_token.setPen(self.pen(themed("text"), 1.4))
        self._redraw()

    def _redraw(self) -> None:
        self._drawn.forget()
        self.navigator.follow()
        columns_ms = _NEW_COLUMNS * self.navigator.viewport.column_ns / 1e6
        wanted_ms = max(columns_ms, 1000 * self._drawing_s / _PAINTING_PART)
        self._refreshing.setInterval(int(min(max(wanted_ms, _REFRESH_MS[0]), _REFRESH_MS[1])))
        self._place()
        self.viewport().update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refreshing.start()
        self._drawn_revision = -1
        self.refresh()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refreshing.stop()

    def _fit(self) -> None:
        self.view.setYRange(0, self.view.height(), padding=0)
        columns = max(round(self.view.width()), 1)
        if columns != self.navigator.viewport.width:
            self.navigator.set_width(columns)
        self._redraw()

    # --- painting ---------------------------------------------------------------------------------

    @property
    def _is_short(self) -> bool:
        return self.navigator.viewport.span_ns <= _SHORT_NS

    @property
    def _origin_ns(self) -> float:
        navigator = self.navigator
        if self._is_short:
            return navigator.viewport.start_ns
        if navigator.is_live:
            return navigator.viewport.end_ns
        return navigator.zero_ns - (0 if navigator.is_recorded else BEHIND_NS)

    def _time_words(self, seconds: float) -> str:
        if seconds == 0 and not (self._is_short or self.navigator.is_recorded):
            return self.tr("now")
        return duration(1e9 * seconds)

    def at(self, seconds: float) -> float:
        return self._origin_ns + 1e9 * seconds

    def _seconds(self, at_ns: float) -> float:
        """Its place on the axis; not so far outside that a painter would stumble."""
        viewport = self.navigator.viewport
        near = min(max(at_ns, viewport.start_ns - viewport.span_ns), viewport.end_ns + viewport.span_ns)
        return (near - self._origin_ns) / 1e9

    def _place(self) -> None:
        viewport, token, cursor_ns = self.navigator.viewport, self.token, self.cursor_ns
        self.view.setXRange(self._seconds(viewport.start_ns), self._seconds(viewport.end_ns), padding=0)
        if cursor_ns is not None:
            self._crosshair.setPos(self._seconds(cursor_ns))
        self._crosshair.setVisible(cursor_ns is not None)
        if self.selection is not None:
            self._selected.setRegion(tuple(map(self._seconds, self.selection)))
        self._selected.setVisible(self.selection is not None)
        if token is not None:
            self._around_token.setRegion((self._seconds(token.start_ns), self._seconds(token.end_ns)))
            areas = {lane: row.area for row in self.rows for lane in tracks_of(row.lane)}
            pieces = [(self._seconds(start), self._seconds(end), lane) for start, end, lane in token.pieces]
            self._through_token.setPath(path_through(areas, pieces))
        self._around_token.setVisible(token is not None)
        self._through_token.setVisible(token is not None)

    def _prepare(self) -> None:
        began_s = time.thread_time()
        if self.navigator.history is None or not self._drawn.prepare(self.devicePixelRatioF(), self._read, self._draw):
            return
        self._names.show_rows(self.rows, self._column_read())
        if self._explains and [(row.lane.key, row.area.topLeft()) for row in self.rows] != self._placed:
            QTimer.singleShot(0, self, self._place_marks)  # not during painting
        self._drawing_s = time.thread_time() - began_s

    def _read(self) -> list[LaneRow]:
        history = self.navigator.history
        if history is None:
            return []
        lanes = lanes_of(history, machine=self._shows_machine)
        if [lane.key for lane in lanes] != [lane.key for lane in self._lanes]:
            self._lanes = lanes
            self.updateGeometry()
        areas = lane_areas(lanes, self.view.width(), self.view.height(), self.font())
        self._drawn_revision = history.revision
        return read_rows(lanes, areas, history, self.navigator.viewport, self._ceilings)

    def _draw(self, painter: QPainter) -> None:
        painter.setFont(axis_font(self.font()))
        if self.navigator.history is not None:
            draw_rows(painter, self.rows, self.navigator.history, self.navigator.viewport)

    def write_picture(self, path: Path) -> bool:
        self.refresh()  # include data that arrived since the last paint
        return super().write_picture(path)

    def _place_marks(self) -> None:
        self._placed = [(row.lane.key, row.area.topLeft()) for row in self.rows]
        before: QWidget = self
        left = sizes_for(self.font()).gutter - MARK_PX - GUTTER_GAP_PX
        for row in self.rows:
            lane, text = row.lane, lane_help(row.lane)
            if lane.key not in self._marks and text:
                self._marks[lane.key] = HelpMark(lane_words(lane.title), text, self.viewport())
            if (mark := self._marks.get(lane.key)) is not None:
                mark.move(left, round(row.area.top()) - 2)
                mark.show()
                QWidget.setTabOrder(before, mark)
                before = mark
        shown = {row.lane.key for row in self.rows}
        for key, mark in self._marks.items():
            if key not in shown:
                mark.hide()

    def _column_read(self) -> int:
        viewport = self.navigator.viewport
        if self.cursor_ns is not None and viewport.start_ns <= self.cursor_ns <= viewport.end_ns:
            return int((self.cursor_ns - viewport.edges()[0]) // viewport.column_ns)
        return viewport.width - 1

    def text_at(self, at: QPointF) -> str:
        return next((one.whole for one in self.labels() if one.shown != one.whole and one.area.contains(at)), "")

    # --- the mouse --------------------------------------------------------------------------------

    def on_click(self, at: QPointF, *, twice: bool) -> None:
        if not twice:
            self.clear_selection()
            self._find_token(at)
            self._token_is_kept = self.token is not None
        elif self.token is not None:
            self.navigator.show(self.token.start_ns, self.token.end_ns)
        else:
            self.navigator.zoom(0.25, self.navigator.viewport.at(at.x()))

    def on_hover(self, at: QPointF) -> None:
        self.set_cursor(self.navigator.viewport.at(at.x()))
        self._find_token(at)

    def _find_token(self, at: QPointF) -> None:
        if self._token_is_kept or not self.rows or self.navigator.history is None:
            return
        found = None
        if at.y() <= self.rows[0].area.bottom() + LANE_GAP_PX:
            reach = _TICK_REACH_PX * self.navigator.viewport.column_ns
            found = token_at(self.navigator.history, self.navigator.viewport.at(at.x()), reach)
        self._set_token(found)

    # --- keys -------------------------------------------------------------------------------------

    def keyPressEvent(self, event: QKeyEvent) -> None:
        shift = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        if not key_pressed(self, event.key(), shift=shift):
            event.ignore()

    # --- crosshair, selection, token --------------------------------------------------------------

    def set_cursor(self, at_ns: float | None) -> None:
        if at_ns == self.cursor_ns:
            return
        self.cursor_ns = at_ns
        self._names.show_rows(self.rows, self._column_read())
        self._place()
        self._say()
        self.pointed.emit(at_ns)

    def select(self, start_ns: float, end_ns: float) -> None:
        self.selection = (start_ns, end_ns)
        self._place()
        self._say()

    def clear_selection(self) -> None:
        self.selection, self.token, self._token_is_kept = None, None, False
        self._place()
        self._say()

    def step_token(self, direction: int) -> None:
        if self.navigator.history is None:
            return
        viewport = self.navigator.viewport
        at = self.token.end_ns if self.token is not None else viewport.end_ns
        found = token_beside(self.navigator.history, at, direction if self.token is not None else -1)
        if found is not None:
            self.navigator.freeze()
            if found.end_ns > viewport.end_ns or found.start_ns < viewport.start_ns:
                middle = (found.start_ns + found.end_ns) / 2
                self.navigator.pan((middle - viewport.start_ns) / viewport.span_ns - 0.5)
            self._token_is_kept = True
            self._set_token(found)

    def _set_token(self, token: TokenPath | None) -> None:
        if token is not self.token:
            self.token = token
            self._place()
            self._say()

    def _say(self) -> None:
        history, text = self.navigator.history, ""
        if history is not None and self.selection is not None:
            text = averages_text(history, *self.selection)
        elif self.token is not None:
            text = self.token.text()
        elif history is not None and self.cursor_ns is not None:
            column = self._column_read()
            ago = duration(self.cursor_ns - self.navigator.zero_ns)
            parts = [
                f"{lane_words(row.lane.title)} {said}"
                for row in self.rows
                if row.lane.kind != "phase" and (said := reading(row.lane, row.data, column))
            ]
            text = " · ".join((ago, *parts))
        if text != self._said:
            self._said = text
            self.said.emit(text)
