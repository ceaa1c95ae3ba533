"""A plain text box that grows with its text up to a limit, where Enter submits."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.widgets.fields import TextBox

MOST_LINES = 10
LARGEST_SHARE = 0.25
"""Of the window's height: the chat and what is said about it stay in view."""


class GrowingEdit(TextBox):
    """Signals: `entered` (Enter without Shift), `focused` (True when it gains the focus), `slashed` (a slash was typed
    into the empty box, where that `opens_prompts`)."""

    entered = Signal()
    slashed = Signal()
    opens_prompts = False
    focused = Signal(bool)

    most_lines = MOST_LINES
    largest_share = LARGEST_SHARE

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("bare", True)
        self.setTabChangesFocus(True)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self.fit)
        self.fit()

    def event(self, event: QEvent) -> bool:
        # With nothing to undo here, Ctrl+Z goes to the page, which restores a deleted chat.
        if (
            event.type() == QEvent.Type.ShortcutOverride
            and isinstance(event, QKeyEvent)
            and event.matches(QKeySequence.StandardKey.Undo)
            and not self.document().isUndoAvailable()
        ):
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if enter and not event.modifiers() & (Qt.KeyboardModifier.ShiftModifier | Qt.KeyboardModifier.AltModifier):
            self.entered.emit()
            return
        if self.opens_prompts and event.text() == "/" and self.document().isEmpty():
            self.slashed.emit()
            return
        super().keyPressEvent(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focused.emit(True)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.focused.emit(False)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self.fit()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.height())

    def fit(self) -> None:
        # QPlainTextDocumentLayout measures height in lines.
        lines, line = max(1, round(self.document().size().height())), self.fontMetrics().lineSpacing()
        most = max(2, min(self.most_lines, int(self.largest_share * self.window().height() / line)))
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if lines > most else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)
        # What is scrolled ends at the foot of a line.
        self.setFixedHeight(most * line if lines > most else lines * line + 4)
