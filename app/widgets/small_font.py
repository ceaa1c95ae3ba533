"""Fonts sized relative to another, whether that one is in points or pixels."""

from __future__ import annotations

from PySide6.QtGui import QFont

from app.theme import BODY_PX, tabular


def small_font(font: QFont, px: float) -> QFont:
    """A font that is `px` high when body text has its default size, with tabular digits."""
    result = tabular(font)
    share = px / BODY_PX
    if font.pointSizeF() > 0:
        result.setPointSizeF(font.pointSizeF() * share)
    else:  # no style sheet has set points yet
        result.setPixelSize(max(1, round(font.pixelSize() * share)))
    return result
