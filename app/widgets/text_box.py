"""A box for plain text, and what is dropped on it: a model is meant for the window."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from PySide6.QtCore import QMimeData, Signal
from PySide6.QtWidgets import QPlainTextEdit

from app.services.pictures import sources_in

SUFFIX = ".gguf"
_CONFIG = "config.json"
_MOST_ENTRIES = 1000
"""Of a folder, looked through while it is dragged."""


def dropped_model(data: QMimeData) -> Path | None:
    """The model that is dragged, if it is one alone."""
    urls = data.urls()
    return model_at(Path(urls[0].toLocalFile())) if len(urls) == 1 and urls[0].isLocalFile() else None


def model_at(path: Path) -> Path | None:
    if path.suffix.lower() == SUFFIX or (path / _CONFIG).is_file():
        return path
    try:
        with os.scandir(path) as entries:
            found = any(entry.name.lower().endswith(SUFFIX) for entry in itertools.islice(entries, _MOST_ENTRIES))
    except OSError:
        return None  # a file of another kind, or a folder that cannot be read
    return path if found else None


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
