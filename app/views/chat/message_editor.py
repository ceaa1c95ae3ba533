"""A text of several lines that is changed in place: an answer, or a summary."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QWidget

from app.views.chat.growing_edit import GrowingEdit
from app.widgets.scaffold import STRETCH, hbox, push_button, vbox
from app.widgets.text_box import TextBox


class _LongEdit(GrowingEdit):
    """Enter starts a new line, and Ctrl+Enter submits."""

    most_lines = 24
    largest_share = 0.4

    def keyPressEvent(self, event: QKeyEvent) -> None:
        enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if enter and event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.entered.emit()
        else:
            TextBox.keyPressEvent(self, event)


class MessageEditor(QFrame):
    """Signals: `saved` (the text), `cancelled` (also by Esc)."""

    saved = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, name: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("editor", True)
        self.box = _LongEdit(self)
        self.box.setAccessibleName(name)
        self.box.setPlainText(text)
        self.box.entered.connect(self._save)
        self.box.installEventFilter(self)
        cancel = push_button(self, self.tr("Cancel"), self.cancelled, kind="quiet")
        self.save_button = push_button(self, self.tr("Save"), self._save, tip=self.tr("Ctrl+Enter"))
        vbox(self.box, hbox(STRETCH, cancel, self.save_button, gap=-1), into=self, margins=(12, 10, 10, 10))

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape:
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.cancelled.emit()
                return True
        return False

    def _save(self) -> None:
        self.saved.emit(self.box.toPlainText())
