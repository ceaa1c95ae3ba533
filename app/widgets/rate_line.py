"""A sparkline of a share over the last minutes, shown beside its number."""

from __future__ import annotations

from collections import deque

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import themed
from app.widgets.chart import Chart, hit_colour

VALUES = 180
"""One per second: three minutes."""


class RateLine(Chart):
    """From 0 at the bottom to 1 at the top; unknown values leave a gap."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._values: deque[float] = deque(maxlen=VALUES)
        self._line = pg.PlotCurveItem(connect="finite")
        self._bounds = [pg.InfiniteLine(at, angle=0) for at in (0, 1)]
        for item in (*self._bounds, self._line):
            self.view.addItem(item, ignoreBounds=True)
        self.view.setRange(xRange=(1 - VALUES, 0), yRange=(-0.08, 1.08), padding=0)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.dress()

    def dress(self) -> None:
        super().dress()
        for bound in self._bounds:
            bound.setPen(self.pen(themed("border")))
        self._line.setPen(self.pen(hit_colour(), 1.5))

    @property
    def values(self) -> tuple[float, ...]:
        """The last values; NaN where unknown."""
        return tuple(self._values)

    def add(self, value: float | None) -> None:
        """Appends a value; None if unknown."""
        self._values.append(np.nan if value is None else value)
        # The newest is at the right edge, however few there are.
        self._line.setData(np.arange(1 - len(self._values), 1), np.array(self._values))

    def clear(self) -> None:
        """Removes all values, for another model or none."""
        self._values.clear()
        self._line.setData([], [])

    def sizeHint(self) -> QSize:
        return QSize(110, 22)

    def minimumSizeHint(self) -> QSize:
        return QSize(40, 18)
