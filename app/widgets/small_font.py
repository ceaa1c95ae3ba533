"""Fonts sized relative to another, whether that one is in points or pixels, and lines and pills painted in one."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter

from app.theme import BODY_PX, ColourName, tabular, themed


def small_font(font: QFont, px: float) -> QFont:
    """A font that is `px` high when body text has its default size, with tabular digits."""
    result = tabular(font)
    share = px / BODY_PX
    if font.pointSizeF() > 0:
        result.setPointSizeF(font.pointSizeF() * share)
    else:  # no style sheet has set points yet
        result.setPixelSize(max(1, round(font.pixelSize() * share)))
    return result


def draw_elided(
    painter: QPainter,
    area: QRectF,
    text: str,
    font: QFont,
    colour: ColourName,
    mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight,
) -> None:
    """Paints one line at the left of `area`, in the middle of its height; what does not fit is elided."""
    painter.setFont(font)
    painter.setPen(themed(colour))
    shown = QFontMetricsF(font).elidedText(text, mode, area.width())
    painter.drawText(area, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, shown)


def pills_width(texts: Sequence[str], font: QFont) -> float:
    """How much room `draw_pills` takes."""
    metrics = QFontMetricsF(font)
    return sum(metrics.horizontalAdvance(text) + 14 + 6 for text in texts)


def draw_pills(
    painter: QPainter, left: float, middle: float, texts: Sequence[str], font: QFont, first_edge: ColourName = "border"
) -> None:
    """Paints short labels in a row; the first one's edge may have a colour of its own."""
    metrics = QFontMetricsF(font)
    high = metrics.height() + 4
    painter.setFont(font)
    painter.setBrush(themed("surface"))
    for at, text in enumerate(texts):
        pill = QRectF(left, middle - high / 2, metrics.horizontalAdvance(text) + 14, high)
        painter.setPen(themed("border" if at else first_edge))
        painter.drawRoundedRect(pill, high / 2, high / 2)
        painter.setPen(themed("muted"))
        painter.drawText(pill, Qt.AlignmentFlag.AlignCenter, text)
        left += pill.width() + 6
