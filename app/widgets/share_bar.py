"""How experts were served, as one bar: hit, fetched, computed on the CPU; hatching tells them apart too."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import themed
from app.widgets.timeline.colours import expert_colours, faded

PATTERNS = (Qt.BrushStyle.SolidPattern, Qt.BrushStyle.FDiagPattern, Qt.BrushStyle.BDiagPattern)
"""The same as in the timeline."""


class ShareBar(QWidget):
    """Shares of hits, fetches and CPU computation; with only one share it serves as a legend swatch."""

    def __init__(self, size: QSize, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._size = size
        self._shares = (0.0, 0.0, 0.0)
        wide = QSizePolicy.Policy.Fixed if size.width() <= size.height() + 2 else QSizePolicy.Policy.Expanding
        self.setSizePolicy(wide, QSizePolicy.Policy.Fixed)

    def show_shares(self, hit: float, fetched: float, on_cpu: float) -> None:
        """Any amounts: they are shown as shares of their sum."""
        if (hit, fetched, on_cpu) != self._shares:
            self._shares = hit, fetched, on_cpu
            self.update()

    def sizeHint(self) -> QSize:
        return self._size

    def minimumSizeHint(self) -> QSize:
        return self._size

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.fillRect(self.rect(), themed("border"))
        total = sum(self._shares)
        left = 0.0
        for share, colour, pattern in zip(self._shares, expert_colours(), PATTERNS, strict=True):
            area = QRectF(left, 0, self.width() * share / total if total > 0 else 0.0, self.height())
            if pattern is not Qt.BrushStyle.SolidPattern:
                painter.fillRect(area, faded(colour, 170))
            painter.fillRect(area, QBrush(colour, pattern))
            left += area.width()
        painter.end()
