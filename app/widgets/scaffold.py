"""What pages, cards and dialogs are put together from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from PySide6.QtCore import QCoreApplication, QEvent, QPoint, QSize, Qt, SignalInstance
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QDialog,
    QDialogButtonBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLayout,
    QLineEdit,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.engine_words import said
from app.theme import scaled, set_look, use_tabular_figures
from app.widgets.flow_layout import Flow
from engine.common.plain_text import few_marks

TOP, LEFT, RIGHT = Qt.AlignmentFlag.AlignTop, Qt.AlignmentFlag.AlignLeft, Qt.AlignmentFlag.AlignRight
MIDDLE, CENTRE = Qt.AlignmentFlag.AlignVCenter, Qt.AlignmentFlag.AlignHCenter
STRETCH = (None, 1)
Item = QWidget | QLayout | int | tuple[Any, ...]
"""A widget, a layout, pixels of space, or a tuple of one (None: space) with its stretch, alignment or both."""
_Box = TypeVar("_Box", bound=QBoxLayout)
Margins = int | tuple[int, int, int, int] | None
"""On all sides, or on the left, top, right and bottom; None: as the style has them."""


# --- layouts and controls ---------------------------------------------------------------------------


def hbox(*items: Item, into: QWidget | None = None, margins: Margins = 0, gap: int = 8) -> QHBoxLayout:
    """Items side by side.  `into`: whose layout it is; `gap`: pixels between them, -1 as the style has it."""
    return _fill(QHBoxLayout(), items, into, margins, gap)


def vbox(*items: Item, into: QWidget | None = None, margins: Margins = 0, gap: int = 8) -> QVBoxLayout:
    """Items below one another, as `hbox`."""
    return _fill(QVBoxLayout(), items, into, margins, gap)


def _fill(box: _Box, items: tuple[Item, ...], into: QWidget | None, margins: Margins, gap: int) -> _Box:
    if into is not None:
        into.setLayout(box)
    if margins is not None:
        box.setContentsMargins(*((margins,) * 4 if isinstance(margins, int) else margins))
    box.setSpacing(gap)
    add_items(box, *items)
    return box


def add_items(box: QBoxLayout, *items: Item) -> None:
    for item in items:
        what, *how = item if isinstance(item, tuple) else (item,)
        # An alignment is an int as well.
        stretch = next((each for each in how if not isinstance(each, Qt.AlignmentFlag)), 0)
        if isinstance(what, QWidget):
            box.addWidget(what, stretch)
        elif isinstance(what, QLayout):
            box.addLayout(what, stretch)
        elif what is None:
            box.addStretch(stretch)
        else:
            box.addSpacing(what)
        for each in how:
            if isinstance(each, Qt.AlignmentFlag):
                box.setAlignment(what, each)


def push_button(
    parent: QWidget,
    text: str = "",
    do: Callable[..., object] | SignalInstance | None = None,
    *,
    kind: str = "",
    name: str = "",
    tip: str = "",
    checkable: bool = False,
    compact: bool = False,
) -> QPushButton:
    """A button that does `do`, or emits it.  `name` is what a screen reader says instead of `text`."""
    button = QPushButton(text, parent)
    button.setCheckable(checkable)
    if kind:
        button.setProperty("kind", kind)
    if compact:
        button.setProperty("compact", True)
    if name:
        button.setAccessibleName(name)
    if tip:
        button.setToolTip(tip)
    if do is not None:
        button.clicked.connect(do)
    return button


def text_label(
    parent: QWidget,
    text: str = "",
    *,
    role: str = "",
    tone: str = "",
    wrap: bool = False,
    tabular: bool = False,
    align: Qt.AlignmentFlag | None = None,
    buddy: QWidget | None = None,
) -> QLabel:
    label = QLabel(text, parent)
    label.setWordWrap(wrap)
    set_words(label, role, tone)
    if tabular:
        use_tabular_figures(label)
    if align is not None:
        label.setAlignment(align)
    if buddy is not None:
        label.setBuddy(buddy)
    return label


def set_words(label: QLabel, role: str, tone: str = "") -> None:
    if role:
        label.setProperty("role", role)
    if tone:
        label.setProperty("tone", tone)


def line_edit(
    parent: QWidget,
    name: str,
    *,
    hint: str = "",
    hints: bool = False,
    clears: bool = False,
    secret: bool = False,
) -> QLineEdit:
    """A field of one line.  `hint` stands in it while it is empty; `hints`: its name does."""
    field = QLineEdit(parent)
    field.setAccessibleName(name)
    field.setPlaceholderText(name if hints else hint)
    field.setClearButtonEnabled(clears)
    if secret:
        field.setEchoMode(QLineEdit.EchoMode.Password)
    return field


def only_scrolls_down(area: QScrollArea) -> None:
    """Without a frame, a place in the order of the Tab key, and a bar at the bottom."""
    area.setWidgetResizable(True)
    area.setFrameShape(QFrame.Shape.NoFrame)
    area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    area.setFocusPolicy(Qt.FocusPolicy.NoFocus)


def scroll_area(content: QWidget, parent: QWidget) -> QScrollArea:
    area = QScrollArea(parent)
    only_scrolls_down(area)
    area.setWidget(content)
    return area


# --- text -------------------------------------------------------------------------------------------

_LEAST_CHARACTERS = 12
UNSPACED = "\u2e80-\u9fff\uff00-\uffef"
"""Characters of scripts that put no spaces between words, for a regular expression's set."""
_WORDS = re.compile(rf"[^\s/\\{UNSPACED}-]+[/\\-]?|[/\\-]")
"""Lines break at white space, in paths after a slash or a hyphen, and anywhere in Japanese and Chinese."""


