"""A box for plain text."""

from __future__ import annotations

from PySide6.QtCore import QMimeData, Signal
from PySide6.QtWidgets import QPlainTextEdit

from app.services.pictures import sources_in
from app.widgets.dropped_model import dropped_model


class TextBox(QPlainTextEdit):
    """Signals: `given` (files and pictures that were pasted or dropped, if it `takes_files`: their addresses are never
    a text; without it what is dropped is the window's)."""

    given = Signal(list)
    takes_files = False

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        # A model dropped here is meant for the window.
        if sources_in(source):
            return self.takes_files and dropped_model(source) is None
        return super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:
        sources = sources_in(source)
        if not sources:
            super().insertFromMimeData(source)
        elif self.takes_files:
            self.given.emit(sources)
