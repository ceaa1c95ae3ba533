"""The visible time range: following the live end, or frozen while recording continues; and its keys and colours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PySide6.QtCore import QCoreApplication, QLocale, QObject, Qt, Signal
from PySide6.QtGui import QColor

from app.services.history.gauges import Floats
from app.services.history.history import History
from app.theme import themed
from app.widgets.page import Key

if TYPE_CHECKING:
    from app.widgets.timeline.view import TimelineView


FILL_ALPHA, FAINT_ALPHA = 105, 55


def expert_colours() -> tuple[QColor, QColor, QColor]:
    """Of hits, fetches and experts computed on the CPU."""
    return themed("hit"), themed("pcie"), themed("miss")


def faded(colour: QColor, alpha: int) -> QColor:
    result = QColor(colour)
    result.setAlpha(alpha)
    return result


def text_on(colour: QColor) -> QColor:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else float(((part + 0.055) / 1.055) ** 2.4)

    luminance = 0.2126 * linear(colour.redF()) + 0.7152 * linear(colour.greenF()) + 0.0722 * linear(colour.blueF())
    return QColor("#14161A" if luminance > 0.18 else "#FFFFFF")


ZOOM = 1.25
PAN = 0.1
_NEAR_PX, _FAR_PX = 8, 40
_STRETCHES = 50
_ENTER = (Qt.Key.Key_Return, Qt.Key.Key_Enter)

translate = QCoreApplication.translate


def timeline_keys() -> list[Key]:
    return [
        ("← →", translate("Timeline", "Move through time")),
        ("Page Up, Page Down", translate("Timeline", "Move by almost a full view")),
        ("↑ ↓", translate("Timeline", "Zoom in, zoom out")),
        (translate("Timeline", "Space"), translate("Timeline", "Freeze the view, or follow live")),
        (translate("Timeline", "Home"), translate("Timeline", "Go back to now")),
        (", .", translate("Timeline", "Move the crosshair; with Shift, farther")),
        ("[ ]", translate("Timeline", "Select the previous or next token")),
        ("Shift+← →", translate("Timeline", "Select a range")),
        (translate("Timeline", "Enter"), translate("Timeline", "Zoom to the selected token or range")),
        (translate("Timeline", "Esc"), translate("Timeline", "Clear the selection")),
    ]


def key_pressed(view: TimelineView, key: int, *, shift: bool) -> bool:
    navigator = view.navigator
    middle = navigator.viewport.at(navigator.viewport.width / 2)
    cursor = view.cursor_ns if view.cursor_ns is not None else middle
    if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
        direction = -1 if key == Qt.Key.Key_Left else 1
        if shift:
            _stretch_selection(view, direction)
        else:
            navigator.pan(direction * PAN)
    elif key in (Qt.Key.Key_Up, Qt.Key.Key_Plus, Qt.Key.Key_Equal):
        navigator.zoom(1 / ZOOM, cursor)
    elif key in (Qt.Key.Key_Down, Qt.Key.Key_Minus):
        navigator.zoom(ZOOM, cursor)
    elif key in (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown):
        navigator.pan(-0.9 if key == Qt.Key.Key_PageUp else 0.9)
    elif key == Qt.Key.Key_Space:
        navigator.toggle()
    elif key == Qt.Key.Key_Home:
        view.clear_selection()
        navigator.go_live()
    elif key in (Qt.Key.Key_Comma, Qt.Key.Key_Period, Qt.Key.Key_Less, Qt.Key.Key_Greater):
        direction = -1 if key in (Qt.Key.Key_Comma, Qt.Key.Key_Less) else 1
        view.set_cursor(cursor + direction * (_FAR_PX if shift else _NEAR_PX) * navigator.viewport.column_ns)
    elif key in (Qt.Key.Key_BracketLeft, Qt.Key.Key_BracketRight):
        view.step_token(1 if key == Qt.Key.Key_BracketRight else -1)
    elif key in _ENTER and view.token is not None:
        navigator.show(view.token.start_ns, view.token.end_ns)
    elif key in _ENTER and view.selection is not None:
        navigator.show(*view.selection)
    elif key == Qt.Key.Key_Escape and (view.selection is not None or view.token is not None):
        view.clear_selection()
    else:
        return False
    return True


def _stretch_selection(view: TimelineView, direction: int) -> None:
    """Moves the end of the selection; without one, starts it at the crosshair."""
    view.navigator.freeze()
    viewport = view.navigator.viewport
    step = direction * viewport.span_ns / _STRETCHES
    begin = view.cursor_ns if view.cursor_ns is not None else viewport.at(viewport.width / 2)
    start, end = view.selection or (begin, begin)
    view.select(*sorted((start, end + step)))


SHORTEST_NS = 20_000
"""Twenty microseconds: a layer's attention on a fast machine."""
LONGEST_NS = 7 * 24 * 3600 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Viewport:
    """The stretch from `start_ns` that is `span_ns` long, over `width` columns."""

    start_ns: float
    span_ns: float
    width: int

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.span_ns

    @property
    def column_ns(self) -> float:
        return self.span_ns / max(self.width, 1)

    def x(self, at_ns: float) -> float:
        return (at_ns - self.start_ns) / self.column_ns

    def at(self, x: float) -> float:
        return self.start_ns + x * self.column_ns

    def edges(self) -> Floats:
        """Edges of columns that lie on a grid of their own, which does not move with the view: nothing shimmers.

        [n + 1], from the column before the first to the one after the last.
        """
        first = np.floor(self.start_ns / self.column_ns)
        return np.asarray((first + np.arange(self.width + 2, dtype=np.float64)) * self.column_ns)

    def zoomed(self, factor: float, anchor_ns: float) -> Viewport:
        span = min(max(self.span_ns * factor, SHORTEST_NS), LONGEST_NS)
        return replace(self, start_ns=anchor_ns - (anchor_ns - self.start_ns) * span / self.span_ns, span_ns=span)

    def panned(self, part: float) -> Viewport:
        return replace(self, start_ns=self.start_ns + part * self.span_ns)

    def ending_at(self, end_ns: float) -> Viewport:
        return replace(self, start_ns=end_ns - self.span_ns)

    def within(self, start_ns: float, end_ns: float) -> Viewport:
        margin = 0.9 * self.span_ns
        return replace(self, start_ns=min(max(self.start_ns, start_ns - margin), end_ns - self.span_ns + margin))


