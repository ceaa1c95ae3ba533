"""Hit rate and predicted speed at every size of the expert cache, with a handle to choose one."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QEvent, QLineF, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFocusEvent,
    QFont,
    QFontMetricsF,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QPolygonF,
)
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.models.cache_figures import NO_FORECAST, Forecast
from app.theme import ThemeController, tabular
from app.widgets.quantities import memory, number
from app.widgets.timeline.colours import faded
from app.widgets.timeline.plots import polygon
from engine.telemetry.messages import TierReport

HANDLE_PX = 6.0
_GRAB_PX = 12.0
_LEAST_SLOTS = 1
_DIFFERS = 0.02
"""Of two curves, from when on both are drawn."""


class MissRatioPlot(QWidget):
    """One tier: sizes along the bottom, hit rate at the left, predicted tokens per second at the right.

    The handle stands at the present size until it is moved.  Without a curve the axis and the handle are there all the
    same: a tier can be resized before enough has been seen to foretell anything.

    Signals:
        moved(int): experts at the handle, while it is moved.
        chosen(int): the handle was let go, or Enter pressed.
    """

    moved = Signal(int)
    chosen = Signal(int)

    def __init__(self, theme: ThemeController, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._tier: TierReport | None = None
        self._forecast: Forecast = NO_FORECAST
        self._room = 0
        self._is_top = True
        self._measured: float | None = None
        self._wanted: int | None = None
        self._before_drag: int | None = None
        self._dragging = False
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setCursor(Qt.CursorShape.SplitHCursor)
        self.setAccessibleName(self.tr("Miss-ratio curve"))
        self.setToolTip(
            self.tr("Drag the handle to resize the cache now. Hatched: more than there is memory for at the moment.")
        )
        theme.changed.connect(self.update)

    # --- what is shown ----------------------------------------------------------------------------

    def show_tier(
        self, tier: TierReport | None, forecast: Forecast, room: int, measured: float | None, *, is_top: bool = True
    ) -> None:
        """Another report.

        Args:
            is_top: whether it is the tier that curves are of.
            forecast: `NO_FORECAST` while none is known.
            room: experts that there is memory for.
            measured: the hit rate of the present size, if anything was looked up.
        """
        self._tier, self._forecast, self._room, self._measured = tier, forecast, room, measured
        self._is_top = is_top
        if tier is None:
            self._wanted, self._dragging = None, False
        elif self._wanted is not None:
            self._wanted = min(self._wanted, self._most)
        self.setAccessibleDescription(self._spoken())
        self.update()

    @property
    def slots(self) -> int:
        """Where the handle stands, in experts."""
        if self._wanted is not None:
            return self._wanted
        return self._tier.slots if self._tier is not None else 0

    @property
    def is_moved(self) -> bool:
        """Whether the handle stands somewhere else than the present size."""
        return self._wanted is not None

    def set_slots(self, slots: int) -> None:
        """Moves the handle; nothing is emitted."""
        if self._tier is not None and slots != self.slots:
            self._wanted = min(max(slots, _LEAST_SLOTS), self._most)
            self.setAccessibleDescription(self._spoken())
            self.update()

    def put_back(self) -> None:
        """The handle to the present size."""
        self._wanted, self._dragging = None, False
        self.setAccessibleDescription(self._spoken())
        self.update()

    def texts(self) -> tuple[str, str]:
        """What the handle's place would give: (`1,012 experts · 2.1 GB`, `hit 64% · 24.6 tokens/s`)."""
        tier = self._tier
        if tier is None:
            return "", ""
        size = self.tr("{0} experts").format(number(self.slots, 0))
        if tier.record_bytes:
            size += " · " + memory(self.slots * tier.record_bytes)
        gives = []
        if (rate := self._forecast.hit_rate_at(self.slots)) is not None:
            gives.append(self.tr("hits about {0}%").format(number(100 * rate, 0)))
        if (speed := self._forecast.tokens_per_s_at(self.slots)) is not None:
            gives.append(self.tr("{0} tokens/s").format(number(speed, 1)))
        return size, " · ".join(gives)

    def _spoken(self) -> str:
        if self._tier is None:
            return ""
        size, gives = self.texts()
        keys = self.tr("Left and right move the handle, Enter resizes the cache, Escape puts the handle back.")
        return " ".join(filter(None, (size + ":" if gives else size + ".", gives + "," if gives else "", keys)))

    def sizeHint(self) -> QSize:
        return QSize(320, 190)

    def minimumSizeHint(self) -> QSize:
        return QSize(220, 150)

    # --- geometry ---------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        return self._tier.most_slots if self._tier is not None else 1

    def _font(self) -> QFont:
        font = tabular(self.font())
        font.setPixelSize(max(9, round(self._theme.font_px * 11.5 / 14)))
        return font

    def _area(self, metrics: QFontMetricsF) -> QRectF:
        line = metrics.height()
        right = metrics.horizontalAdvance("000") + 8 if len(self._forecast.tokens_per_s) else 4
        left = metrics.horizontalAdvance("100%") + 8
        return QRectF(self.rect()).adjusted(left, line + 10, -right, -line - 8)

    def _x(self, area: QRectF, slots: float) -> float:
        return area.left() + area.width() * slots / self._most

    # --- painting ---------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        if self._tier is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        font = self._font()
        painter.setFont(font)
        metrics = QFontMetricsF(font)
        area = self._area(metrics)
        self._draw_axes(painter, area, metrics)
        self._draw_curves(painter, area, metrics)
        self._draw_present(painter, area)
        self._draw_handle(painter, area, metrics)
        painter.end()

    def _draw_axes(self, painter: QPainter, area: QRectF, metrics: QFontMetricsF) -> None:
        theme = self._theme.theme
        if self._room < self._most:
            full = QRectF(QPointF(self._x(area, self._room), area.top()), area.bottomRight())
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QBrush(faded(QColor(theme.faint), 70), Qt.BrushStyle.BDiagPattern))
            painter.drawRect(full)
        for share in (0.0, 0.5, 1.0):
            y = area.bottom() - share * area.height()
            painter.setPen(QPen(QColor(theme.border), 1))
            painter.drawLine(QLineF(area.left(), y, area.right(), y))
            painter.setPen(QColor(theme.muted))
            box = QRectF(0, y - metrics.height() / 2, area.left() - 6, metrics.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignRight, self.tr("{0}%").format(number(100 * share, 0)))
        below = QRectF(area.left(), area.bottom() + 6, area.width(), metrics.height())
        painter.drawText(below, Qt.AlignmentFlag.AlignLeft, number(0, 0))
        painter.drawText(below, Qt.AlignmentFlag.AlignRight, self.tr("all {0} experts").format(number(self._most, 0)))
        if self._room < self._most:
            label = self.tr("no room")
            width = metrics.horizontalAdvance(label) + 8
            left = self._x(area, self._room) + 4
            if left + width < area.right():  # what does not fit is said by the tool tip
                box = QRectF(left, area.top() + 4, width, metrics.height() + 2)
                painter.fillRect(box, QColor(theme.surface))
                painter.drawText(box, Qt.AlignmentFlag.AlignCenter, label)

    def _draw_curves(self, painter: QPainter, area: QRectF, metrics: QFontMetricsF) -> None:
        theme, known = self._theme.theme, self._forecast
        if not len(known.slots):
            self._draw_legend(painter, area, metrics, [], self._why_no_curve())
            return
        solid = QColor(theme.hit) if theme.is_dark else QColor(theme.hit).darker(150)
        bent = QPen(solid, 2)
        lru = QPen(QColor(theme.muted), 1.2, Qt.PenStyle.DotLine)
        speed = QPen(QColor(theme.text), 1.4, Qt.PenStyle.DashLine)
        samples = [(bent, self.tr("hits, expected"))]
        xs = area.left() + area.width() * known.slots / self._most
        lines = [(known.hit_rates, bent)]
        if np.abs(known.hit_rates - known.lru_rates).max() > _DIFFERS:
            lines.insert(0, (known.lru_rates, lru))
            samples.append((lru, self.tr("LRU")))
        painter.save()
        painter.setClipRect(area.adjusted(0, -2, 0, 2))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(faded(QColor(theme.hit), 45))
        ys = area.bottom() - area.height() * known.hit_rates
        corners = [area.bottom()] * 2
        painter.drawPolygon(polygon(np.concatenate((xs, [xs[-1], xs[0]])), np.concatenate((ys, corners))))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        top = _round_up(float(known.tokens_per_s.max())) if len(known.tokens_per_s) else 0.0
        if top:
            lines.append((known.tokens_per_s / top, speed))
            samples.append((speed, self.tr("tokens/s, predicted")))
        for shares, pen in lines:
            painter.setPen(pen)
            painter.drawPolyline(polygon(xs, area.bottom() - area.height() * shares))
        painter.restore()
        if top:
            painter.setPen(QColor(theme.muted))
            for share in (0.5, 1.0):
                y = area.bottom() - share * area.height() - metrics.height() / 2
                box = QRectF(area.right() + 6, y, self.width() - area.right() - 6, metrics.height())
                painter.drawText(box, Qt.AlignmentFlag.AlignLeft, number(share * top, 0 if top >= 10 else 1))
        self._draw_legend(painter, area, metrics, samples)

    def _why_no_curve(self) -> str:
        if self._tier is not None and self._tier.tier == "ram" and not self._is_top:
            return self.tr("the curve is of VRAM")
        return self.tr("no curve yet: too few tokens")

    def _draw_legend(
        self,
        painter: QPainter,
        area: QRectF,
        metrics: QFontMetricsF,
        samples: list[tuple[QPen, str]],
        said: str = "",
    ) -> None:
        """Samples of the lines by name, in one row above the plot; `said` comes after them."""
        muted = QColor(self._theme.theme.muted)
        x, y = area.left(), metrics.height() / 2 + 1
        base = y + metrics.ascent() / 2 - 1
        for pen, text in samples:
            painter.setPen(pen)
            painter.drawLine(QLineF(x, y, x + 18, y))
            painter.setPen(muted)
            painter.drawText(QPointF(x + 23, base), text)
            x += 23 + metrics.horizontalAdvance(text) + 14
        if self._measured is not None:
            text = self.tr("now")
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(self._theme.theme.text))
            painter.drawPolygon(_diamond(QPointF(x + 5, y)))
            painter.setPen(muted)
            painter.drawText(QPointF(x + 14, base), text)
            x += 14 + metrics.horizontalAdvance(text) + 14
        painter.setPen(muted)
        painter.drawText(QPointF(x, base), said)

    def _draw_present(self, painter: QPainter, area: QRectF) -> None:
        theme, tier = self._theme.theme, self._tier
        if tier is None:
            return
        x = self._x(area, tier.slots)
        painter.setPen(QPen(QColor(theme.muted), 1, Qt.PenStyle.DotLine))
        painter.drawLine(QLineF(x, area.top(), x, area.bottom()))
        if self._measured is not None:
            painter.setPen(QPen(QColor(theme.surface), 1))
            painter.setBrush(QColor(theme.text))
            painter.drawPolygon(_diamond(QPointF(x, area.bottom() - area.height() * self._measured)))

    def _draw_handle(self, painter: QPainter, area: QRectF, metrics: QFontMetricsF) -> None:
        theme = self._theme.theme
        x = self._x(area, self.slots)
        accent = QColor(theme.accent)
        painter.setPen(QPen(accent, 2))
        painter.drawLine(QLineF(x, area.top(), x, area.bottom()))
        texts = [text for text in self.texts() if text]
        width = max(metrics.horizontalAdvance(text) for text in texts) + 14
        height = len(texts) * metrics.height() + 8
        left = x + 10 if x + 10 + width <= area.right() else x - 10 - width
        left = min(max(left, area.left() + 2), max(area.left() + 2, area.right() - width))
        box = QRectF(left, area.bottom() - height - 8, width, height)
        painter.setPen(QPen(accent if self.is_moved else QColor(theme.border), 1))
        painter.setBrush(QColor(theme.raised))
        painter.drawRoundedRect(box, 6, 6)
        painter.setPen(QColor(theme.text))
        for line, text in enumerate(texts):
            row = QRectF(box.left() + 7, box.top() + 4 + line * metrics.height(), width, metrics.height())
            painter.drawText(row, Qt.AlignmentFlag.AlignLeft, text)
        painter.setPen(QPen(QColor(theme.surface), 1.5))
        painter.setBrush(accent)
        grip = QPointF(x, area.bottom())
        if self.hasFocus():
            painter.save()
            painter.setPen(QPen(accent, 1.5))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawEllipse(grip, HANDLE_PX + 3, HANDLE_PX + 3)
            painter.restore()
        painter.drawEllipse(grip, HANDLE_PX, HANDLE_PX)

    # --- mouse and keys ---------------------------------------------------------------------------

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton or self._tier is None:
            event.ignore()
            return
        self._before_drag, self._dragging = self._wanted, True
        area = self._area(QFontMetricsF(self._font()))
        # Whoever takes the handle itself moves it from where it stands; elsewhere it comes to the mouse.
        if abs(event.position().x() - self._x(area, self.slots)) > _GRAB_PX:
            self._move_to(self._slots_at(event.position().x()))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._dragging:
            self._move_to(self._slots_at(event.position().x()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and self._dragging:
            self._dragging = False
            self._choose()

    def _slots_at(self, x: float) -> int:
        area = self._area(QFontMetricsF(self._font()))
        return round((x - area.left()) / max(area.width(), 1.0) * self._most)

    def _move_to(self, slots: int) -> None:
        slots = min(max(slots, _LEAST_SLOTS), self._most)
        if slots != self.slots:
            self.set_slots(slots)
            self.moved.emit(slots)

    def _choose(self) -> None:
        if self._tier is not None and self._wanted not in (None, self._tier.slots):
            self.chosen.emit(self.slots)
        else:
            self._wanted = None
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self._tier is None:
            event.ignore()
            return
        small, big = max(1, self._most // 100), max(1, self._most // 10)
        key = event.key()
        moves = {
            Qt.Key.Key_Left: -small,
            Qt.Key.Key_Right: small,
            Qt.Key.Key_PageDown: -big,
            Qt.Key.Key_PageUp: big,
            Qt.Key.Key_Home: -self._most,
            Qt.Key.Key_End: self._most,
        }
        if key in moves:
            self._move_to(self.slots + moves[Qt.Key(key)])
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._choose()
        elif key == Qt.Key.Key_Escape and (self._dragging or self.is_moved):
            self._wanted = self._before_drag if self._dragging else None
            self._dragging = False
            self.moved.emit(self.slots)
            self.update()
        else:
            event.ignore()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.update()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self.update()


def _diamond(at: QPointF) -> QPolygonF:
    half = 5.0
    return QPolygonF([at + QPointF(0, -half), at + QPointF(half, 0), at + QPointF(0, half), at + QPointF(-half, 0)])


def _round_up(value: float) -> float:
    """The next number of one figure, or two and a half: where an axis ends."""
    power = float(10 ** np.floor(np.log10(max(value, 1e-6))))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 1.02)
