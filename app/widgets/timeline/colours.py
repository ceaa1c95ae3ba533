"""Colours of experts, and readable text on them."""

from __future__ import annotations

from PySide6.QtGui import QColor

from app.theme import themed

FILL_ALPHA, FAINT_ALPHA = 105, 55


def expert_colours() -> tuple[QColor, QColor, QColor]:
    """Of hits, fetches and experts computed on the CPU."""
    return themed("hit"), themed("pcie"), themed("miss")


def faded(colour: QColor, alpha: int) -> QColor:
    """The colour with this opacity, for backgrounds."""
    result = QColor(colour)
    result.setAlpha(alpha)
    return result


def text_on(colour: QColor) -> QColor:
    """Black or white, whichever has more contrast on `colour` (WCAG's relative luminance)."""

    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    luminance = 0.2126 * linear(colour.redF()) + 0.7152 * linear(colour.greenF()) + 0.0722 * linear(colour.blueF())
    return QColor("#14161A" if luminance > 0.18 else "#FFFFFF")
