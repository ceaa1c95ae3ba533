"""Hit rate and predicted speed for every size of the expert cache, with a handle to choose one."""

from __future__ import annotations

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.models.cache_figures import NO_FORECAST, CacheForecast
from app.theme import themed
from app.widgets.chart import Axis, Chart, Legend, hit_colour
from app.widgets.quantities import memory, number
from app.widgets.timeline.navigator import faded
from engine.protocol import TierReport

_GRAB_PX = 12.0
_LEAST_SLOTS = 1
_NONE = np.empty(0)
_DIFFERS = 0.02
"""Difference of two curves from which both are drawn."""


class MissRatioPlot(Chart):
    """One tier: sizes on the x axis, hit rate on the left, predicted tokens per second on the right.

    The handle is at the current size until it is moved.  Axis and handle are shown even without a curve: a tier can
    be resized before there is enough data to predict anything.

    Signals:
        moved(int): experts at the handle, while it is dragged.
        chosen(int): the handle was released, or Enter pressed.
    """

    moved = Signal(int)
    chosen = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        percent = Axis("left", lambda share: self.tr("{0}%").format(number(100 * share, 0)), grid=True, widest="100%")
        percent.setTickSpacing(0.5, 0.5)
        self._speeds = Axis("right", self._speed_words, widest="000")
        self._speeds.setTickSpacing(0.5, 0.5)
        self._sizes = Axis("bottom", lambda slots: number(slots, 0))
        super().__init__(parent, view=_HandleBox(self), left=percent, right=self._speeds, bottom=self._sizes)
        self._lru, self._rates, self._speed = pg.PlotCurveItem(), pg.PlotCurveItem(fillLevel=0), pg.PlotCurveItem()
        self._nothing = pg.PlotCurveItem(pen=None)
        self._no_room = pg.LinearRegionItem(movable=False, pen=pg.mkPen(None))
        self._no_room_words = pg.TextItem(self.tr("no room"), anchor=(-0.05, 1.1))
        self._now = pg.InfiniteLine(angle=90)
        self._hits = pg.ScatterPlotItem(symbol="d", size=10)
        self._handle = pg.InfiniteLine(angle=90)
        self._label = pg.InfLineLabel(self._handle, position=0.33, anchors=[(-0.06, 0.5), (1.06, 0.5)])
        self._legend = Legend(self)
        for item in (
            self._no_room,
            self._no_room_words,
            self._now,
            self._lru,
            self._rates,
            self._speed,
            self._hits,
            self._handle,
        ):
            self.view.addItem(item, ignoreBounds=True)
        self.view.setYRange(0, 1.03, padding=0)
        self.view.sigTransformChanged.connect(lambda _view: self._hatch())
        self._tier: TierReport | None = None
        self._top_speed = 0.0
        self._forecast: CacheForecast = NO_FORECAST
        self._room = 0
        self._measured: float | None = None
        self._wanted: int | None = None
        self._before_drag: int | None = None
        self._dragging = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setCursor(Qt.CursorShape.SplitHCursor)
        self.setAccessibleName(self.tr("Miss-ratio curve"))
        self.setToolTip(self.tr("Drag the handle to resize the cache. Hatched: more than the free memory."))
        self.dress()

    # --- what is shown ----------------------------------------------------------------------------

    def show_tier(self, tier: TierReport | None, forecast: CacheForecast, room: int, measured: float | None) -> None:
        self._tier, self._forecast, self._room, self._measured = tier, forecast, room, measured
        if tier is None:
            self._wanted, self._dragging = None, False
        elif self._wanted is not None:
            self._wanted = min(self._wanted, self._most)
        self._draw()

    @property
    def slots(self) -> int:
        if self._wanted is not None:
            return self._wanted
        return self._tier.slots if self._tier is not None else 0

    @property
    def is_moved(self) -> bool:
        return self._wanted is not None

    def set_slots(self, slots: int) -> None:
        """Moves the handle; emits nothing."""
        if self._tier is not None and slots != self.slots:
            self._wanted = min(max(slots, _LEAST_SLOTS), self._most)
            self._place_handle()

    def put_back(self) -> None:
        self._wanted, self._dragging = None, False
        self._place_handle()

    def texts(self) -> tuple[str, str]:
        """What the handle's size would give: (`1,012 experts · 2.1 GB`, `hit 64% · 24.6 tokens/s`)."""
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
        keys = self.tr("Left and right move the handle, Enter resizes the cache, Escape resets the handle.")
        return " ".join(filter(None, (size + ":" if gives else size + ".", gives + "," if gives else "", keys)))

    def sizeHint(self) -> QSize:
        return QSize(320, 190)

    def minimumSizeHint(self) -> QSize:
        return QSize(220, 150)

    # --- drawing ----------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        return self._tier.most_slots if self._tier is not None else 1

    def _speed_words(self, share: float) -> str:
        return number(share * self._top_speed, 0 if self._top_speed >= 10 else 1) if self._top_speed else ""

    def dress(self) -> None:
        super().dress()
        self._rates.setPen(self.pen(hit_colour(), 2))
        self._rates.setBrush(faded(themed("hit"), 45))
        self._lru.setPen(self.pen(themed("muted"), 1.2, Qt.PenStyle.DotLine))
        self._speed.setPen(self.pen(themed("text"), 1.4, Qt.PenStyle.DashLine))
        self._now.setPen(self.pen(themed("muted"), 1, Qt.PenStyle.DotLine))
        self._hits.setPen(self.pen(themed("surface")))
        self._hits.setBrush(themed("text"))
        self._handle.setPen(self.pen(themed("accent"), 2))
        self._no_room_words.fill = pg.mkBrush(themed("surface"))
        self._no_room_words.setColor(themed("muted"))
        self._no_room_words.setFont(self.axes["bottom"].style["tickFont"])
        self._label.fill = pg.mkBrush(themed("raised"))
        self._label.textItem.setFont(self.axes["bottom"].style["tickFont"])
        self._legend.dress()
        self._draw()

    def _hatch(self) -> None:
        self._no_room.setBrush(self.hatched(faded(themed("faint"), 110)))
        left = self.view.mapFromView(QPointF(self._room, 0)).x()
        has_place = left + self._no_room_words.boundingRect().width() + 8 < self.view.width()
        self._no_room_words.setPos(self._room, 0)
        self._no_room_words.setVisible(has_place and not self.is_moved)  # else only the tooltip has it

    def _draw(self) -> None:
        tier, known = self._tier, self._forecast
        self.centralWidget.setVisible(tier is not None)
        self._place_handle()
        if tier is None:
            return
        self.view.setXRange(0, self._most, padding=0)
        self._sizes.set_title(self.tr("experts kept, of {0}").format(number(self._most, 0)))
        self._no_room.setRegion((min(self._room, self._most), self._most))
        self._no_room.setVisible(self._room < self._most)
        self._now.setPos(tier.slots)
        self._hits.setData(
            [tier.slots] * (self._measured is not None), [self._measured or 0] * (self._measured is not None)
        )
        self._top_speed = _round_up(float(known.tokens_per_s.max())) if len(known.tokens_per_s) else 0.0
        self._speeds.picture = None
        speeds = known.tokens_per_s / self._top_speed if self._top_speed else _NONE
        differs = len(known.slots) > 0 and np.abs(known.hit_rates - known.lru_rates).max() > _DIFFERS
        lines = (
            (self._rates, known.hit_rates, self.tr("hits, expected")),
            (self._lru, known.lru_rates if differs else _NONE, self.tr("LRU")),
            (self._speed, speeds, self.tr("tokens/s, predicted")),
        )
        for line, shares, _name in lines:
            line.setData(known.slots if len(shares) else _NONE, shares)
        named = [(line, name) for line, shares, name in lines if len(shares)]
        if not named:
            named = [(self._nothing, self.tr("too few tokens for a curve"))]
        if self._measured is not None:
            named.append((self._hits, self.tr("now")))
        self._legend.show_items(named)

    def _place_handle(self) -> None:
        self.setAccessibleDescription(self._spoken())
        self._handle.setPos(self.slots)
        self._label.border = self.pen(themed("accent" if self.is_moved else "border"))
        self._label.setColor(themed("text"))
        self._label.setFormat("\n".join(filter(None, self.texts())))
        self._label.setVisible(self.is_moved)  # where it rests, what is beside the chart says it
        self._hatch()

    # --- mouse and keys ---------------------------------------------------------------------------

    def drag(self, at: float, from_px: float, *, is_start: bool, is_end: bool) -> None:
        """The mouse is dragged to so many experts: the handle, from where it is; pressed elsewhere, it jumps there."""
        if is_start and self._tier is not None:
            self._before_drag, self._dragging = self._wanted, True
            self._by = self.slots - at if abs(from_px) <= _GRAB_PX else 0.0
        if self._dragging:
            self._move_to(round(at + self._by))
            if is_end:
                self._dragging = False
                self._choose()

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
            self._place_handle()

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
            self._place_handle()
            self.moved.emit(self.slots)
        else:
            event.ignore()


