"""A thin bar of what a memory is used for."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import ColourName, themed

HEIGHT_PX = 8
RADIUS_PX = 2.5


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """One part: its name for the legend, its bytes, its colour, and whether it is hatched because it is not ours."""

    name: str
    amount: int
    colour: ColourName
    hatched: bool = False


class MemoryBar(QWidget):
    """Parts side by side, in proportion to `total`; the rest is free."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._parts: tuple[MemoryShare, ...] = ()
        self._total = 0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(120, HEIGHT_PX)

    def show_parts(self, parts: tuple[MemoryShare, ...], total: int) -> None:
        """`total` in bytes; parts beyond it are cut off."""
        if (parts, total) != (self._parts, self._total):
            self._parts, self._total = parts, total
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        outline = QPainterPath()
        outline.addRoundedRect(QRectF(self.rect()), RADIUS_PX, RADIUS_PX)
        painter.setClipPath(outline)
        painter.fillRect(self.rect(), themed("border"))
        left = 0.0
        for part in self._parts:
            width = self.width() * min(1.0, part.amount / self._total) if self._total else 0.0
            if width > 0.0:
                width = max(width, 2.0)  # small parts stay visible
                _fill(painter, QRectF(left, 0, min(width, self.width() - left), self.height()), part)
                left += width
        painter.end()


def _fill(painter: QPainter, area: QRectF, part: MemoryShare) -> None:
    solid = themed(part.colour)
    if part.hatched:
        faded = QColor(solid)
        faded.setAlpha(110)
        painter.fillRect(area, faded)
        painter.fillRect(area, QBrush(solid, Qt.BrushStyle.BDiagPattern))
    else:
        painter.fillRect(area, solid)
