"""Drawn above the picture: lane names and readings, crosshair, selection, a token's path."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QPointF, QRectF, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter, QPen

from app.theme import themed
from app.widgets.help_mark import MARK_PX
from app.widgets.timeline.blocks import draw_path
from app.widgets.timeline.colours import FAINT_ALPHA, faded
from app.widgets.timeline.lanes import reading
from app.widgets.timeline.picture import GUTTER_GAP_PX, LaneRow, caption_font, title_font
from app.widgets.timeline.readout import TokenPath
from app.widgets.timeline.viewport import Viewport
from engine.telemetry.lanes import SMALL_COPY

translate = QCoreApplication.translate

_TOKEN_ALPHA = 22
_LINE = int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
_WRAPPED = int(_LINE | Qt.TextFlag.TextWordWrap)


@dataclass(frozen=True, slots=True)
class GutterLabel:
    """Text to the left of a plot.

    Attributes:
        whole: the full text; `shown` is elided if it does not fit.
        is_title: the lane's name, not its reading.
    """

    area: QRectF
    whole: str
    shown: str
    is_title: bool


def gutter_labels(rows: list[LaneRow], column: int, font: QFont) -> list[GutterLabel]:
    """Each lane's name, and below it its reading at `column`."""
    title, caption = QFontMetricsF(title_font(font)), QFontMetricsF(caption_font(font))
    found = []
    for row in rows:
        width = row.area.left() - GUTTER_GAP_PX
        line = QRectF(0, row.area.top() - 1, width - MARK_PX, title.height())
        name = row.lane.title
        shown = title.elidedText(name, Qt.TextElideMode.ElideRight, line.width())
        found.append(GutterLabel(line, name, shown, is_title=True))
        below = QRectF(0, line.bottom(), width, row.area.bottom() + 5 - line.bottom())
        is_phase = row.lane.kind == "phase"
        text = translate("Timeline", "token ticks") if is_phase else reading(row.lane, row.data, column)
        if text:
            wrapped = caption.boundingRect(below, _WRAPPED, text)
            fits = wrapped.height() <= below.height() + 1 and wrapped.width() <= below.width() + 1
            shown = text if fits else caption.elidedText(text, Qt.TextElideMode.ElideRight, below.width())
            found.append(GutterLabel(below, text, shown, is_title=False))
    return found


def draw_gutter(painter: QPainter, labels: list[GutterLabel], font: QFont) -> None:
    """The text to the left of the plots."""
    title, caption = title_font(font), caption_font(font)
    for label in labels:
        painter.setFont(title if label.is_title else caption)
        painter.setPen(themed("text" if label.is_title else "muted"))
        painter.drawText(label.area, _WRAPPED if label.shown == label.whole else _LINE, label.shown)


def draw_selection(painter: QPainter, rows: list[LaneRow], viewport: Viewport, selection: tuple[float, float]) -> None:
    """The selected range."""
    left, right = (_x(rows, viewport, at) for at in selection)
    rect = QRectF(left, 0, right - left, rows[-1].area.bottom())
    painter.fillRect(rect, faded(themed("accent"), FAINT_ALPHA))
    painter.setPen(QPen(themed("accent"), 1))
    painter.drawRect(rect)


def draw_token(painter: QPainter, rows: list[LaneRow], viewport: Viewport, token: TokenPath) -> None:
    """A token's critical path through the lanes."""
    areas = {lane: row.area for row in rows for lane in row.lane.spans}
    to_device = next((row.area for row in rows if row.lane.key == "h2d"), None)
    if to_device is not None:
        areas.setdefault(SMALL_COPY, to_device)
    left, right = _x(rows, viewport, token.start_ns), _x(rows, viewport, token.end_ns)
    whole = QRectF(left, 0, max(right - left, 1), rows[-1].area.bottom())
    painter.fillRect(whole, faded(themed("muted"), _TOKEN_ALPHA))
    pieces = [(_x(rows, viewport, start), _x(rows, viewport, end), lane) for start, end, lane in token.pieces]
    draw_path(painter, areas, pieces)


def draw_cursor(painter: QPainter, rows: list[LaneRow], viewport: Viewport, at_ns: float) -> None:
    """The crosshair."""
    x = _x(rows, viewport, at_ns)
    painter.setPen(QPen(themed("muted"), 1, Qt.PenStyle.DashLine))
    painter.drawLine(QPointF(x, 0), QPointF(x, rows[-1].area.bottom()))


def _x(rows: list[LaneRow], viewport: Viewport, at_ns: float) -> float:
    return min(max(rows[0].area.left() + viewport.x(at_ns), -1e5), 1e5)
