"""How busy each logical CPU is: one bar each, in as many rows as they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import themed
from app.widgets.chart import Chart
from app.widgets.quantities import number

_LEAST_PX, _MOST_PX, _GAP_PX = 9, 30, 2
"""A cell's width, including the gap after it."""
_ONE_ROW_PX, _ROW_PX = 34, 20
BUSY = 0.9
"""Counts as fully busy: drawn with a line on top, so that colour is not the only cue."""


class CoreGrid(Chart):
    """Cells in the system's order, left to right and top to bottom."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._busy: tuple[float, ...] = ()
        self._tracks, self._bars, self._marks = (
            pg.BarGraphItem(x0=[], y0=[], width=0, height=0, pen=None) for _ in range(3)
        )
        for item in (self._tracks, self._bars, self._marks):
            self.view.addItem(item, ignoreBounds=True)
        self.view.invertY()
        self.view.sigResized.connect(lambda _view: self._draw())
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.dress()

    def show_cores(self, busy: Sequence[float]) -> None:
        """Shares of 0 to 1, one per CPU."""
        shown = tuple(min(max(share, 0.0), 1.0) for share in busy)
        if len(shown) != len(self._busy):
            self.updateGeometry()
        if shown != self._busy:
            self._busy = shown
            self._draw()
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

    def dress(self) -> None:
        super().dress()
        self._tracks.setOpts(brush=themed("border"))
        self._bars.setOpts(brush=themed("cpu"))
        self._marks.setOpts(brush=themed("text"))
        self._draw()

    def _draw(self) -> None:
        """In the view's pixels."""
        self.view.setRange(xRange=(0, self.view.width()), yRange=(0, self.view.height()), padding=0)
        busy = np.array(self._busy)
        edges = [(cell.left(), cell.right(), cell.top(), cell.bottom()) for cell in self.cells()]
        lefts, rights, tops, bottoms = np.array(edges or np.empty((0, 4))).T
        for item, y0, y1 in (
            (self._tracks, tops, bottoms),
            (self._bars, bottoms - (bottoms - tops) * busy, bottoms),
            (self._marks, tops, tops + 2 * (busy >= BUSY)),
        ):
            item.setOpts(x0=lefts, x1=rights, y0=y0, y1=y1, width=None, height=None)
