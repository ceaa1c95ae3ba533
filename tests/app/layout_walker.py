"""Looks for what cannot be read, reached or named in a window: text without room, widgets on each other, and so on."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

from PySide6.QtCore import QPoint, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QAccessible, QFontMetrics, QPainter, QPixmap, QTextDocument
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractScrollArea,
    QAbstractSpinBox,
    QCheckBox,
    QComboBox,
    QHeaderView,
    QLabel,
    QLineEdit,
    QMainWindow,
    QPlainTextEdit,
    QScrollArea,
    QScrollBar,
    QStyle,
    QStyleOptionComboBox,
    QStyleOptionSpinBox,
    QTextEdit,
    QToolButton,
    QWidget,
)
from shiboken6 import getCppPointer, wrapInstance

from app.widgets.banner import Toast
from app.widgets.chip import ElidedLabel
from app.widgets.page import Popover
from app.widgets.scaffold import UNSPACED, WrappedLabel

SLACK_PX = 2
"""Rounding of font sizes, and borders that a style leaves out of its hints."""

LEAST_ELIDED_PX = 24
"""An elided text that has less room says nothing."""


def layout_problems(window: QWidget, screen: QSize) -> list[str]:
    """One line for everything wrong in a window that is shown; `screen` is the room on the smallest screen."""
    found = list(_of_window(window, screen))
    for widget in (window, *window.findChildren(QWidget)):
        if widget.isVisible() and widget.window() is window and not _is_of_qt(widget):
            found += [f"{_name(widget)}: {problem}" for problem in (*_of_text(widget), *_of_place(widget))]
            found += _overlaps(widget)
    return found + _of_paint(window)


# --- names ----------------------------------------------------------------------------------------


_USED = (QAbstractButton, QAbstractItemView, QAbstractSpinBox, QComboBox, QLineEdit, QPlainTextEdit, QTextEdit)
"""What is used though keys may not reach it."""


def without_name(window: QWidget) -> list[str]:
    """Everything that can be used, shown now or not, of which somebody who cannot see the window is told nothing."""
    found = []
    for widget in window.findChildren(QWidget):
        parent = widget.parent()
        of_qt = widget.objectName().startswith("qt_") or isinstance(widget, QScrollBar)
        of_another = isinstance(parent, QAbstractSpinBox | QComboBox | QAbstractItemView | QLineEdit)
        of_another |= parent is not None and parent.inherits("QComboBoxPrivateContainer")
        of_another |= _is_of_hidden_toast(widget)  # it has its words when it comes up
        reached = widget.focusPolicy() & Qt.FocusPolicy.TabFocus or isinstance(widget, _USED)
        if not reached or of_qt or of_another or widget.focusProxy() is not None:
            continue
        interface = QAccessible.queryAccessibleInterface(widget)
        # A combo box's name is what is chosen in it, on some systems: that says nothing of what it is for.
        name = widget.accessibleName() or ("" if isinstance(widget, QComboBox) else _spoken(interface))
        if not name.strip():
            found.append(f"{_name(widget)} has no name")
    return found


def _is_of_hidden_toast(widget: QWidget) -> bool:
    around = widget.parentWidget()
    while around is not None and not isinstance(around, Toast):
        around = around.parentWidget()
    return around is not None and not around.isVisible()


def _spoken(interface: object) -> str:
    text = getattr(interface, "text", None)
    return str(text(QAccessible.Text.Name)) if text is not None else ""


# --- the window -----------------------------------------------------------------------------------


def _of_window(window: QWidget, screen: QSize) -> Iterator[str]:
    least = window.minimumSize()
    if least.width() > screen.width() or least.height() > screen.height():
        yield f"the window cannot be made smaller than {least.width()} x {least.height()}"
    inside = window.centralWidget() if isinstance(window, QMainWindow) else window
    wanted = inside.minimumSizeHint()
    if wanted.width() > inside.width() or wanted.height() > inside.height():
        has = f"{inside.width()} x {inside.height()}"
        yield f"the window's content needs {wanted.width()} x {wanted.height()} and has {has}"


def _style_of(widget: QWidget) -> QStyle:
    """PySide at times takes a style for an object that lay at its address before."""
    style: object = widget.style()
    if isinstance(style, QStyle):
        return style
    return cast("QStyle", wrapInstance(getCppPointer(style)[0], QStyle))


# --- text -----------------------------------------------------------------------------------------


def _of_text(widget: QWidget) -> Iterator[str]:
    if isinstance(widget, ElidedLabel):
        if widget.text() != widget.full_text:
            if widget.width() < LEAST_ELIDED_PX:
                yield f"elided to {widget.width()} px"
            if widget.full_text not in _tip(widget):
                yield "elided, and no tooltip says the rest"
    elif isinstance(widget, QLabel):
        yield from _of_label(widget)
    elif isinstance(widget, QAbstractButton):
        yield from _of_button(widget)
    elif isinstance(widget, QComboBox):
        option = QStyleOptionComboBox()
        widget.initStyleOption(option)
        room = _style_of(widget).subControlRect(
            QStyle.ComplexControl.CC_ComboBox, option, QStyle.SubControl.SC_ComboBoxEditField, widget
        )
        yield from _one_line(widget.currentText(), widget.fontMetrics(), room, widget)
    elif isinstance(widget, QAbstractSpinBox):
        spin = QStyleOptionSpinBox()
        widget.initStyleOption(spin)
        room = _style_of(widget).subControlRect(
            QStyle.ComplexControl.CC_SpinBox, spin, QStyle.SubControl.SC_SpinBoxEditField, widget
        )
        yield from _one_line(widget.text(), widget.fontMetrics(), room, widget)
    elif isinstance(widget, QLineEdit) and not isinstance(widget.parent(), QAbstractSpinBox | QComboBox):
        if not widget.text():
            yield from _one_line(widget.placeholderText(), widget.fontMetrics(), widget.rect(), widget)
    elif isinstance(widget, QHeaderView) and widget.orientation() == Qt.Orientation.Horizontal:
        for section in range(widget.count()):
            if widget.isSectionHidden(section):
                continue
            text = str(widget.model().headerData(section, Qt.Orientation.Horizontal) or "")
            needed = widget.fontMetrics().horizontalAdvance(text)
            if needed > widget.sectionSize(section) + SLACK_PX:
                yield f"column {text!r} needs {needed} px and has {widget.sectionSize(section)}"


def _of_label(label: QLabel) -> Iterator[str]:
    if not label.text() or label.pixmap().width():
        return
    if isinstance(label, WrappedLabel) and label.shown != label.text() and label.text() not in _tip(label):
        yield "shortened, and no tooltip says the rest"
    if label.wordWrap():
        needed = label.heightForWidth(label.width())
        if needed > label.height() + SLACK_PX:
            yield f"needs a height of {needed} and has {label.height()}"
        longest = max((_widest_word(label), 0))
        if longest > label.contentsRect().width() + SLACK_PX:
            yield f"has a word of {longest} px and {label.width()} px of room"
        return
    hint = label.minimumSizeHint()
    if hint.width() > label.width() + SLACK_PX or hint.height() > label.height() + SLACK_PX:
        yield f"needs {hint.width()} x {hint.height()} and has {label.width()} x {label.height()}"


def _widest_word(label: QLabel) -> int:
    text = label.shown if isinstance(label, WrappedLabel) else label.text()
    if label.textFormat() == Qt.TextFormat.RichText or text.startswith("<"):
        document = QTextDocument()
        document.setHtml(text)
        text = document.toPlainText()
    words = re.split(rf"[\s/-]|(?<=[{UNSPACED}])|(?=[{UNSPACED}])", text)
    return max((label.fontMetrics().horizontalAdvance(word) for word in words), default=0)


def _of_button(button: QAbstractButton) -> Iterator[str]:
    hint = button.sizeHint()
    if button.hasHeightForWidth():
        if button.heightForWidth(button.width()) > button.height() + SLACK_PX:
            yield f"needs a height of {button.heightForWidth(button.width())} and has {button.height()}"
    elif button.text() and (isinstance(button, QCheckBox | QToolButton) or button.text()):
        if hint.width() > button.width() + SLACK_PX or hint.height() > button.height() + SLACK_PX:
            yield f"needs {hint.width()} x {hint.height()} and has {button.width()} x {button.height()}"
    elif button.width() < 16 or button.height() < 16:
        yield f"is only {button.width()} x {button.height()}"


def _one_line(text: str, metrics: QFontMetrics, room: QRect, widget: QWidget) -> Iterator[str]:
    if metrics.horizontalAdvance(text) > room.width() + SLACK_PX and text not in _tip(widget):
        yield f"shows {text!r}, which needs {metrics.horizontalAdvance(text)} px, in {room.width()}"
    if metrics.height() > room.height() + SLACK_PX + 2:
        yield f"has a line of {metrics.height()} px in {room.height()}"


def _tip(widget: QWidget) -> str:
    """What the pointer is told there, by the widget or by one around it."""
    at: QWidget | None = widget
    while at is not None:
        if at.toolTip():
            return at.toolTip()
        at = at.parentWidget()
    return ""


# --- painted text ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaintedText:
    """A text that a widget of ours has painted itself.

    Attributes:
        needs: where its letters are, in the coordinates of what it was painted on.
        room: what it was given; None where only a point was.
        around: all of what it was painted on.
    """

    text: str
    needs: QRectF
    room: QRectF | None
    around: QRectF

    def problems(self) -> Iterator[str]:
        if self.room is not None:
            wide, high = self.needs.width() - self.room.width(), self.needs.height() - self.room.height()
            if wide > SLACK_PX or high > SLACK_PX + 1:
                yield f"paints {self.text!r} of {_size(self.needs)} into {_size(self.room)}"
        slack = SLACK_PX + 1
        if not self.around.adjusted(-slack, -slack, slack, slack).contains(self.needs):
            yield f"paints {self.text!r} at {_words(self.needs.toRect())}, outside of {_size(self.around)}"


@contextlib.contextmanager
def painted_texts() -> Iterator[list[PaintedText]]:
    """Collects every text that is painted meanwhile."""
    found: list[PaintedText] = []
    draw: Callable[..., Any] = QPainter.drawText

    def listen(painter: QPainter, *given: Any) -> Any:
        metrics, device = painter.fontMetrics(), painter.device()
        ratio = device.devicePixelRatio() if isinstance(device, QPixmap) else 1.0
        around = QRectF(0, 0, device.width() / ratio, device.height() / ratio)
        text = str(given[-1])
        room: QRectF | None = None
        if isinstance(given[0], QRect | QRectF):
            room = QRectF(given[0])
            flags = given[1].value if hasattr(given[1], "value") else int(given[1])
            needs = QRectF(metrics.boundingRect(room.toRect(), flags, text))
        else:
            needs = QRectF(metrics.boundingRect(text)).translated(given[0])
        transform = painter.worldTransform()
        if text.strip():
            room = None if room is None else transform.mapRect(room)
            found.append(PaintedText(text, transform.mapRect(needs), room, around))
        return draw(painter, *given)

    with patch.object(QPainter, "drawText", listen):
        yield found


def _of_paint(window: QWidget) -> list[str]:
    """Labels in what is painted by hand, which no widget knows of."""
    found = []
    for widget in (window, *window.findChildren(QWidget)):
        if not widget.isVisible() or widget.window() is not window or not _paints(widget):
            continue
        picture = QPixmap(widget.size())
        with painted_texts() as texts:
            widget.render(picture, QPoint(), renderFlags=QWidget.RenderFlag.DrawWindowBackground)
        beside = [one for one in widget.children() if isinstance(one, QWidget) and one.isVisible()]
        for number, one in enumerate(texts):
            said = list(one.problems())
            said += [
                f"{one.text!r} and {_name(child)} lie on each other"
                for child in beside
                if _lie_on_each_other(one.needs, QRectF(child.geometry()))
            ]
            said += [
                f"{one.text!r} and {other.text!r} lie on each other"
                for other in texts[:number]
                if _lie_on_each_other(one.needs, other.needs) and one.around == other.around
            ]
            found += [f"{_name(widget)}: {problem}" for problem in said]
    return found


def _paints(widget: QWidget) -> bool:
    """By itself, or as the part of a list that shows what a delegate of ours paints."""
    parent = widget.parentWidget()
    if isinstance(parent, QAbstractItemView) and widget is parent.viewport():
        return type(parent.itemDelegate()).__module__.startswith("app.")
    return any("paintEvent" in vars(one) for one in type(widget).__mro__ if one.__module__.startswith("app."))


def _lie_on_each_other(one: QRectF, other: QRectF) -> bool:
    both = one.intersected(other)
    return both.width() > SLACK_PX and both.height() > SLACK_PX + 1


def _size(rect: QRectF) -> str:
    return f"{rect.width():.0f} x {rect.height():.0f}"


# --- places ---------------------------------------------------------------------------------------


def _of_place(widget: QWidget) -> Iterator[str]:
    """Whether all of a widget lies in what is around it, or can be scrolled there."""
    parent = widget.parentWidget()
    if parent is None or widget.isWindow() or widget.width() == 0 or widget.height() == 0:
        return
    lies = widget.geometry()
    area = parent.parentWidget()
    if isinstance(area, QScrollArea) and area.viewport() is parent:
        over_x, over_y = lies.width() - parent.width(), lies.height() - parent.height()
        if over_x > SLACK_PX and not area.horizontalScrollBar().isVisible():
            yield f"is {over_x} px wider than what shows of it, and cannot be scrolled there"
        if over_y > SLACK_PX and not area.verticalScrollBar().isVisible():
            yield f"is {over_y} px higher than what shows of it, and cannot be scrolled there"
        if parent.height() < 24:
            yield f"shows through a slit of {parent.height()} px"
        return
    if isinstance(area, QAbstractScrollArea) and area.viewport() is parent:
        return
    room = parent.rect().adjusted(-SLACK_PX, -SLACK_PX, SLACK_PX, SLACK_PX)
    if not room.contains(lies):
        yield f"lies at {_words(lies)}, outside of {type(parent).__name__} of {parent.width()} x {parent.height()}"


def _overlaps(parent: QWidget) -> Iterator[str]:
    children = [
        child
        for child in parent.children()
        if isinstance(child, QWidget)
        and child.isVisible()
        and not child.isWindow()
        and not _is_over(child)
        and not child.testAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
    ]
    for number, one in enumerate(children):
        for other in children[number + 1 :]:
            both = one.geometry().intersected(other.geometry())
            if both.width() > SLACK_PX and both.height() > SLACK_PX:
                yield f"{_name(one)} and {_name(other)} lie on each other: {_words(both)}"


def _is_over(widget: QWidget) -> bool:
    """Lies over others because somebody opened it or has to find it there."""
    return isinstance(widget, Popover) or widget.objectName() == "jumpToLatest"


def _is_of_qt(widget: QWidget) -> bool:
    """The insides of Qt's own widgets, and what they lay out by themselves."""
    parent = widget.parentWidget()
    return (
        widget.objectName().startswith("qt_")
        or isinstance(widget, QScrollBar)
        or (isinstance(parent, QAbstractSpinBox | QComboBox | QLineEdit | QHeaderView))
        or (isinstance(parent, QAbstractItemView) and not isinstance(widget, QHeaderView))
    )


def _name(widget: QWidget) -> str:
    text = widget.text() if isinstance(widget, QLabel | QAbstractButton) else widget.accessibleName()
    path, at = [], widget
    while at is not None and not at.isWindow() and len(path) < 4:
        path.append(type(at).__name__)
        at = at.parentWidget()  # type: ignore[assignment]
    said = f" {text[:50]!r}" if text else ""
    return f"{' in '.join(path)}{said}"


def _words(rect: QRect) -> str:
    at: QPoint = rect.topLeft()
    return f"{rect.width()} x {rect.height()} at {at.x()}, {at.y()}"
