"""The timeline widget: mouse, keys, and what follows them."""

from __future__ import annotations

import time

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QHelpEvent,
    QHideEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QPixmap,
    QResizeEvent,
    QShowEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.services.history.history import History
from app.theme import themed
from app.widgets.help_mark import MARK_PX, HelpMark
from app.widgets.timeline.keys import PAN, ZOOM, key_pressed
from app.widgets.timeline.lane_words import lane_explanation
from app.widgets.timeline.lanes import Lane, LaneData, lanes_of, read_lane, reading
from app.widgets.timeline.navigator import Navigator
from app.widgets.timeline.overlay import (
    GutterLabel,
    draw_cursor,
    draw_gutter,
    draw_selection,
    draw_token,
    gutter_labels,
)
from app.widgets.timeline.picture import (
    GUTTER_GAP_PX,
    LANE_GAP_PX,
    RIGHT_PX,
    LaneRow,
    axis_font,
    draw_rows,
    lane_areas,
    least_height,
    read_rows,
    sizes_for,
)
from app.widgets.timeline.readout import TokenPath, averages_text, token_at, token_beside
from app.widgets.timeline.viewport import duration

_DRAG_PX = 4
_EMPTY_PX = 233
_TICK_REACH_PX = 6.0
_REFRESH_MS = (100, 1000)
_NEW_COLUMNS = 10
"""Pause between two paints."""
_PAINTING_PART = 1 / 40
"""Maximum share of time spent painting: a slow paint lengthens the pause."""