class _HandleBox(pg.ViewBox):  # type: ignore[misc]
    """pyqtgraph's view, whose drags and clicks move the handle."""

    def __init__(self, plot: MissRatioPlot) -> None:
        super().__init__(enableMenu=False, enableMouse=False, defaultPadding=0)
        self._plot = plot

    def mouseDragEvent(self, event: pg.GraphicsScene.mouseEvents.MouseDragEvent, axis: int | None = None) -> None:
        if event.button() == Qt.MouseButton.LeftButton and axis is None:
            event.accept()
            self._move(event.pos(), event.buttonDownPos(), is_start=event.isStart(), is_end=event.isFinish())

    def mouseClickEvent(self, event: pg.GraphicsScene.mouseEvents.MouseClickEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            event.accept()
            self._move(event.pos(), event.pos(), is_start=True, is_end=True)

    def _move(self, at: QPointF, pressed: QPointF, *, is_start: bool, is_end: bool) -> None:
        from_px = self.mapFromView(QPointF(self._plot.slots, 0)).x() - pressed.x()
        self._plot.drag(self.mapToView(at).x(), from_px, is_start=is_start, is_end=is_end)


def _round_up(value: float) -> float:
    """The next number with one significant digit, or 2.5: the end of an axis."""
    power = float(10 ** np.floor(np.log10(max(value, 1e-6))))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 1.02)
