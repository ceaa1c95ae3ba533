"""Draws a miss-ratio plot: axes, curves, the current size, and the handle."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QCoreApplication, QLineF, QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QFontMetricsF, QPainter, QPen, QPolygonF

from app.models.cache_figures import CacheForecast
from app.theme import colours, themed
from app.widgets.quantities import number
from app.widgets.timeline.colours import faded
from app.widgets.timeline.plots import polygon
from engine.telemetry.messages import TierReport

translate = QCoreApplication.translate

HANDLE_PX = 6.0
_DIFFERS = 0.02
"""Difference of two curves from which both are drawn."""


def plot_area(whole: QRectF, metrics: QFontMetricsF, forecast: CacheForecast) -> QRectF:
    """The area for the curves: without the axis labels."""
    right = metrics.horizontalAdvance("000") + 8 if len(forecast.tokens_per_s) else 4
    left = metrics.horizontalAdvance("100%") + 8
    return whole.adjusted(left, metrics.height() + 10, -right, -metrics.height() - 8)


class MissRatioPicture:
    """One state of the plot; see `app.widgets.miss_ratio_plot.MissRatioPlot.show_tier` for its arguments."""

    def __init__(self, tier: TierReport, forecast: CacheForecast, room: int, measured: float | None) -> None:
        self._tier, self._forecast = tier, forecast
        self._room, self._measured = room, measured
        self._most = tier.most_slots
        self._width = 0.0

    def draw(self, painter: QPainter, area: QRectF, width: float) -> None:
        """Everything but the handle, `width` pixels wide including the labels beside `area`."""
        self._width = width
        metrics = QFontMetricsF(painter.font())
        self._draw_axes(painter, area, metrics)
        self._draw_curves(painter, area, metrics)
        self._draw_present(painter, area)

    def _x(self, area: QRectF, slots: float) -> float:
        return area.left() + area.width() * slots / self._most

    def _draw_axes(self, painter: QPainter, area: QRectF, metrics: QFontMetricsF) -> None:
        if self._room < self._most:
            full = QRectF(QPointF(self._x(area, self._room), area.top()), area.bottomRight())
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QBrush(faded(themed("faint"), 70), Qt.BrushStyle.BDiagPattern))
            painter.drawRect(full)
        for share in (0.0, 0.5, 1.0):
            y = area.bottom() - share * area.height()
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(QLineF(area.left(), y, area.right(), y))
            painter.setPen(themed("muted"))
            box = QRectF(0, y - metrics.height() / 2, area.left() - 6, metrics.height())
            painter.drawText(
                box, Qt.AlignmentFlag.AlignRight, translate("MissRatioPlot", "{0}%").format(number(100 * share, 0))
            )
        below = QRectF(area.left(), area.bottom() + 6, area.width(), metrics.height())
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft, number(0, 0))
        painter.drawText(
            below,
            Qt.AlignmentFlag.AlignRight,
            translate("MissRatioPlot", "all {0} experts").format(number(self._most, 0)),
        )
        if self._room < self._most:
            label = translate("MissRatioPlot", "no room")
            width = metrics.horizontalAdvance(label) + 8
            left = self._x(area, self._room) + 4
            if left + width < area.right():  # else only the tooltip has it
                box = QRectF(left, area.top() + 4, width, metrics.height() + 2)
                painter.fillRect(box, themed("surface"))
                painter.drawText(box, Qt.AlignmentFlag.AlignCenter, label)

    def _draw_curves(self, painter: QPainter, area: QRectF, metrics: QFontMetricsF) -> None:
        known = self._forecast
        if not len(known.slots):
            self._draw_legend(painter, area, metrics, [], translate("MissRatioPlot", "too few tokens for a curve"))
            return
        solid = themed("hit") if colours().is_dark else themed("hit").darker(150)
        bent = QPen(solid, 2)
        lru = QPen(themed("muted"), 1.2, Qt.PenStyle.DotLine)
        speed = QPen(themed("text"), 1.4, Qt.PenStyle.DashLine)
        samples = [(bent, translate("MissRatioPlot", "hits, expected"))]
        xs = area.left() + area.width() * known.slots / self._most
        lines = [(known.hit_rates, bent)]
        if np.abs(known.hit_rates - known.lru_rates).max() > _DIFFERS:
            lines.insert(0, (known.lru_rates, lru))
            samples.append((lru, translate("MissRatioPlot", "LRU")))
        painter.save()
        painter.setClipRect(area.adjusted(0, -2, 0, 2))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(faded(themed("hit"), 45))
        ys = area.bottom() - area.height() * known.hit_rates
        corners = [area.bottom()] * 2
        painter.drawPolygon(polygon(np.concatenate((xs, [xs[-1], xs[0]])), np.concatenate((ys, corners))))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        top = _round_up(float(known.tokens_per_s.max())) if len(known.tokens_per_s) else 0.0
        if top:
            lines.append((known.tokens_per_s / top, speed))
            samples.append((speed, translate("MissRatioPlot", "tokens/s, predicted")))
        for shares, pen in lines:
            painter.setPen(pen)
            painter.drawPolyline(polygon(xs, area.bottom() - area.height() * shares))
        painter.restore()
        if top:
            painter.setPen(themed("muted"))
            for share in (0.5, 1.0):
                y = area.bottom() - share * area.height() - metrics.height() / 2
                box = QRectF(area.right() + 6, y, self._width - area.right() - 6, metrics.height())
                painter.drawText(box, Qt.AlignmentFlag.AlignLeft, number(share * top, 0 if top >= 10 else 1))
        self._draw_legend(painter, area, metrics, samples)

    def _draw_legend(
        self,
        painter: QPainter,
        area: QRectF,
        metrics: QFontMetricsF,
        samples: list[tuple[QPen, str]],
        said: str = "",
    ) -> None:
        """Line samples with names, in one row above the plot, followed by `said`."""
        muted = themed("muted")
        x, y = area.left(), metrics.height() / 2 + 1
        base = y + metrics.ascent() / 2 - 1
        for pen, text in samples:
            painter.setPen(pen)
            painter.drawLine(QLineF(x, y, x + 18, y))
            painter.setPen(muted)
            painter.drawText(QPointF(x + 23, base), text)
            x += 23 + metrics.horizontalAdvance(text) + 14
        text = translate("MissRatioPlot", "now")
        if self._measured is not None and x + 14 + metrics.horizontalAdvance(text) < self._width:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(themed("text"))
            painter.drawPolygon(_diamond(QPointF(x + 5, y)))
            painter.setPen(muted)
            painter.drawText(QPointF(x + 14, base), text)
            x += 14 + metrics.horizontalAdvance(text) + 14
        painter.setPen(muted)
        painter.drawText(QPointF(x, base), said)

    def _draw_present(self, painter: QPainter, area: QRectF) -> None:
        tier = self._tier
        x = self._x(area, tier.slots)
        painter.setPen(QPen(themed("muted"), 1, Qt.PenStyle.DotLine))
        painter.drawLine(QLineF(x, area.top(), x, area.bottom()))
        if self._measured is not None:
            painter.setPen(QPen(themed("surface"), 1))
            painter.setBrush(themed("text"))
            painter.drawPolygon(_diamond(QPointF(x, area.bottom() - area.height() * self._measured)))

    def draw_handle(
        self,
        painter: QPainter,
        area: QRectF,
        slots: int,
        said: tuple[str, str],
        *,
        is_moved: bool,
        has_focus: bool,
    ) -> None:
        """The handle at `slots`, and the label for that size."""
        metrics = QFontMetricsF(painter.font())
        x = self._x(area, slots)
        accent = themed("accent")
        painter.setPen(QPen(accent, 2))
        painter.drawLine(QLineF(x, area.top(), x, area.bottom()))
        texts = [text for text in said if text]
        width = max(metrics.horizontalAdvance(text) for text in texts) + 14
        height = len(texts) * metrics.height() + 8
        left = x + 10 if x + 10 + width <= area.right() else x - 10 - width
        left = min(max(left, area.left() + 2), max(area.left() + 2, area.right() - width))
        box = QRectF(left, area.bottom() - height - 8, width, height)
        painter.setPen(QPen(accent if is_moved else themed("border"), 1))
        painter.setBrush(themed("raised"))
        painter.drawRoundedRect(box, 6, 6)
        painter.setPen(themed("text"))
        for line, text in enumerate(texts):
            row = QRectF(box.left() + 7, box.top() + 4 + line * metrics.height(), width, metrics.height())
            painter.drawText(row, Qt.AlignmentFlag.AlignLeft, text)
        painter.setPen(QPen(themed("surface"), 1.5))
        painter.setBrush(accent)
        grip = QPointF(x, area.bottom())
        if has_focus:
            painter.save()
            painter.setPen(QPen(accent, 1.5))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawEllipse(grip, HANDLE_PX + 3, HANDLE_PX + 3)
            painter.restore()
        painter.drawEllipse(grip, HANDLE_PX, HANDLE_PX)


def _diamond(at: QPointF) -> QPolygonF:
    half = 5.0
    return QPolygonF([at + QPointF(0, -half), at + QPointF(half, 0), at + QPointF(0, half), at + QPointF(-half, 0)])


def _round_up(value: float) -> float:
    """The next number with one significant digit, or 2.5: the end of an axis."""
    power = float(10 ** np.floor(np.log10(max(value, 1e-6))))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 1.02)
