"""Areas, lines and stacks of columns, drawn from arrays."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPaintEngine, QPainter, QPen, QPolygonF

from app.services.history.buckets import Floats
from app.widgets.timeline.colours import FILL_ALPHA, expert_colours, faded
from app.widgets.timeline.lanes import LaneData
from app.widgets.timeline.raster import LaneRaster, Shares, over
from engine.common.lanes import Lane

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
    """Unknown values as 0."""
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
    """A line through the centres of columns; it has gaps where `shares` [n] of the height are NaN."""
    ys = area.bottom() - area.height() * np.clip(shares, 0.0, 1.0)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(pen)
    painter.drawPath(pg.functions.arrayToQPath((xs[:-1] + xs[1:]) / 2, ys, connect="finite"))
