"""Areas, lines and stacks of columns, drawn from arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyqtgraph as pg
from numpy.typing import NDArray
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QImage, QPaintEngine, QPainter, QPen, QPolygonF

from app.services.history.gauges import Floats
from app.widgets.timeline.lanes import LaneData
from app.widgets.timeline.navigator import FILL_ALPHA, expert_colours, faded
from engine.common.lanes import Lane

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
        low, high = (
            self._y(np.interp(self._centres, self._middles, below)),
            self._y(np.interp(self._centres, self._middles, above)),
        )
        return self._between(low, high)

    def line(self, shares: Floats, width: float, *, dashed: bool = False) -> Shares:
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
        low, high = self._y(below[self._column]), self._y(above[self._column])
        return self._between(low, high)

    def draw(self, painter: QPainter, covered: Shares, colour: QColor) -> None:
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


LINE_PX = 1.3
_HATCHES = (Qt.BrushStyle.SolidPattern, Qt.BrushStyle.FDiagPattern, Qt.BrushStyle.BDiagPattern)
_FAINT_PART = 170 / 255
"""Opacity of a stack's part between its hatching."""


def draw_lane(painter: QPainter, area: QRectF, xs: Floats, lane: Lane, data: LaneData, colour: QColor) -> None:
    """One lane's plot: as pixels on a screen, as paths in a vector drawing.

    Args:
        area: the lane's whole plot.
        xs: left edges of its columns, and the right edge of the last, [n + 1].
    """
    if painter.paintEngine().type() == QPaintEngine.Type.SVG:
        _draw_outlines(painter, area, xs, lane, data, colour)
    else:
        _draw_pixels(painter, area, xs, lane, data, colour)
    if data.ceiling is not None and data.ceiling <= data.scale:
        y = area.bottom() - area.height() * data.ceiling / data.scale
        painter.setPen(QPen(colour, 1.0, Qt.PenStyle.DashLine))
        painter.drawLine(QPointF(area.left(), y), QPointF(area.right(), y))


def _draw_pixels(painter: QPainter, area: QRectF, xs: Floats, lane: Lane, data: LaneData, colour: QColor) -> None:
    raster = LaneRaster(area, xs, painter.deviceTransform().m11())
    if lane.kind == "experts":
        below = np.zeros(len(xs) - 1)
        for part, (own, values) in enumerate(zip(expert_colours(), data.values, strict=True)):
            above = below + _known(values)
            if above.max(initial=0.0) > 0:
                covered = raster.columns(below, above)
                if part:
                    covered = covered * (_FAINT_PART + (1 - _FAINT_PART) * raster.hatched(forward=part == 1))
                raster.draw(painter, covered, own)
            below = above
        return
    layers: list[Shares] = []
    below = np.zeros(len(xs) - 1)
    for layer, values in enumerate(data.values):
        above = below + _known(values)
        if above.any():
            fill, hatch, line = (FILL_ALPHA // 2, 150 / 255, 1.0) if layer else (FILL_ALPHA, 0.0, LINE_PX)
            covered = raster.area(below / data.scale, above / data.scale)
            layers.append(np.asarray(covered * np.float32(fill / 255)))
            if hatch:
                layers.append(np.asarray(covered * raster.hatched() * np.float32(hatch)))
            layers.append(raster.line(_top(below, above, data.scale, hatched=layer > 0), line))
        below = above
    if data.line is not None:
        layers.append(raster.line(data.line / data.scale, LINE_PX, dashed=bool(lane.gauges)))
    if layers:
        raster.draw(painter, over(*layers), colour)


def _draw_outlines(painter: QPainter, area: QRectF, xs: Floats, lane: Lane, data: LaneData, colour: QColor) -> None:
    is_stack = lane.kind == "experts"
    below = np.zeros(len(xs) - 1)
    for layer, values in enumerate(data.values):
        above = below + _known(values)
        if above.any():
            own = expert_colours()[layer] if is_stack else colour
            alpha = round(255 * _FAINT_PART) if is_stack else FILL_ALPHA // (2 if layer else 1)
            outline = _outline(area, xs, below / data.scale, above / data.scale)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(own if is_stack and not layer else faded(own, alpha))
            painter.drawPolygon(outline)
            if layer:
                painter.setBrush(QBrush(faded(own, 255 if is_stack else 150), _HATCHES[layer if is_stack else 2]))
                painter.drawPolygon(outline)
            if not is_stack:
                top = _top(below, above, data.scale, hatched=layer > 0)
                _draw_line(painter, area, xs, top, QPen(colour, 1.0 if layer else LINE_PX))
        below = above
    if data.line is not None:
        pen = QPen(colour, LINE_PX)
        if lane.gauges:
            pen.setDashPattern([3.0, 3.0])
        _draw_line(painter, area, xs, data.line / data.scale, pen)


def _outline(area: QRectF, xs: Floats, below: Floats, above: Floats) -> QPolygonF:
    """Of the area between two curves through the centres of columns, each a share of the height."""
    middles = (xs[:-1] + xs[1:]) / 2
    low, high = (area.bottom() - area.height() * np.clip(shares, 0.0, 1.0) for shares in (below, above))
    xs, ys = np.concatenate((middles, middles[::-1])), np.concatenate((high, low[::-1]))
    return QPolygonF(pg.functions.arrayToQPolygonF(xs, ys))


def _known(values: Floats) -> Floats:
    known = np.isfinite(values)
    return values if known.all() else np.where(known, values, 0.0)


def _top(below: Floats, above: Floats, scale: float, *, hatched: bool) -> Floats:
    """The line along an area's top; NaN where the area and its neighbours are empty."""
    there = above > below
    if hatched:
        return np.where(there, above / scale, np.nan)
    near = there.copy()
    near[1:] |= there[:-1]
    near[:-1] |= there[1:]
    return np.where(near, above / scale, np.nan)


def _draw_line(painter: QPainter, area: QRectF, xs: Floats, shares: Floats, pen: QPen) -> None:
    ys = area.bottom() - area.height() * np.clip(shares, 0.0, 1.0)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(pen)
    painter.drawPath(pg.functions.arrayToQPath((xs[:-1] + xs[1:]) / 2, ys, connect="finite"))
