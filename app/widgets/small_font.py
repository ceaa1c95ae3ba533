"""Fonts sized relative to another, whether that one is in points or pixels, and a line painted in one."""

from __future__ import annotations

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
