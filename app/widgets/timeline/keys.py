"""The timeline's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtGui import QColor

from app.theme import themed
from app.widgets.shortcuts import Key

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
    """Black or white, whichever has more contrast on `colour` (WCAG's relative luminance)."""

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
