"""Colours of lanes by theme, and text that can be read on them."""

from __future__ import annotations

from PySide6.QtGui import QColor

from app.theme import Theme
from app.widgets.timeline.lanes import Colour

FILL_ALPHA, FAINT_ALPHA = 105, 55


def lane_colour(theme: Theme, name: Colour) -> QColor:
    """The lane's own colour."""
    return QColor({"gpu": theme.gpu, "cpu": theme.cpu, "pcie": theme.pcie, "disk": theme.disk}.get(name, theme.muted))


def expert_colours(theme: Theme) -> tuple[QColor, QColor, QColor]:
    """Of hits, fetched ones and those computed on the CPU."""
    return QColor(theme.hit), QColor(theme.pcie), QColor(theme.miss)


def faded(colour: QColor, alpha: int) -> QColor:
    """The colour, as something lies behind it."""
    result = QColor(colour)
    result.setAlpha(alpha)
    return result


def text_on(colour: QColor) -> QColor:
    """Black or white, whichever is easier to read on `colour` (WCAG's relative luminance)."""

    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    luminance = 0.2126 * linear(colour.redF()) + 0.7152 * linear(colour.greenF()) + 0.0722 * linear(colour.blueF())
    return QColor("#14161A" if luminance > 0.18 else "#FFFFFF")
