"""Pages: their base class, the registry's entry for one, the popovers that open over them, and their shortcuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QKeySequence, QMouseEvent, QShortcut
from PySide6.QtWidgets import (
    QAbstractButton,
    QApplication,
    QComboBox,
    QDoubleSpinBox,
    QFrame,
    QLineEdit,
    QPlainTextEdit,
    QScrollBar,
    QSpinBox,
    QWidget,
)
from shiboken6 import isValid

from app.widgets.scaffold import scroll_area, text_label, vbox

if TYPE_CHECKING:
    from app.services.chat_store import Conversation
    from app.services.services import Services
    from engine.common.config import SamplingParams


GAP = 8


class Popover(QFrame):
    """Contents go into `column`.  It is a child of `page`, so that it needs no window of its own."""

    def __init__(self, title: str, page: QWidget) -> None:
        super().__init__(page)
        self._button: QWidget | None = None
        self.least_width = 0
        """Where the page has room for it."""
        self.setObjectName("popover")
        self.setAccessibleName(title)
        self._content = QWidget(self)
        self._scroll = scroll_area(self._content, self)
        vbox(self._scroll, into=self, gap=-1)
        heading = text_label(self._content, title, role="heading")
        self.column = vbox(heading, into=self._content, margins=(16, 14, 16, 16), gap=10)
        self.hide()

    def open_at(self, button: QWidget) -> None:
        """Show it above `button`, or below one that is near the top, within the page."""
        page = self.parentWidget()
        if page is None:
            return
        self._button = button
        self._place()
        self.show()
        self._place()  # again, as only visible widgets have their final sizes
        self.raise_()
        application = QApplication.instance()
        if application is not None:
            application.installEventFilter(self)

    def _place(self) -> None:
        page = self.parentWidget()
        if page is None or self._button is None:
            return
        frame = 2 * max(1, self.frameWidth())
        wanted = self._content.sizeHint().expandedTo(QSize(self.least_width, 0)) + QSize(frame, frame)
        top = self._button.mapTo(page, QPoint(0, 0))
        is_below = top.y() < page.height() - top.y() - self._button.height()
        under = top.y() + self._button.height() + GAP
        size = wanted.boundedTo(page.size() - QSize(2 * GAP, GAP + (under if is_below else GAP)))
        bar = self._scroll.verticalScrollBar().sizeHint().width()
        if size.height() < wanted.height():
            size.setWidth(min(wanted.width() + bar, page.width() - 2 * GAP))
        self.resize(size)
        at = QPoint(top.x(), under if is_below else top.y() - size.height() - GAP)
        at.setX(max(GAP, min(at.x(), page.width() - size.width() - GAP)))
        at.setY(max(GAP, min(at.y(), page.height() - size.height() - GAP)))
        self.move(at)

    def close_and_return(self) -> None:
        had_focus = self.isAncestorOf(QApplication.focusWidget() or self)
        self.hide()
        if had_focus and self._button is not None:
            self._button.setFocus()

    def hideEvent(self, _event: QEvent) -> None:
        application = QApplication.instance()
        if application is not None:
            application.removeEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        page = self.parentWidget()
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest) and watched in (page, self._content):
            self._place()
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape and isinstance(watched, QWidget):
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.close_and_return()
                return True
        if isinstance(event, QMouseEvent) and event.type() == QEvent.Type.MouseButtonPress:
            inside = isinstance(watched, QWidget) and (watched is self or self.isAncestorOf(watched))
            if isinstance(watched, QWidget) and not inside:
                self.hide()
                # A click on its own button closes it without opening it again.
                return watched is self._button
        if isinstance(event, QFocusEvent) and event.type() == QEvent.Type.FocusIn and isinstance(watched, QWidget):
            # As a new chat's composer does, which the card would hide.  Lists of its own fields are other windows.
            is_moved = event.reason() == Qt.FocusReason.OtherFocusReason and watched.window() is self.window()
            if is_moved and watched is not self._button and watched is not self and not self.isAncestorOf(watched):
                self.hide()
        return False


_NOTED = "notedKeys"

Key = tuple[str, str]


def add_shortcut(
    widget: QWidget,
    keys: QKeySequence | QKeySequence.StandardKey | str,
    words: str,
    do: Callable[[], object],
    *,
    context: Qt.ShortcutContext = Qt.ShortcutContext.WindowShortcut,
) -> None:
    """Runs `do` on these keys while `widget` is shown; `words` describe it, empty for a second shortcut to the same."""
    shortcut = QShortcut(QKeySequence(keys), widget, context=context)
    shortcut.setWhatsThis(words)
    shortcut.activated.connect(lambda: do())


def native(keys: str) -> str:
    return QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)


def note_keys(widget: QWidget, keys: Iterable[Key]) -> None:
    """Lists keys that the widget handles itself, such as Enter in a text box."""
    widget.setProperty(_NOTED, [list(key) for key in keys])


def keys_of(widget: QWidget, *, excluding: QWidget | None = None) -> list[Key]:
    return list(_keys(widget, excluding))


def _keys(widget: QWidget, excluding: QWidget | None) -> Iterator[Key]:
    def counts(one: QWidget) -> bool:
        return excluding is None or not (one is excluding or excluding.isAncestorOf(one))

    for one in (widget, *widget.findChildren(QWidget)):
        if counts(one):
            for keys, words in one.property(_NOTED) or []:
                yield str(keys), str(words)
    for shortcut in widget.findChildren(QShortcut):
        parent = shortcut.parent()
        if shortcut.whatsThis() and isinstance(parent, QWidget) and counts(parent):
            yield shortcut.key().toString(QKeySequence.SequenceFormat.NativeText), shortcut.whatsThis()


CHAT, BATCH, MONITOR, TUNE, MODELS, SETTINGS = "chat", "batch", "monitor", "tune", "models", "settings"
FIRST_RUN = "first-run"
"""In place of the chat as long as there is no model."""


class FocusKeeper(QObject):
    """Keeps the focus from jumping to a neighbour when what has it is disabled or hidden.

    Qt gives it to the next widget then, so that the second press of a key does something else: after Pause, say, it
    would open the result. Here what lies around has it, where keys do nothing, until the widget can be used again; Tab
    goes on from the widget's place.
    """

    def __init__(self, app: QApplication) -> None:
        super().__init__(app)
        self._lost: QWidget | None = None
        self._around: QWidget | None = None
        app.focusChanged.connect(self._on_focus)

    def _on_focus(self, old: QWidget | None, new: QWidget | None) -> None:
        if new is self._around:
            return
        self._forget()
        usable = old is None or new is None or not isValid(old) or (old.isEnabled() and old.isVisible())
        if usable or old is None or new is None or old.window() is not new.window():
            return
        around = old.parentWidget()
        while around is not None and not (around.isVisible() and around.isEnabled()):
            around = around.parentWidget()
        if around is not None:
            self._lost, self._around = old, around
            old.installEventFilter(self)
            around.installEventFilter(self)
            around.setFocus()

    def _forget(self) -> None:
        for widget in (self._lost, self._around):
            if widget is not None and isValid(widget):
                widget.removeEventFilter(self)
        self._lost = self._around = None

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        lost = self._lost
        if lost is None or not isValid(lost):
            return False
        if watched is lost and event.type() in (QEvent.Type.EnabledChange, QEvent.Type.Show):
            if lost.isEnabled() and lost.isVisible():
                lost.setFocus()
        elif watched is self._around and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            is_tab = event.key() in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab)
            if is_tab:
                self._step(lost, back=event.key() == Qt.Key.Key_Backtab)
            return is_tab
        return False

    def _step(self, lost: QWidget, *, back: bool) -> None:
        """To the neighbour of the widget that lost the focus, as if that had it still."""
        at: QWidget | None = lost
        while at is not None:
            at = at.previousInFocusChain() if back else at.nextInFocusChain()
            if at is None or at is lost:
                break
            if at.focusPolicy() & Qt.FocusPolicy.TabFocus and not at.focusProxy() and at.isEnabled() and at.isVisible():
                break
        self._forget()
        (at or lost).setFocus(Qt.FocusReason.BacktabFocusReason if back else Qt.FocusReason.TabFocusReason)


def carry_over(before: QWidget, after: QWidget) -> None:
    """Gives fields what was entered in their like, scroll bars their places, and one the focus."""
    likes = dict(_by_place(before))
    for place, mine in list(_by_place(after)):
        its = likes.get(place)
        if its is None:
            continue
        if isinstance(mine, QAbstractButton) and mine.isCheckable():
            mine.setChecked(its.isChecked())
        elif isinstance(mine, QComboBox):
            if not mine.isEditable() and its.count() == mine.count():
                mine.setCurrentIndex(its.currentIndex())
        elif isinstance(mine, QSpinBox | QDoubleSpinBox):
            mine.setValue(its.value())
        elif isinstance(mine, QLineEdit) and not mine.isReadOnly():
            mine.setText(its.text())
        elif isinstance(mine, QPlainTextEdit) and not mine.isReadOnly():
            mine.setPlainText(its.toPlainText())
        elif isinstance(mine, QScrollBar):
            # Later: there is nothing to scroll before the page is laid out.
            QTimer.singleShot(0, mine, partial(mine.setValue, its.value()))
        if its.hasFocus():
            mine.setFocus()


def _by_place(around: QWidget, place: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Every widget within, by its class and number among its like, and those of what it lies in."""
    counted: Counter[str] = Counter()
    for child in around.children():
        if isinstance(child, QWidget) and not child.isWindow():
            kind = type(child).__name__
            here = (*place, kind, counted[kind])
            counted[kind] += 1
            yield here, child
            yield from _by_place(child, here)


