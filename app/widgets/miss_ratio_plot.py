"""Hit rate and predicted speed for every size of the expert cache, with a handle to choose one."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QFont, QFontMetricsF, QKeyEvent, QMouseEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.models.cache_figures import NO_FORECAST, CacheForecast
from app.theme import scaled, tabular
from app.widgets.miss_ratio_picture import MissRatioPicture, plot_area
from app.widgets.quantities import memory, number
from engine.telemetry.messages import TierReport

_GRAB_PX = 12.0
_LEAST_SLOTS = 1


class MissRatioPlot(QWidget):
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
        super().__init__(parent)
        self._tier: TierReport | None = None
        self._forecast: CacheForecast = NO_FORECAST
        self._room = 0
        self._measured: float | None = None
        self._wanted: int | None = None
        self._before_drag: int | None = None
        self._dragging = False
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setCursor(Qt.CursorShape.SplitHCursor)
        self.setAccessibleName(self.tr("Miss-ratio curve"))
        self.setToolTip(self.tr("Drag the handle to resize the cache. Hatched: more than the free memory."))

    # --- what is shown ----------------------------------------------------------------------------

    def show_tier(self, tier: TierReport | None, forecast: CacheForecast, room: int, measured: float | None) -> None:
        """Shows a report.

        Args:
            forecast: `NO_FORECAST` while there is none.
            room: experts that fit in memory.
            measured: the hit rate at the current size, if anything was looked up.
        """
        self._tier, self._forecast, self._room, self._measured = tier, forecast, room, measured
        if tier is None:
            self._wanted, self._dragging = None, False
        elif self._wanted is not None:
            self._wanted = min(self._wanted, self._most)
        self.setAccessibleDescription(self._spoken())
        self.update()

    @property
    def slots(self) -> int:
        """The handle's position, in experts."""
        if self._wanted is not None:
            return self._wanted
        return self._tier.slots if self._tier is not None else 0

    @property
    def is_moved(self) -> bool:
        """Whether the handle is away from the current size."""
        return self._wanted is not None

    def set_slots(self, slots: int) -> None:
        """Moves the handle; emits nothing."""
        if self._tier is not None and slots != self.slots:
            self._wanted = min(max(slots, _LEAST_SLOTS), self._most)
            self.setAccessibleDescription(self._spoken())
            self.update()

    def put_back(self) -> None:
        """Resets the handle to the current size."""
        self._wanted, self._dragging = None, False
        self.setAccessibleDescription(self._spoken())
        self.update()

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

    # --- painting ---------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        return self._tier.most_slots if self._tier is not None else 1

    def _font(self) -> QFont:
        font = tabular(self.font())
        font.setPixelSize(max(9, scaled(11.5)))
        return font

    def _area(self) -> QRectF:
        return plot_area(QRectF(self.rect()), QFontMetricsF(self._font()), self._forecast)

    def _x(self, slots: float) -> float:
        area = self._area()
        return area.left() + area.width() * slots / self._most

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        if self._tier is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._font())
        picture = MissRatioPicture(self._tier, self._forecast, self._room, self._measured)
        picture.draw(painter, self._area(), float(self.width()))
        picture.draw_handle(
            painter, self._area(), self.slots, self.texts(), is_moved=self.is_moved, has_focus=self.hasFocus()
        )
        painter.end()

    # --- mouse and keys ---------------------------------------------------------------------------

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton or self._tier is None:
            event.ignore()
            return
        self._before_drag, self._dragging = self._wanted, True
        # Pressing the handle drags it from where it is; pressing elsewhere moves it there.
        if abs(event.position().x() - self._x(self.slots)) > _GRAB_PX:
            self._move_to(self._slots_at(event.position().x()))

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._dragging:
            self._move_to(self._slots_at(event.position().x()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton and self._dragging:
            self._dragging = False
            self._choose()

    def _slots_at(self, x: float) -> int:
        area = self._area()
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
