"""What lies above the picture: names of lanes and what they read, crosshair, selection, a token's path."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QPainter, QPen

from app.theme import Theme, tabular
from app.widgets.timeline.blocks import draw_path
from app.widgets.timeline.colours import FAINT_ALPHA, faded
from app.widgets.timeline.lanes import reading
from app.widgets.timeline.picture import GUTTER_PX, Row, scaled
from app.widgets.timeline.readout import TokenPath
from app.widgets.timeline.viewport import Viewport
from engine.telemetry.lanes import SMALL_COPY

translate = QCoreApplication.translate

_TOKEN_ALPHA = 22


def draw_gutter(painter: QPainter, rows: list[Row], column: int, font: QFont, theme: Theme) -> None:
    """Each lane's name, and under it what it reads at `column`."""
    title, caption = scaled(font, 0.9), scaled(tabular(font), 0.8)
    title.setWeight(QFont.Weight.DemiBold)
    for row in rows:
        area = QRectF(0, row.area.top() - 1, GUTTER_PX - 10, row.area.height() + 4)
        painter.setFont(title)
        painter.setPen(QColor(theme.text))
        painter.drawText(area, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop, row.lane.title)
        height = painter.fontMetrics().height()
        painter.setFont(caption)
        painter.setPen(QColor(theme.muted))
        is_phase = row.lane.kind == "phase"
        text = translate("Timeline", "token ticks") if is_phase else reading(row.lane, row.data, column)
        below = area.adjusted(0, height, 0, 2)
        if below.height() >= painter.fontMetrics().height() - 3:
            flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop
            painter.drawText(below, int(flags | Qt.TextFlag.TextWordWrap), text)


def draw_selection(
    painter: QPainter, rows: list[Row], viewport: Viewport, selection: tuple[float, float], theme: Theme
) -> None:
    """The stretch that is averaged."""
    left, right = (_x(viewport, at) for at in selection)
    rect = QRectF(left, 0, right - left, rows[-1].area.bottom())
    painter.fillRect(rect, faded(QColor(theme.accent), FAINT_ALPHA))
    painter.setPen(QPen(QColor(theme.accent), 1))
    painter.drawRect(rect)


def draw_token(painter: QPainter, rows: list[Row], viewport: Viewport, token: TokenPath, theme: Theme) -> None:
    """What a token waited for, through the lanes."""
    areas = {lane: row.area for row in rows for lane in row.lane.spans}
    to_device = next((row.area for row in rows if row.lane.key == "h2d"), None)
    if to_device is not None:
        areas.setdefault(SMALL_COPY, to_device)
    left, right = _x(viewport, token.start_ns), _x(viewport, token.end_ns)
    whole = QRectF(left, 0, max(right - left, 1), rows[-1].area.bottom())
    painter.fillRect(whole, faded(QColor(theme.muted), _TOKEN_ALPHA))
    pieces = [(_x(viewport, start), _x(viewport, end), lane) for start, end, lane in token.pieces]
    draw_path(painter, areas, pieces, theme)


def draw_cursor(painter: QPainter, rows: list[Row], viewport: Viewport, at_ns: float, theme: Theme) -> None:
    """The crosshair."""
    x = _x(viewport, at_ns)
    painter.setPen(QPen(QColor(theme.muted), 1, Qt.PenStyle.DashLine))
    painter.drawLine(QPointF(x, 0), QPointF(x, rows[-1].area.bottom()))


def _x(viewport: Viewport, at_ns: float) -> float:
    return min(max(GUTTER_PX + viewport.x(at_ns), -1e5), 1e5)
