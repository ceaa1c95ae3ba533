"""Fonts in proportion to another, whichever way its size was given."""

from __future__ import annotations

from PySide6.QtGui import QFont

from app.theme import BODY_PX, tabular


def small_font(font: QFont, px: float) -> QFont:
    """A font that is `px` high where body text has its usual size, with digits of equal width."""
    result = tabular(font)
    share = px / BODY_PX
    if font.pointSizeF() > 0:
        result.setPointSizeF(font.pointSizeF() * share)
    else:  # before a style sheet has given it points
        result.setPixelSize(max(1, round(font.pixelSize() * share)))
    return result
