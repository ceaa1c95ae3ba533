"""Asks before the window closes while text could not be saved."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QMessageBox, QWidget

from app.services.chat_store import ChatStore


class UnsavedTextGuard(QObject):
    def __init__(self, store: ChatStore, parent: QWidget) -> None:
        super().__init__(parent)
        self._store = store
        self._window: QWidget | None = None
        self._trouble = ""
        store.trouble.connect(self._on_trouble)

    def watch(self, window: QWidget) -> None:
        if window is not self._window:
            if self._window is not None:
                self._window.removeEventFilter(self)
            self._window = window
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._window and event.type() == QEvent.Type.Close and self._trouble and self._store.unsaved:
            if not self.ask():
                event.ignore()
                return True
            self._trouble = ""  # ask only once
        return False

    def ask(self) -> bool:
        box = QMessageBox(self._window)
        box.setIcon(QMessageBox.Icon.Warning)
        box.setText(self.tr("The latest messages are not saved."))
        box.setInformativeText(self._trouble + " " + self.tr("If you close the window now, they are lost."))
        stay = box.addButton(self.tr("Keep the window open"), QMessageBox.ButtonRole.RejectRole)
        leave = box.addButton(self.tr("Close and lose them"), QMessageBox.ButtonRole.DestructiveRole)
        box.setDefaultButton(stay)
        box.setEscapeButton(stay)
        box.exec()
        return box.clickedButton() is leave

    def _on_trouble(self, sentence: str) -> None:
        self._trouble = sentence