@dataclass(frozen=True, slots=True)
class BatchDraft:
    template: str
    system: str = ""
    sampling: SamplingParams | None = None


class Page(QWidget):
    """Signals: `page_wanted(str)`: the user wants to go to the page of this name; `batch_wanted(BatchDraft)`: to the
    Batch page, with this."""

    page_wanted = Signal(str)
    batch_wanted = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        app = QApplication.instance()
        if isinstance(app, QApplication) and app.findChild(FocusKeeper) is None:
            FocusKeeper(app)

    def lay_out(self, *parts: QWidget, body: QWidget, foot: QWidget | None = None) -> None:
        """From the top: the header, banners and such, each as high as it is, then the body, and perhaps a foot."""
        vbox(*parts, (body, 1), *((foot,) if foot is not None else ()), into=self, gap=0)

    def open_files(self, paths: list[Path]) -> None:
        """Opens files that were double-clicked; most pages have no use for any."""

    def take_chat(self, chat: Conversation) -> None:
        """Lists a chat that was begun elsewhere; only the Chat page does."""

    def open_chat(self, chat_id: str) -> None:
        """Shows a chat; only the Chat page does."""

    def take_draft(self, draft: BatchDraft) -> None:
        """Begins a job with this prompt; only the Batch page does."""

    def close_down(self) -> None:
        """Stops the page's background work before the window closes."""

    @property
    def is_in_use(self) -> bool:
        """Whether it holds what a page in its place could not go on with, such as an open editor."""
        return False

    def take_over(self, before: Page) -> None:
        """Goes on where the same page was, in another language, which is removed then."""
        carry_over(before, self)


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page of the window.

    Attributes:
        name: of the page and its icon.
        label: shown to the user.
        make: called when the page is first shown, so that the window opens sooner.
        has_charts: whether it imports charts, which may still be on their way.
    """

    name: str
    label: str
    make: Callable[[Services], Page]
    has_charts: bool = False