def duration(nanoseconds: float) -> str:
    """`-1:30`, `2.5 s`, `340 ms`, `12 µs`: short, for axes and readouts."""
    sign, value = ("−" if nanoseconds < 0 else ""), abs(nanoseconds)
    if value >= 3600e9:
        return f"{sign}{value // 3600e9:.0f} h {value % 3600e9 // 60e9:02.0f} min"
    if value >= 120e9:
        return f"{sign}{value // 60e9:.0f}:{value % 60e9 // 1e9:02.0f} min"
    if value >= 1e9:
        return f"{sign}{_three(value / 1e9)} s"
    if value >= 1e6:
        return f"{sign}{_three(value / 1e6)} ms"
    if value >= 1e3:
        return f"{sign}{_three(value / 1e3)} µs"
    return f"{sign}{value:.0f} ns" if value else "0"


def _three(value: float) -> str:
    """At most three digits: `2.5`, `340`."""
    return QLocale().toString(value, "g", 3)


BEHIND_NS = 550_000_000
"""How far the live view lags behind the newest data: by then every lane's records have arrived."""
WHOLE = 0
"""Instead of a length: the whole session."""
_MARGIN = 1.02


class Navigator(QObject):
    """Signals: `moved` after every change of the visible range; `live_changed(bool)`."""

    moved = Signal()
    live_changed = Signal(bool)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._source: History | None = None
        self._still: History | None = None
        self.preset_ns = 60_000_000_000
        self.is_recorded = False
        self.viewport = Viewport(0.0, 60e9, 100)

    @property
    def history(self) -> History | None:
        return self._still if self._still is not None else self._source

    @property
    def is_live(self) -> bool:
        return self._still is None and not self.is_recorded

    @property
    def zero_ns(self) -> float:
        history = self.history
        moment = None if history is None else history.start_ns if self.is_recorded else history.end_ns
        return float(moment) if moment is not None else self.viewport.end_ns

    def set_source(self, history: History | None, *, recorded: bool) -> None:
        was_live = self.is_live
        self._source, self._still, self.is_recorded = history, None, recorded
        if recorded:
            self.preset_ns = WHOLE
            self._to_preset()
        else:
            self.follow()
        if was_live != self.is_live:
            self.live_changed.emit(self.is_live)
        self.moved.emit()

    def set_width(self, width: int) -> None:
        self.viewport = replace(self.viewport, width=max(width, 1))
        self.follow()

    def set_preset(self, span_ns: int) -> None:
        self.preset_ns = span_ns
        self._to_preset()
        self.moved.emit()

    def follow(self) -> None:
        if self.is_live and self._source is not None:
            if self.preset_ns == WHOLE:
                self._to_preset()
            else:
                self.viewport = self.viewport.ending_at(self._end_ns())

    def freeze(self) -> None:
        if self.is_live and self._source is not None:
            self._still = self._source.copy()
            self.live_changed.emit(False)
            self.moved.emit()

    def go_live(self) -> None:
        if self._still is not None:
            self._still = None
            self.live_changed.emit(True)
        if self.is_recorded:
            self.viewport = self.viewport.ending_at(self._end_ns())
        self.follow()
        self.moved.emit()

    def toggle(self) -> None:
        if self.is_live:
            self.freeze()
        else:
            self.go_live()

    def pan(self, part: float) -> None:
        """Moves by `part` of the visible range; freezes a live view."""
        self.freeze()
        self._move(self.viewport.panned(part))

    def zoom(self, factor: float, anchor_ns: float | None = None) -> None:
        self.preset_ns = -1
        anchor = self.viewport.end_ns if self.is_live or anchor_ns is None else anchor_ns
        self._move(self.viewport.zoomed(factor, anchor))

    def show(self, start_ns: float, end_ns: float) -> None:
        self.freeze()
        self.preset_ns = -1
        span = max((end_ns - start_ns) * 1.1, 1.0)
        viewport = replace(self.viewport, start_ns=start_ns - (span - (end_ns - start_ns)) / 2, span_ns=span)
        self._move(viewport.zoomed(1.0, viewport.start_ns + span / 2))

    def place(self, viewport: Viewport) -> None:
        """Sets exactly this range: for a view that follows another one."""
        self.preset_ns = -1
        self.viewport = viewport
        self.moved.emit()

    def _move(self, viewport: Viewport) -> None:
        history = self.history
        if history is not None and history.start_ns is not None and history.end_ns is not None:
            viewport = viewport.within(history.start_ns, history.end_ns)
        self.viewport = viewport
        self.follow()
        self.moved.emit()

    def _to_preset(self) -> None:
        history = self.history
        if self.preset_ns != WHOLE:
            end_ns = self.viewport.end_ns
            viewport = replace(self.viewport, span_ns=float(self.preset_ns)).ending_at(end_ns)
            if history is not None and history.start_ns is not None and history.end_ns is not None:
                viewport = viewport.within(history.start_ns, history.end_ns)
            self.viewport = viewport
            self.follow()
        elif history is not None and history.start_ns is not None:
            start, end = history.start_ns, self._end_ns()
            span = max((end - start) * _MARGIN, 1e9)
            self.viewport = replace(self.viewport, start_ns=end - span, span_ns=span)

    def _end_ns(self) -> float:
        history = self.history
        if history is None or history.end_ns is None:
            return self.viewport.end_ns
        return float(history.end_ns - (BEHIND_NS if self.is_live else 0))