class TimelineView(QWidget):
    """Shows the range of `navigator`.  It neither reads nor paints while hidden.

    Signals:
        said(str): about the crosshair, the selection or the selected token; empty if there is none.
        pointed(object): the time at the crosshair, nanoseconds; None when it disappears.
    """

    said = Signal(str)
    pointed = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.navigator = Navigator(self)
        self._shows_machine = False
        self._ceilings: dict[str, float] = {}
        self._rows: list[LaneRow] = []
        self._lanes: list[Lane] = []
        self._picture: QPixmap | None = None
        self._drawn_revision = -1
        self._drawing_s = 0.0
        self._cursor_ns: float | None = None
        self._selection: tuple[float, float] | None = None
        self._pressed: QPointF | None = None
        self._panning = False
        self._token: TokenPath | None = None
        self._token_is_kept = False
        self._said = ""
        self._marks: dict[str, HelpMark] = {}
        self._explains = False
        self._placed: list[tuple[str, QPointF]] = []
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(self.tr("Timeline"))
        self.setAccessibleDescription(
            self.tr(
                "Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, "
                "square brackets step through tokens, Enter zooms to a token. The table has the same data as text."
            )
        )
        self._refreshing = QTimer(self)
        self._refreshing.timeout.connect(self.refresh)
        self.navigator.moved.connect(self._redraw)

    # --- what is shown ----------------------------------------------------------------------------

    @property
    def rows(self) -> list[LaneRow]:
        """The lanes as last drawn."""
        return self._rows

    def set_shows_machine(self, shows: bool) -> None:
        """Whether to show the sensors' lanes below the engine's."""
        self._shows_machine = shows
        self._redraw()
        self.updateGeometry()

    @property
    def marks(self) -> dict[str, HelpMark]:
        """Help marks of the visible lanes, by key."""
        return {lane.key: self._marks[lane.key] for lane in self._lanes if lane.key in self._marks}

    def explain_lanes(self) -> None:
        """Adds a help mark to each lane's name."""
        self._explains = True
        self._place_marks()

    def set_ceilings(self, ceilings: dict[str, float]) -> None:
        """Measured limits by lane, bytes per second."""
        if ceilings != self._ceilings:
            self._ceilings = ceilings
            self._redraw()

    def labels(self) -> list[GutterLabel]:
        """The text to the left of the plots, as painted."""
        return gutter_labels(self._rows, self._column_read(), self.font()) if self._rows else []

    def read_lanes(self) -> list[tuple[Lane, LaneData]]:
        """The lanes and their current data, painted or not."""
        history = self.navigator.history
        if history is None:
            return []
        self.navigator.follow()
        lanes = lanes_of(history, machine=self._shows_machine)
        return [(lane, read_lane(lane, history, self.navigator.viewport, self._ceilings)) for lane in lanes]

    def refresh(self) -> None:
        """Redraws if there is new data."""
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

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._redraw()

    def _redraw(self) -> None:
        self._picture = None
        columns_ms = _NEW_COLUMNS * self.navigator.viewport.column_ns / 1e6
        wanted_ms = max(columns_ms, 1000 * self._drawing_s / _PAINTING_PART)
        self._refreshing.setInterval(int(min(max(wanted_ms, _REFRESH_MS[0]), _REFRESH_MS[1])))
        self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refreshing.start()
        self._drawn_revision = -1
        self.refresh()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refreshing.stop()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()
        self._redraw()

    def _fit(self) -> None:
        """As many columns as fit beside the names."""
        columns = max(self.width() - self._gutter - RIGHT_PX, 1)
        if columns != self.navigator.viewport.width:
            self.navigator.set_width(columns)

    @property
    def _gutter(self) -> int:
        return sizes_for(self.font()).gutter

    # --- painting ---------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        history = self.navigator.history
        if history is None:
            return
        if self._picture is None or self._picture.devicePixelRatio() != self.devicePixelRatioF():
            self._picture = self._draw(history)
        painter = QPainter(self)
        painter.drawPixmap(0, 0, self._picture)
        self._draw_above(painter)
        if self.hasFocus():
            painter.setPen(QPen(themed("accent"), 2))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 6, 6)
        painter.end()

    def paint_onto(self, painter: QPainter) -> None:
        """Draws it as paths, for vector graphics."""
        history = self.navigator.history
        if history is not None:
            if self._picture is None:  # lanes are read when they are drawn
                self._picture = self._draw(history)
            painter.fillRect(self.rect(), themed("surface"))
            painter.setFont(axis_font(self.font()))
            self._draw_lanes(painter, history)
            self._draw_above(painter)

    def _draw_above(self, painter: QPainter) -> None:
        """What follows the mouse."""
        rows, viewport = self._rows, self.navigator.viewport
        if rows:
            painter.save()
            painter.setClipRect(self._plot())
            if self._selection is not None:
                draw_selection(painter, rows, viewport, self._selection)
            if self._token is not None:
                draw_token(painter, rows, viewport, self._token)
            if self._cursor_ns is not None:
                draw_cursor(painter, rows, viewport, self._cursor_ns)
            painter.restore()
            draw_gutter(painter, self.labels(), self.font())

    def _draw(self, history: History) -> QPixmap:
        began_s = time.thread_time()
        ratio = self.devicePixelRatioF()
        picture = QPixmap(round(self.width() * ratio), round(self.height() * ratio))
        picture.setDevicePixelRatio(ratio)
        picture.fill(Qt.GlobalColor.transparent)
        lanes = lanes_of(history, machine=self._shows_machine)
        if [lane.key for lane in lanes] != [lane.key for lane in self._lanes]:
            self._lanes = lanes
            self.updateGeometry()
        self._fit()
        areas = lane_areas(lanes, self.width(), self.height(), self.font())
        viewport = self.navigator.viewport
        self._drawn_revision = history.revision
        self._rows = read_rows(lanes, areas, history, viewport, self._ceilings)
        if self._explains and [(row.lane.key, row.area.topLeft()) for row in self._rows] != self._placed:
            QTimer.singleShot(0, self, self._place_marks)  # not during painting
        painter = QPainter(picture)
        painter.setFont(axis_font(self.font()))
        self._draw_lanes(painter, history)
        painter.end()
        self._drawing_s = time.thread_time() - began_s
        return picture

    def _place_marks(self) -> None:
        """Places a help mark to the right of each lane's name; tab order follows the lanes."""
        self._placed = [(row.lane.key, row.area.topLeft()) for row in self._rows]
        before: QWidget = self
        for row in self._rows:
            lane, text = row.lane, lane_explanation(row.lane.key)
            if lane.key not in self._marks and text:
                self._marks[lane.key] = HelpMark(lane.title, text, self)
            if (mark := self._marks.get(lane.key)) is not None:
                mark.move(round(row.area.left()) - MARK_PX - GUTTER_GAP_PX, round(row.area.top()) - 2)
                mark.show()
                QWidget.setTabOrder(before, mark)
                before = mark
        shown = {row.lane.key for row in self._rows}
        for key, mark in self._marks.items():
            if key not in shown:
                mark.hide()

    def _draw_lanes(self, painter: QPainter, history: History) -> None:
        navigator = self.navigator
        zero_ns = navigator.zero_ns
        draw_rows(
            painter,
            self._rows,
            history,
            navigator.viewport,
            zero_ns=zero_ns,
            is_recorded=navigator.is_recorded,
        )

    def _column_read(self) -> int:
        """The column under the crosshair, or the last one."""
        viewport = self.navigator.viewport
        if self._cursor_ns is not None and viewport.start_ns <= self._cursor_ns <= viewport.end_ns:
            return int((self._cursor_ns - viewport.edges()[0]) // viewport.column_ns)
        return viewport.width - 1

    def _plot(self) -> QRectF:
        bottom = self._rows[-1].area.bottom() if self._rows else self.height()
        return QRectF(self._gutter, 0, max(self.width() - self._gutter - RIGHT_PX, 1), bottom)

    def _at(self, x: float) -> float:
        return self.navigator.viewport.at(x - self._gutter)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.tip_at(QPointF(event.pos())), self)
            return True
        return super().event(event)

    def tip_at(self, at: QPointF) -> str:
        """The full text where it is painted elided; empty elsewhere."""
        return next((one.whole for one in self.labels() if one.shown != one.whole and one.area.contains(at)), "")

    # --- the mouse --------------------------------------------------------------------------------

    def mousePressEvent(self, event: QMouseEvent) -> None:
        self._pressed = event.position()
        self._panning = event.button() == Qt.MouseButton.MiddleButton or bool(
            event.modifiers() & Qt.KeyboardModifier.ShiftModifier
        )

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        at = event.position()
        if self._pressed is not None and self._panning:
            self.navigator.pan((self._pressed.x() - at.x()) / max(self.navigator.viewport.width, 1))
            self._pressed = at
        elif self._pressed is not None and abs(at.x() - self._pressed.x()) > _DRAG_PX:
            self.navigator.freeze()  # a selection must not scroll away
            self.select(*sorted((self._at(self._pressed.x()), self._at(at.x()))))
        elif self._plot().contains(at):
            self.set_cursor(self._at(at.x()))
            self._find_token(at)
        else:
            self.set_cursor(None)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        was_click = self._pressed is not None and abs(event.position().x() - self._pressed.x()) <= _DRAG_PX
        if was_click and not self._panning:
            self.clear_selection()
            self._find_token(event.position())
            self._token_is_kept = self._token is not None
        self._pressed, self._panning = None, False

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        if self._token is not None:
            self.navigator.show(self._token.start_ns, self._token.end_ns)
        else:
            self.navigator.zoom(0.25, self._at(event.position().x()))

    def leaveEvent(self, event: object) -> None:  # noqa: ARG002
        self.set_cursor(None)

    def wheelEvent(self, event: QWheelEvent) -> None:
        if not self._plot().contains(event.position()):
            event.ignore()
            return
        sideways = event.angleDelta().x()
        if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            sideways = sideways or event.angleDelta().y()
        if sideways:
            self.navigator.pan(-sideways / 120 * PAN)
        elif event.angleDelta().y():
            self.navigator.zoom(ZOOM ** (-event.angleDelta().y() / 120), self._at(event.position().x()))
        event.accept()

    def _find_token(self, at: QPointF) -> None:
        if self._token_is_kept or not self._rows or self.navigator.history is None:
            return
        found = None
        if at.y() <= self._rows[0].area.bottom() + LANE_GAP_PX:
            reach = _TICK_REACH_PX * self.navigator.viewport.column_ns
            found = token_at(self.navigator.history, self._at(at.x()), reach)
        self._set_token(found)

    # --- keys -------------------------------------------------------------------------------------

    def keyPressEvent(self, event: QKeyEvent) -> None:
        shift = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        if not key_pressed(self, event.key(), shift=shift):
            event.ignore()

    # --- crosshair, selection, token --------------------------------------------------------------

    @property
    def cursor_ns(self) -> float | None:
        """The time at the crosshair."""
        return self._cursor_ns

    @property
    def selection(self) -> tuple[float, float] | None:
        """The selected range."""
        return self._selection

    @property
    def token(self) -> TokenPath | None:
        """The token selected or under the mouse."""
        return self._token

    def set_cursor(self, at_ns: float | None) -> None:
        """Moves the crosshair to a time, or hides it."""
        self._cursor_ns = at_ns
        self._say()
        self.update()
        self.pointed.emit(at_ns)

    def select(self, start_ns: float, end_ns: float) -> None:
        """Selects a range and reports its averages."""
        self._selection = (start_ns, end_ns)
        self._say()
        self.update()

    def clear_selection(self) -> None:
        """Clears the selected range and token."""
        self._selection, self._token, self._token_is_kept = None, None, False
        self._say()
        self.update()

    def step_token(self, direction: int) -> None:
        """Selects the token after the selected one, or before it; without a selection, the last visible one."""
        if self.navigator.history is None:
            return
        viewport = self.navigator.viewport
        at = self._token.end_ns if self._token is not None else viewport.end_ns
        found = token_beside(self.navigator.history, at, direction if self._token is not None else -1)
        if found is not None:
            self.navigator.freeze()
            if found.end_ns > viewport.end_ns or found.start_ns < viewport.start_ns:
                middle = (found.start_ns + found.end_ns) / 2
                self.navigator.pan((middle - viewport.start_ns) / viewport.span_ns - 0.5)
            self._token_is_kept = True
            self._set_token(found)

    def _set_token(self, token: TokenPath | None) -> None:
        if token is not self._token:
            self._token = token
            self._say()
            self.update()

    def _say(self) -> None:
        history, text = self.navigator.history, ""
        if history is not None and self._selection is not None:
            text = averages_text(history, *self._selection)
        elif self._token is not None:
            text = self._token.text()
        elif history is not None and self._cursor_ns is not None:
            column = self._column_read()
            ago = duration(self._cursor_ns - self.navigator.zero_ns)
            parts = [
                f"{row.lane.title} {said}"
                for row in self._rows
                if row.lane.kind != "phase" and (said := reading(row.lane, row.data, column))
            ]
            text = " · ".join((ago, *parts))
        if text != self._said:
            self._said = text
            self.said.emit(text)
