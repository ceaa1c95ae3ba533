"""A sparkline of a share over the last minutes, shown beside its number."""

from __future__ import annotations

from collections import deque

import numpy as np
from PySide6.QtCore import QLineF, QRectF, QSize
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import colours, themed
from app.widgets.timeline.plots import draw_line

VALUES = 180
"""One per second: three minutes."""


class RateLine(QWidget):
    """From 0 at the bottom to 1 at the top; unknown values leave a gap."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._values: deque[float] = deque(maxlen=VALUES)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    @property
    def values(self) -> tuple[float, ...]:
        """The last values; NaN where unknown."""
        return tuple(self._values)

    def add(self, value: float | None) -> None:
        """Appends a value; None if unknown."""
        self._values.append(np.nan if value is None else value)
        self.update()

    def clear(self) -> None:
        """Removes all values, for another model or none."""
        self._values.clear()
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(110, 22)

    def minimumSizeHint(self) -> QSize:
        return QSize(40, 18)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        area = QRectF(self.rect()).adjusted(0.5, 2.5, -0.5, -2.5)
        painter.setPen(QPen(themed("border"), 1))
        for y in (area.top(), area.bottom()):
            painter.drawLine(QLineF(area.left(), y, area.right(), y))
        if len(self._values) > 1:
            values = np.array(self._values)
            # The newest is at the right edge, however few there are.
            xs = area.right() - area.width() * np.arange(len(values), -1, -1) / VALUES
            colour = themed("hit") if colours().is_dark else themed("hit").darker(150)
            draw_line(painter, area, xs, values, QPen(colour, 1.5))
        painter.end()
