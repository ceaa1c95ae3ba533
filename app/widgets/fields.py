"""Fields whose value the mouse wheel leaves alone, and boxes of text that take files.

The wheel is for the page: Qt's own fields take it while the pointer passes over them, and a page that was only scrolled
would come back with other settings.  Keys, the field's buttons and its list change it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QMimeData, Qt, Signal
from PySide6.QtGui import QShowEvent, QWheelEvent
from PySide6.QtWidgets import (
    QComboBox,
    QCompleter,
    QDoubleSpinBox,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QSlider,
    QSpinBox,
    QWidget,
)

from app.services.pictures import sources_in
from engine.common.json_fields import best_match

SUFFIX = ".gguf"
_CONFIG = "config.json"
_MOST_ENTRIES = 1000
"""Of a folder, looked through while it is dragged."""


def dropped_model(data: QMimeData) -> Path | None:
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


if TYPE_CHECKING:
    _Widget = QWidget
else:
    _Widget = object  # Qt takes one class of its own among the bases: the field's


class _WheelPasses(_Widget):
    """Stands before a field's own class."""

    def __init__(self, parent: QWidget | None = None, *, name: str = "") -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(name)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # so that what it lies in gets it


class ComboBox(_WheelPasses, QComboBox):
    """A choice from a list.

    On Linux Qt tells a screen reader what is chosen as the box's name, and what the box is for only by the label that
    stands for it: where a form has none, one that is not shown does.
    """

    _stands: QLabel | None = None

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        beside, name = self.parentWidget(), self.accessibleName()
        if self._stands is not None and self._stands.parent() is not beside:
            self._stands.deleteLater()
            self._stands = None
        labels = beside.findChildren(QLabel, options=Qt.FindChildOption.FindDirectChildrenOnly) if beside else []
        if name and self._stands is None and not any(label.buddy() is self for label in labels):
            self._stands = QLabel(beside)
            self._stands.hide()
            self._stands.setBuddy(self)
        if self._stands is not None:
            self._stands.setText(name)
        typed = self.lineEdit()
        if typed is not None:
            typed.setAccessibleName(name)


class FindBox(ComboBox):
    """A choice that is found by typing a few letters of it.

    Signals: `chosen(str)`: what was typed, or the full text of the item that it means.
    """

    chosen = Signal(str)

    def __init__(self, placeholder: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setEditable(True)
        self.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(16)
        self.typed = QLineEdit(self)
        self.typed.setProperty("bare", "true")
        self.setLineEdit(self.typed)
        self.typed.setPlaceholderText(placeholder)
        completer = self.completer()
        assert completer is not None  # an editable box has one
        completer.setCompletionMode(QCompleter.CompletionMode.PopupCompletion)
        completer.setFilterMode(Qt.MatchFlag.MatchContains)
        completer.setCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
        self.activated.connect(lambda at: self.chosen.emit(self.itemText(at)))
        self.typed.editingFinished.connect(self._on_typed)

    def _on_typed(self) -> None:
        items = list(filter(None, (self.itemText(at) for at in range(self.count()))))
        text = self.currentText().strip()
        meant = best_match(text, items) if text else None
        if meant is not None:
            self.setCurrentIndex(self.findText(meant))
            self.typed.setText(meant)  # also where it was the current one
        self.chosen.emit(meant or text)


class SpinBox(_WheelPasses, QSpinBox):
    """A whole number."""


class DoubleSpinBox(_WheelPasses, QDoubleSpinBox):
    """A number."""


class Slider(_WheelPasses, QSlider):
    def __init__(self, parent: QWidget | None = None, *, name: str = "") -> None:
        super().__init__(parent, name=name)
        self.setOrientation(Qt.Orientation.Horizontal)
