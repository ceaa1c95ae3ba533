"""Paints list markers: bullets, numbers and checkboxes."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QFontMetrics, QPainter, QPen

from app.theme import tabular
from app.widgets.markdown_view.segments import Marker
from app.widgets.markdown_view.style import Style

_NUMBER_GAP_EMS = 0.45


@dataclass(frozen=True, slots=True)
class PlacedMarker:
    """A marker beside the first line of its item."""

    marker: Marker
    depth: int
    text_edge: float  # where the item's text begins: its left edge, or its right edge in right-to-left text
    baseline: float
    is_right_to_left: bool

    def box(self, style: Style) -> QRectF:
        """The indentation beside the line, which the marker may fill."""
        width = max(style.indent, number_width(self.marker, style))
        left = self.text_edge if self.is_right_to_left else self.text_edge - width
        return QRectF(left, self.baseline - style.px(1.2), width, style.px(1.6))


def number_width(marker: Marker, style: Style) -> int:
    """The width a number needs beside its item, 0 for other markers."""
    if marker.number is None or marker.checked is not None:
        return 0
    return QFontMetrics(tabular(style.font)).horizontalAdvance(marker.text()) + round(style.px(1) * _NUMBER_GAP_EMS)


def paint_marker(painter: QPainter, placed: PlacedMarker, style: Style) -> None:
    theme, em = style.theme, style.px(1)
    side = 1 if placed.is_right_to_left else -1
    middle = placed.baseline - em * 0.36  # the middle of the small letters
    if placed.marker.checked is not None:
        size = round(em * 0.95)
        left = placed.text_edge + side * (style.indent * 0.62) - size / 2
        _paint_tick_box(painter, QRectF(round(left) + 0.5, round(middle - size / 2) + 0.5, size, size), placed, style)
    elif placed.marker.number is None:
        dot = max(3.0, em * 0.34)
        centre = QPointF(placed.text_edge + side * em * 0.72, middle)
        box = QRectF(centre.x() - dot / 2, centre.y() - dot / 2, dot, dot)
        painter.setPen(QPen(QColor(theme.muted), 1.2) if placed.depth == 2 else Qt.PenStyle.NoPen)
        painter.setBrush(Qt.BrushStyle.NoBrush if placed.depth == 2 else QColor(theme.muted))
        if placed.depth <= 2:
            painter.drawEllipse(box)
        else:
            painter.drawRect(box)
    else:
        painter.setFont(tabular(style.font))
        painter.setPen(QColor(theme.muted))
        text = placed.marker.text()
        width = painter.fontMetrics().horizontalAdvance(text)
        gap = em * _NUMBER_GAP_EMS
        left = placed.text_edge + gap if placed.is_right_to_left else placed.text_edge - gap - width
        painter.drawText(QPointF(left, placed.baseline), text)


def _paint_tick_box(painter: QPainter, box: QRectF, placed: PlacedMarker, style: Style) -> None:
    theme = style.theme
    radius = box.width() * 0.22
    if not placed.marker.checked:
        painter.setPen(QPen(QColor(theme.muted), 1.2))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRoundedRect(box, radius, radius)
        return
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(theme.accent))
    painter.drawRoundedRect(box.adjusted(-0.5, -0.5, 0.5, 0.5), radius, radius)
    pen = QPen(QColor(theme.on_accent), max(1.4, box.width() * 0.13))
    pen.setCapStyle(Qt.PenCapStyle.RoundCap)
    painter.setPen(pen)
    points = [
        box.topLeft() + QPointF(box.width() * x, box.height() * y)
        for x, y in ((0.24, 0.53), (0.43, 0.71), (0.77, 0.31))
    ]
    painter.drawPolyline(points)
