"""A miniature timeline, for pages about something else."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QHideEvent, QKeyEvent, QMouseEvent, QPainter, QPen, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.services.background import timer
from app.services.telemetry_hub import TelemetryHub
from app.theme import tabular, themed
from app.widgets.chart import Chart
from app.widgets.timeline.lanes import lane_words, lanes_of, read_lane, reading, tracks_of
from app.widgets.timeline.navigator import BEHIND_NS, Viewport
from app.widgets.timeline.picture import LaneRow, LanesItem, scaled
from app.widgets.timeline.plots import draw_lane

HEIGHT_PX = 40
SPAN_NS = 20e9
_REFRESH_MS = 250
_GAP_PX = 14


class TimelineStrip(Chart):
    """The last twenty seconds of every lane.  It neither reads nor paints while hidden.

    Signals: `opened`, on click or Enter: the user wants to see the Monitor.
    """

    opened = Signal()

    def __init__(self, hub: TelemetryHub, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._hub = hub
        self._revision = -1
        self._drawn = LanesItem(self.view)
        self.view.sigResized.connect(lambda _view: self._drawn.forget())
        self.sceneObj.sigPrepareForPaint.connect(self._prepare)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(HEIGHT_PX)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setProperty("ring", True)
        self.setAccessibleName(self.tr("Machine activity"))
        self.setToolTip(self.tr("The last 20 seconds. Click for the Monitor."))
        self._refreshing = timer(self, self._refresh, _REFRESH_MS)
        self.dress()

    def dress(self) -> None:
        super().dress()
        self.setBackgroundBrush(themed("background"))
        self._drawn.forget()

    def sizeHint(self) -> QSize:
        return QSize(480, HEIGHT_PX)

    def _refresh(self) -> None:
        history = self._hub.history
        if history is not None and history.revision != self._revision:
            self._revision = history.revision
            self._drawn.forget()
            self.viewport().update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refreshing.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refreshing.stop()

    def _prepare(self) -> None:
        if self._drawn.prepare(self.devicePixelRatioF(), self._read, self._draw):
            said = (
                f"{lane_words(row.lane.title)} {reading(row.lane, row.data, self._viewport(row.area).width - 1)}"
                for row in self._rows
            )
            self.setAccessibleDescription(", ".join(said))

    @property
    def _rows(self) -> list[LaneRow]:
        return self._drawn.rows

    def _viewport(self, area: QRectF) -> Viewport:
        end_ns = (self._hub.history.end_ns if self._hub.history is not None else None) or 0
        return Viewport(end_ns - BEHIND_NS - SPAN_NS, SPAN_NS, max(round(area.width()), 1))

    def _read(self) -> list[LaneRow]:
        history = self._hub.history
        if history is None or history.end_ns is None:
            return []
        lanes = [lane for lane in lanes_of(history, machine=False) if lane.in_strip or lane.gauges]
        lanes = [lane for lane in lanes if lane.key != "disk" or history.devices(tracks_of(lane)[0])][:6]
        width = (self.view.width() - _GAP_PX * (len(lanes) - 1)) / max(len(lanes), 1)
        areas = [QRectF(index * (width + _GAP_PX), 15, width, self.view.height() - 18) for index in range(len(lanes))]
        return [
            LaneRow(lane, at, read_lane(lane, history, self._viewport(at), {}))
            for lane, at in zip(lanes, areas, strict=True)
        ]

    def _draw(self, painter: QPainter) -> None:
        painter.setFont(scaled(tabular(self.font()), 0.76))
        for row in self._rows:
            area, viewport = row.area, self._viewport(row.area)
            painter.setPen(themed("muted"))
            label = QRectF(area.left(), 0, area.width(), 14)
            painter.drawText(
                label, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, lane_words(row.lane.title)
            )
            if row.lane.kind != "experts":
                text = reading(row.lane, row.data, viewport.width - 1)
                painter.drawText(label, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, text)
            painter.save()
            painter.setClipRect(area)
            xs = area.left() + (viewport.edges() - viewport.start_ns) / viewport.column_ns
            draw_lane(painter, area, xs, row.lane, row.data, themed(row.lane.colour))
            painter.restore()
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(area.bottomLeft(), area.bottomRight())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if self.rect().contains(event.position().toPoint()):
            self.opened.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.opened.emit()
        else:
            event.ignore()
