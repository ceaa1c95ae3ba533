"""A miniature timeline, for pages about something else."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPen, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.services.telemetry_hub import TelemetryHub
from app.theme import tabular, themed
from app.widgets.timeline.lanes import Lane, lanes_of, read_lane, reading
from app.widgets.timeline.navigator import BEHIND_NS
from app.widgets.timeline.picture import scaled
from app.widgets.timeline.plots import draw_lane
from app.widgets.timeline.viewport import Viewport

HEIGHT_PX = 40
SPAN_NS = 20e9
_REFRESH_MS = 250
_GAP_PX = 14
_LANES = ("gpu", "h2d", "cpu", "disk", "experts", "tokens")


class TimelineStrip(QWidget):
    """The last twenty seconds of every lane.  It neither reads nor paints while hidden.

    Signals: `opened`, on click or Enter: the user wants to see the Monitor.
    """

    opened = Signal()

    def __init__(self, hub: TelemetryHub, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._hub = hub
        self._revision = -1
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(HEIGHT_PX)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setAccessibleName(self.tr("Machine activity"))
        self.setToolTip(self.tr("The last 20 seconds. Click for the Monitor."))
        self._refreshing = QTimer(self, interval=_REFRESH_MS)
        self._refreshing.timeout.connect(self._refresh)

    def sizeHint(self) -> QSize:
        return QSize(480, HEIGHT_PX)

    def _refresh(self) -> None:
        history = self._hub.history
        if history is not None and history.revision != self._revision:
            self._revision = history.revision
            self.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refreshing.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._refreshing.stop()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        history = self._hub.history
        if history is None or history.end_ns is None:
            return
        lanes: list[Lane] = [lane for lane in lanes_of(history, machine=False) if lane.key in _LANES or lane.gauges]
        lanes = [lane for lane in lanes if lane.key != "disk" or history.devices(lane.spans[0])][:6]
        if not lanes:
            return
        painter = QPainter(self)
        painter.setFont(scaled(tabular(self.font()), 0.76))
        width = (self.width() - _GAP_PX * (len(lanes) - 1)) / len(lanes)
        spoken = []
        for index, lane in enumerate(lanes):
            left = index * (width + _GAP_PX)
            area = QRectF(left, 15, width, HEIGHT_PX - 18)
            viewport = Viewport(history.end_ns - BEHIND_NS - SPAN_NS, SPAN_NS, max(round(width), 1))
            data = read_lane(lane, history, viewport, {})
            text = reading(lane, data, viewport.width - 1)
            spoken.append(f"{lane.title} {text}")
            label = QRectF(left, 0, width, 14)
            painter.setPen(themed("muted"))
            painter.drawText(label, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, lane.title)
            if lane.kind != "experts":
                painter.drawText(label, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, text)
            painter.save()
            painter.setClipRect(area)
            xs = left + (viewport.edges() - viewport.start_ns) / viewport.column_ns
            draw_lane(painter, area, xs, lane, data, themed(lane.colour))
            painter.restore()
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(area.bottomLeft(), area.bottomRight())
        self.setAccessibleDescription(", ".join(spoken))
        if self.hasFocus():
            painter.setPen(QPen(themed("accent"), 2))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 6, 6)
        painter.end()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if self.rect().contains(event.position().toPoint()):
            self.opened.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.opened.emit()
        else:
            event.ignore()
