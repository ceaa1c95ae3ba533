"""Areas, lines and stacks of columns rasterised with arrays.

A timeline of irregular lanes takes half the time of QPainter's polygons with a thousand corners, and is as smooth: each
pixel's coverage is computed exactly along its column.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QPointF, QRectF
from PySide6.QtGui import QColor, QImage, QPainter

from app.services.history.buckets import Floats

Shares = NDArray[np.float32]
"""Coverage of each pixel, [height, width] in 0..1."""
_HATCH_PX = 8
_DASH_PX = 6
_MARGIN_PX = 1
"""Above and below a plot, for half the width of a line at its top."""


class LaneRaster:
    """The pixels of one plot, in one colour or as a stack of columns.

    Args:
        area: of the plot, in the painter's units, each `ratio` pixels wide.
        xs: edges of its columns, [n + 1].
    """

    def __init__(self, area: QRectF, xs: Floats, ratio: float) -> None:
        self._area, self._ratio = area, ratio
        self._size = (
            max(round((area.height() + 2 * _MARGIN_PX) * ratio), 1),
            max(round(area.width() * ratio), 1),
        )
        self._middles = (xs[:-1] + xs[1:]) / 2
        at = area.left() + np.arange(self._size[1] + 1) / ratio
        self._edges, self._centres = at, (at[:-1] + at[1:]) / 2
        self._column = np.clip(((self._centres - xs[0]) // (xs[1] - xs[0])).astype(np.int64), 0, len(xs) - 2)
        self._tops = np.arange(self._size[0], dtype=np.float32)[:, None]

    def area(self, below: Floats, above: Floats) -> Shares:
        """Between two curves, each a share of the plot's height for every column, [n]."""
        low, high = (
            self._y(np.interp(self._centres, self._middles, below)),
            self._y(np.interp(self._centres, self._middles, above)),
        )
        return self._between(low, high)

    def line(self, shares: Floats, width: float, *, dashed: bool = False) -> Shares:
        """Along a curve through the centres of columns, [n]; gaps where it is NaN."""
        known = np.isfinite(shares)
        if not known.any():
            return np.zeros(self._size, np.float32)
        at_edges = self._y(np.interp(self._edges, self._middles[known], shares[known]))
        half = np.float32(width * self._ratio / 2)
        top = np.minimum(at_edges[:-1], at_edges[1:]) - half
        bottom = np.maximum(at_edges[:-1], at_edges[1:]) + half
        bottom[~known[self._column]] = -1
        if dashed:
            bottom[self._column % _DASH_PX >= _DASH_PX // 2] = -1
        covered = np.minimum(self._tops + 1, bottom) - np.maximum(self._tops, top)
        return np.asarray(np.clip(covered, 0, 1, out=covered))

    def hatched(self, *, forward: bool = False) -> Shares:
        """Diagonal lines over the whole plot, rising to the right unless `forward`, as in Qt's brushes."""
        return _hatched(*self._size, self._ratio, forward=forward)

    def columns(self, below: Floats, above: Floats) -> Shares:
        """As `area`, but each column is flat."""
        low, high = self._y(below[self._column]), self._y(above[self._column])
        return self._between(low, high)

    def draw(self, painter: QPainter, covered: Shares, colour: QColor) -> None:
        """Draws a colour with the opacity in `covered`."""
        pixels = _shades(colour.rgb()).take((covered * np.float32(255) + np.float32(0.5)).astype(np.uint8))
        height, width = self._size
        image = QImage(pixels.data, width, height, 4 * width, QImage.Format.Format_ARGB32_Premultiplied)
        image.setDevicePixelRatio(self._ratio)
        painter.drawImage(QPointF(self._area.left(), self._area.top() - _MARGIN_PX), image)

    def _between(self, low: Shares, high: Shares) -> Shares:
        covered = np.minimum(self._tops + 1, low) - np.maximum(self._tops, high)
        return np.asarray(np.clip(covered, 0, 1, out=covered))

    def _y(self, shares: Floats) -> NDArray[np.float32]:
        """Pixels from the top of the image."""
        inside = 1 - np.clip(shares, 0.0, 1.0)
        return np.asarray((_MARGIN_PX + self._area.height() * inside) * self._ratio, np.float32)


@lru_cache(maxsize=32)
def _shades(rgb: int) -> NDArray[np.uint32]:
    """A colour at all 256 opacities, as premultiplied ARGB."""
    weights = np.arange(256, dtype=np.uint32)
    shades = weights << 24
    for shift in (16, 8, 0):
        shades |= ((weights * (rgb >> shift & 255) + 127) // 255) << shift
    return np.asarray(shades, np.uint32)


@lru_cache(maxsize=32)
def _hatched(height: int, width: int, ratio: float, *, forward: bool) -> Shares:
    period = round(_HATCH_PX * ratio)
    across, down = np.arange(width)[None, :], np.arange(height)[:, None]
    return np.asarray((across - down if forward else across + down) % period < ratio, np.float32)


def over(*layers: Shares) -> Shares:
    """Combined coverage of several layers of one colour."""
    free = 1 - layers[0]
    for layer in layers[1:]:
        free *= 1 - layer
    return np.asarray(1 - free)
