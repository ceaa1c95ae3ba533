"""Areas, lines and stacks of columns, drawn from arrays."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import shiboken6
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPaintEngine, QPainter, QPen, QPolygonF

from app.services.history.buckets import Floats
from app.widgets.timeline.colours import FILL_ALPHA, expert_colours, faded
from app.widgets.timeline.lanes import Lane, LaneData
from app.widgets.timeline.raster import LaneRaster, Shares, over

LINE_PX = 1.3
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
    raster = LaneRaster(area, xs, painter.device().devicePixelRatioF())
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
    if lane.kind == "experts":
        _draw_stack(painter, area, xs, data.values)
        return
    below = np.zeros(len(xs) - 1)
    for layer, values in enumerate(data.values):
        above = below + _known(values)
        if above.any():
            _draw_area(painter, area, xs, below, above, data.scale, colour, hatched=layer > 0)
        below = above
    if data.line is not None:
        dashed = bool(lane.gauges)
        draw_line(painter, area, xs, data.line / data.scale, QPen(colour, LINE_PX), dashed=dashed)


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


def draw_line(painter: QPainter, area: QRectF, xs: Floats, shares: Floats, pen: QPen, *, dashed: bool = False) -> None:
    """A line through the centres of columns; it has gaps where `shares` [n] of the height are NaN."""
    if dashed:
        pen.setStyle(Qt.PenStyle.CustomDashLine)
        pen.setDashPattern([3.0, 3.0])
    middles = (xs[:-1] + xs[1:]) / 2
    ys = area.bottom() - area.height() * np.clip(shares, 0.0, 1.0)
    known = np.isfinite(shares)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setBrush(Qt.BrushStyle.NoBrush)
    painter.setPen(pen)
    borders = np.flatnonzero(np.diff(np.concatenate(([False], known, [False])).astype(np.int8)))
    for first, last in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        if last - first == 1:
            painter.drawLine(QPointF(xs[first], ys[first]), QPointF(xs[last], ys[first]))
        else:
            painter.drawPolyline(polygon(middles[first:last], ys[first:last]))
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, on=False)


def polygon(xs: Floats, ys: Floats) -> QPolygonF:
    """Points as Qt needs them, without a Python object per point."""
    result = QPolygonF()
    result.resize(len(xs))
    if len(xs):
        memory = cast(Any, shiboken6.VoidPtr)(cast(Any, result).data(), 16 * len(xs), True)
        points = np.frombuffer(memory, np.float64).reshape(-1, 2)
        points[:, 0], points[:, 1] = xs, ys
    return result


def _draw_area(
    painter: QPainter,
    area: QRectF,
    xs: Floats,
    below: Floats,
    above: Floats,
    scale: float,
    colour: QColor,
    *,
    hatched: bool,
) -> None:
    middles = (xs[:-1] + xs[1:]) / 2
    high = area.bottom() - area.height() * np.clip(above / scale, 0.0, 1.0)
    low = area.bottom() - area.height() * np.clip(below / scale, 0.0, 1.0)
    outline = polygon(np.concatenate((middles, middles[::-1])), np.concatenate((high, low[::-1])))
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(faded(colour, FILL_ALPHA // 2 if hatched else FILL_ALPHA))
    painter.drawPolygon(outline)
    if hatched:
        painter.setBrush(QBrush(faded(colour, 150), Qt.BrushStyle.BDiagPattern))
        painter.drawPolygon(outline)
    top = _top(below, above, scale, hatched=hatched)
    draw_line(painter, area, xs, top, QPen(colour, 1.0 if hatched else LINE_PX))


def _draw_stack(painter: QPainter, area: QRectF, xs: Floats, shares: Floats) -> None:
    """Columns of three parts; equal neighbours are merged into one rectangle."""
    quantised = np.round(shares * area.height()).astype(np.int32)
    changes = np.flatnonzero((np.diff(quantised, axis=1) != 0).any(axis=0)) + 1
    firsts = np.concatenate(([0], changes))
    lasts = np.concatenate((changes, [quantised.shape[1]]))
    patterns = (Qt.BrushStyle.SolidPattern, Qt.BrushStyle.FDiagPattern, Qt.BrushStyle.BDiagPattern)
    bottoms = np.full(len(firsts), area.bottom())
    painter.setPen(Qt.PenStyle.NoPen)
    for part, (colour, pattern) in enumerate(zip(expert_colours(), patterns, strict=True)):
        heights = quantised[part, firsts]
        rectangles = [
            QRectF(left, bottom - height, right - left, height)
            for left, right, bottom, height in zip(
                xs[firsts].tolist(), xs[lasts].tolist(), bottoms.tolist(), heights.tolist(), strict=True
            )
            if height > 0
        ]
        bottoms = bottoms - heights
        if pattern is not Qt.BrushStyle.SolidPattern:
            painter.setBrush(faded(colour, round(255 * _FAINT_PART)))
            painter.drawRects(rectangles)
        painter.setBrush(QBrush(colour, pattern))
        painter.drawRects(rectangles)