_COMMANDS = (
    re.compile(r"(?: \(|, or run )`switchyard [^`]*`\)?"),
    re.compile(r"[:;] [^:;]*`switchyard .*?(?=\.(?:\s|$))", re.DOTALL),
)


def without_commands(text: str) -> str:
    """A message of the engine without what people at a terminal can run: a window has buttons for that."""
    for command in _COMMANDS:
        text = command.sub("", text)
    return text


class WrappedLabel(QLabel):
    """Selectable plain text; where a word is elided, the tooltip has the full text."""

    def __init__(self, text: str = "", parent: QWidget | None = None, *, role: str = "") -> None:
        super().__init__(parent)
        set_words(self, role)
        self._whole = ""
        self._widest = ("", 0)
        """Of its words, in which font: labels are fitted again with every size and style that their window takes."""
        self._is_short = False
        self.setWordWrap(True)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.setText(text)

    def setText(self, text: str) -> None:
        self._whole, self._widest = few_marks(said(without_commands(text))), ("", 0)
        self._fit()

    def text(self) -> str:
        return self._whole

    @property
    def shown(self) -> str:
        return super().text()

    def minimumSizeHint(self) -> QSize:
        hint = super().minimumSizeHint()
        return QSize(min(hint.width(), _LEAST_CHARACTERS * self.fontMetrics().averageCharWidth()), hint.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._fit()

    def _fit(self) -> None:
        metrics, room = self.fontMetrics(), self.contentsRect().width()

        def shortened(word: re.Match[str]) -> str:
            return metrics.elidedText(word.group(), Qt.TextElideMode.ElideMiddle, room)

        shown = self._whole
        if self.testAttribute(Qt.WidgetAttribute.WA_Resized):  # before that its width is not final
            font = self.font().key()
            if font != self._widest[0]:
                self._widest = font, max(map(metrics.horizontalAdvance, _WORDS.findall(self._whole)), default=0)
            if self._widest[1] >= room:
                shown = _WORDS.sub(shortened, self._whole)
        if shown != super().text():
            super().setText(shown)
        is_short = shown != self._whole
        if is_short or self._is_short:
            self.setToolTip(self._whole if is_short else "")
            self.setAccessibleName(self._whole)
        self._is_short = is_short


# --- pages and cards --------------------------------------------------------------------------------

MARK_PX = 18
_BUBBLE_PX = 320
_BUBBLE_GAP_PX = 4


class HelpMark(QToolButton):
    """Can be reached by keyboard; a screen reader reads the explanation as its description."""

    def __init__(self, about: str, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._about, self.explanation = about, text
        self._bubble: HelpBubble | None = None
        self.setText("?")
        self.setProperty("kind", "help")
        self.setFixedSize(QSize(MARK_PX, MARK_PX))
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setToolTip(text)
        self.setAccessibleName(QCoreApplication.translate("HelpMark", "What is “{0}”?").format(about))
        self.setAccessibleDescription(text)
        self.clicked.connect(self.explain)

    @property
    def bubble(self) -> HelpBubble | None:
        return self._bubble if self._bubble is not None and self._bubble.isVisible() else None

    def explain(self) -> None:
        if self._bubble is None:
            self._bubble = HelpBubble(self._about, self.explanation, self)
        self._bubble.open_below(self)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.explain()
        else:
            super().keyPressEvent(event)


class HelpBubble(QFrame):
    def __init__(self, about: str, text: str, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setProperty("help", "true")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName(f"{about}. {text}")
        heading, said = QLabel(about, self), QLabel(text, self)
        heading.setProperty("role", "heading")
        for label in (heading, said):
            label.setWordWrap(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 10, 14, 12)
        column.setSpacing(4)
        column.addWidget(heading)
        column.addWidget(said)
        self.setFixedWidth(_BUBBLE_PX)

    def open_below(self, widget: QWidget) -> None:
        self.ensurePolished()
        self.resize(_BUBBLE_PX, self.heightForWidth(_BUBBLE_PX))
        room = widget.screen().availableGeometry()
        at = widget.mapToGlobal(QPoint(0, widget.height() + _BUBBLE_GAP_PX))
        if at.y() + self.height() > room.bottom():
            at.setY(widget.mapToGlobal(QPoint(0, 0)).y() - self.height() - _BUBBLE_GAP_PX)
        at.setX(max(room.left(), min(at.x(), room.right() - self.width())))
        self.move(at)
        self.show()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Escape, Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.close()
        else:
            super().keyPressEvent(event)


LEAST_CAPTION_CHARACTERS = 24


class Card(QFrame):
    def __init__(self, heading: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self.setAccessibleName(heading)
        self.heading = QLabel(heading, self)
        self.heading.setProperty("role", "heading")
        self.caption = muted_label(self)
        self._is_below, self._caption_at = False, 0
        self.head = QHBoxLayout()
        self.head.setSpacing(10)
        self.head.addWidget(self.heading)
        self.head.addWidget(self.caption, 1)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 14, 16, 16)
        self.body.setSpacing(10)
        self.body.addLayout(self.head)

    def explain(self, text: str) -> None:
        self.help = HelpMark(self.heading.text(), text, self)
        self.head.insertWidget(1, self.help)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        widgets = [item.widget() for at in range(self.head.count()) if (item := self.head.itemAt(at)) is not None]
        beside = [one for one in widgets if one is not None and one is not self.caption and not one.isHidden()]
        margins = self.body.contentsMargins()
        room = self.width() - margins.left() - margins.right()
        room -= sum(one.sizeHint().width() + self.head.spacing() for one in beside)
        metrics = self.caption.fontMetrics()
        advance, character = metrics.horizontalAdvance(self.caption.text()), metrics.averageCharWidth()
        needed = min(advance, LEAST_CAPTION_CHARACTERS * character)
        below = bool(self.caption.text()) and needed > room
        if below != self._is_below:
            self._is_below = below
            if below:
                self._caption_at = self.head.indexOf(self.caption)
                self.head.removeWidget(self.caption)
                self.head.insertStretch(self._caption_at, 1)  # keeps the controls at the right
                self.body.insertWidget(1, self.caption)
            else:
                self.body.removeWidget(self.caption)
                self.head.takeAt(self._caption_at)
                self.head.insertWidget(self._caption_at, self.caption, 1)

    def set_heading(self, text: str) -> None:
        self.heading.setText(text)
        self.setAccessibleName(text)


def muted_label(parent: QWidget, text: str = "", *, role: str = "secondary") -> QLabel:
    label = WrappedLabel(text, parent, role=role)
    label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    return label


def warning_label(parent: QWidget) -> QLabel:
    """A warning line, shown by `set_message`."""
    label = muted_label(parent)
    label.setProperty("tone", "warning")
    label.hide()
    return label


def set_message(label: QLabel, text: str) -> None:
    """Sets a line's text; the line is hidden while it is empty."""
    label.setText(text)
    label.setAccessibleName(text)
    label.setVisible(bool(text))


HEIGHT_PX = 56
SIDE_PX = 20
GAP_PX, NARROW_GAP_PX = 12, 6


class PageHeader(QWidget):
    """Title on the left, buttons on the right.

    If they do not fit, the widget of `set_middle` moves to a line of its own, then the title, which the sidebar shows
    too, is hidden, and then the buttons wrap.
    """

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._middle: QWidget | None = None
        self._middle_stretch = 0
        self._least_middle_px = 0
        self._is_below = False
        self.title = QLabel(title, self)
        self.title.setProperty("role", "title")
        self.row = QHBoxLayout()
        self.row.setContentsMargins(SIDE_PX, 0, SIDE_PX, 0)
        self.row.setSpacing(GAP_PX)
        self.row.addWidget(self.title, 1)
        self.buttons = Flow(parent=self, gap=GAP_PX)
        self.row.addWidget(self.buttons, 0, Qt.AlignmentFlag.AlignVCenter)
        self._below = QHBoxLayout()
        self._below.setContentsMargins(SIDE_PX, 0, SIDE_PX, 0)
        line = QFrame(self)
        line.setProperty("line", "true")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addStretch(1)  # buttons do not grow vertically: without this, the line would be centred
        column.addLayout(self.row)
        column.addLayout(self._below)
        column.addStretch(1)
        column.addWidget(line)
        self.setMinimumHeight(HEIGHT_PX)

    def set_middle(self, widget: QWidget, *, least_px: int = 0, stretch: int = 0) -> None:
        self._middle, self._middle_stretch, self._least_middle_px = widget, stretch, least_px
        self.row.setStretch(0, 0)
        self.row.insertWidget(1, widget, stretch, Qt.AlignmentFlag.AlignVCenter)
        if not stretch:
            self.row.insertStretch(2, 1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._fit()
        return handled

    def minimumSizeHint(self) -> QSize:
        # However wide the buttons are, the page may become narrower: `_fit` then moves some.
        return QSize(0, super().minimumSizeHint().height())

    def add_buttons(self, *buttons: QWidget) -> None:
        for button in buttons:
            self.buttons.add(button)

    def _fit(self) -> None:
        middle, room, title = self._middle, self.width() - 2 * SIDE_PX, self.title.sizeHint().width()
        widths = [each.sizeHint().width() for each in self.buttons.widgets if not each.isHidden()]
        loose, close = (sum(widths) + gap * len(widths) for gap in (GAP_PX, NARROW_GAP_PX))
        if middle is not None:
            wanted = middle.sizeHint().expandedTo(middle.minimumSizeHint()).width()
            wanted = min(wanted, self._least_middle_px) if self._least_middle_px else wanted
            below = not middle.isHidden() and title + GAP_PX + wanted + loose > room
            if below != self._is_below:
                self._is_below = below
                self._place_middle(middle, below=below)
        spacing = NARROW_GAP_PX if title + loose > room else GAP_PX
        if self.row.spacing() != spacing:  # setting it always invalidates the layout
            self.row.setSpacing(spacing)
            self.buttons.set_gap(spacing)
        self.title.setVisible(title + close <= room)

    def _place_middle(self, middle: QWidget, *, below: bool) -> None:
        if below:
            self.row.removeWidget(middle)
            self._below.addWidget(middle, 1, Qt.AlignmentFlag.AlignVCenter)
            if not self._middle_stretch:
                self._below.setAlignment(middle, Qt.AlignmentFlag.AlignLeft)
        else:
            self._below.removeWidget(middle)
            self.row.insertWidget(1, middle, self._middle_stretch, Qt.AlignmentFlag.AlignVCenter)
        self.row.setStretch(0, 1 if below else 0)
        side = NARROW_GAP_PX if below else 0
        self._below.setContentsMargins(SIDE_PX, 0, SIDE_PX, side)
        self.row.setContentsMargins(SIDE_PX, side, SIDE_PX, side)


class PageBody(QScrollArea):
    """What is below a page's header: cards in a column that scrolls; `inside` is the column's widget.

    Args:
        widest_px: of the column, at the standard size of text; it is in the middle of what is wider.
        above, below: how what is left of the height is shared; with 0 above, the cards begin at the top.
    """

    def __init__(
        self,
        parent: QWidget,
        *cards: Item,
        widest_px: int = 0,
        margins: Margins = (20, 16, 20, 20),
        gap: int = 14,
        above: int = 0,
        below: int = 1,
    ) -> None:
        super().__init__(parent)
        only_scrolls_down(self)
        self._widest_px = widest_px
        whole = QWidget(self)
        self.inside = QWidget(whole)
        over, under = ((None, above),) if above else (), ((None, below),) if below else ()
        self.column = vbox(*over, *cards, *under, into=self.inside, margins=margins, gap=gap)
        sides = (STRETCH,) if widest_px else ()
        hbox(*sides, (self.inside, 1000), *sides, into=whole, gap=0)
        self.setWidget(whole)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self._widest_px:
            self._fit()

    def _fit(self) -> None:
        if self._widest_px:
            self.inside.setMaximumWidth(scaled(self._widest_px))


# --- dialogs ----------------------------------------------------------------------------------------


class FormDialog(QDialog):
    """Rows of fields, what is said about them, and buttons: one that keeps what was entered, and Cancel.

    It is as high as its words need at its width, and no higher than the window below it: then the rows scroll.

    Args:
        keeps: the text of the button that keeps; `keep` is that button, and `kept` is called when it is pressed.
        tests: the text of one that tries it, if there is one: `test`.
    """

    def __init__(self, title: str, keeps: str, parent: QWidget, *, tests: str = "", width_px: int = 560) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self._width_px = width_px
        inside = QWidget(self)
        self.rows = QGridLayout(inside)
        self.rows.setContentsMargins(20, 18, 20, 4)
        self.rows.setHorizontalSpacing(16)
        self.rows.setVerticalSpacing(8)
        self.rows.setColumnStretch(1, 1)
        self._inside, self._area = inside, scroll_area(inside, self)
        self.said, self.trouble = muted_label(self), warning_label(self)
        self.buttons = QDialogButtonBox(self)
        role = QDialogButtonBox.ButtonRole
        if tests:
            self.test = self.buttons.addButton(tests, role.ActionRole)
        self.keep = self.buttons.addButton(keeps, role.AcceptRole)
        set_look(self.keep, "kind", "primary")
        self.buttons.addButton(QCoreApplication.translate("Asking", "Cancel"), role.RejectRole)
        self.buttons.accepted.connect(self.kept)
        self.buttons.rejected.connect(self.reject)
        self.below = vbox(self.said, self.trouble, self.buttons, margins=(20, 8, 20, 18), gap=12)
        vbox((self._area, 1), self.below, into=self, gap=0)

    def kept(self) -> None:
        self.accept()

    def add_field(self, name: str, field: QWidget, *beside: QWidget) -> list[QWidget]:
        label, row = text_label(self, name, buddy=field), self.rows.rowCount()
        self.rows.addWidget(label, row, 0)
        if beside:
            self.rows.addLayout(hbox((field, 1), *beside), row, 1)
        else:
            self.rows.addWidget(field, row, 1)
        return [label, field, *beside]

    def add_across(self, widget: QWidget) -> None:
        self.rows.addWidget(widget, self.rows.rowCount(), 0, 1, 2)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self.layout() is not None:
            self.fit()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.fit()

    def fit(self) -> None:
        width = scaled(self._width_px)
        self._area.setMinimumWidth(self._inside.minimumSizeHint().width())
        high = self._inside.heightForWidth(width) if self._inside.hasHeightForWidth() else 0
        below = max(self.below.totalHeightForWidth(width), self.below.totalSizeHint().height())
        wanted = max(high, self._inside.sizeHint().height()) + below + scaled(24)
        over = self.parentWidget()
        room = over.window().height() - scaled(20) if over is not None else wanted
        self.resize(width, min(wanted, max(scaled(360), room)))
