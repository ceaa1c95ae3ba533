"""How busy each logical CPU is: one bar each, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize
from PySide6.QtGui import QHelpEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.theme import themed
from app.widgets.quantities import number

_LEAST_PX, _MOST_PX, _GAP_PX = 9, 30, 2
"""A cell's width, including the gap after it."""
_ONE_ROW_PX, _ROW_PX = 34, 20
BUSY = 0.9
"""Counts as fully busy: drawn with a line on top, so that colour is not the only cue."""


class CoreGrid(QWidget):
    """Cells in the system's order, left to right and top to bottom."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._busy: tuple[float, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def show_cores(self, busy: Sequence[float]) -> None:
        """Shares of 0 to 1, one per CPU."""
        shown = tuple(min(max(share, 0.0), 1.0) for share in busy)
        if len(shown) != len(self._busy):
            self.updateGeometry()
        if shown != self._busy:
            self._busy = shown
            self.update()
        if shown:
            most = max(range(len(shown)), key=shown.__getitem__)
            text = self.tr("{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%")
            mean = number(100 * sum(shown) / len(shown), 0)
            self.setAccessibleName(text.format(len(shown), mean, most, number(100 * shown[most], 0)))

    def grid(self, width: int) -> tuple[int, int]:
        """(rows, columns) at this width."""
        count = max(len(self._busy), 1)
        columns = min(count, max(1, width // _LEAST_PX))
        rows = -(-count // columns)
        return rows, -(-count // rows)

    def cells(self) -> list[QRectF]:
        """Each CPU's bar."""
        rows, columns = self.grid(self.width())
        wide = min(self.width() / columns, _MOST_PX)
        high = self.height() / rows
        return [
            QRectF(index % columns * wide, index // columns * high, wide - _GAP_PX, high - _GAP_PX)
            for index in range(len(self._busy))
        ]

    def text_at(self, at: QPointF) -> str:
        """A description of the CPU there; empty between CPUs."""
        for index, (cell, share) in enumerate(zip(self.cells(), self._busy, strict=True)):
            if cell.contains(at):
                return self.tr("CPU {0}: {1}% busy").format(index, number(100 * share, 0))
        return ""

    def sizeHint(self) -> QSize:
        return QSize(200, self.heightForWidth(200))

    def minimumSizeHint(self) -> QSize:
        return QSize(100, _ONE_ROW_PX)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        rows, _ = self.grid(width)
        return _ONE_ROW_PX if rows == 1 else rows * _ROW_PX

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        colour, track, mark = themed("cpu"), themed("border"), QPen(themed("text"), 2)
        for cell, share in zip(self.cells(), self._busy, strict=True):
            painter.fillRect(cell, track)
            top = cell.bottom() - cell.height() * share
            painter.fillRect(QRectF(cell.left(), top, cell.width(), cell.bottom() - top), colour)
            if share >= BUSY:
                painter.setPen(mark)
                painter.drawLine(QPointF(cell.left(), cell.top() + 1), QPointF(cell.right(), cell.top() + 1))
        painter.end()

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            if text := self.text_at(QPointF(event.pos())):
                QToolTip.showText(event.globalPos(), text, self)
            else:
                QToolTip.hideText()
            return True
        return super().event(event)
