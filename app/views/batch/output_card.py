"""The result file: name, file type and folder."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QLineEdit, QWidget

from app.services.batch_input import InputPreview, free_output, usual_suffix
from app.widgets.asking import ask_path
from app.widgets.chip import ElidedLabel
from app.widgets.fields import ComboBox
from app.widgets.scaffold import Card, hbox, muted_label, push_button, text_label
from engine.batch_files.result_file import OUTPUT_SUFFIXES


class OutputCard(Card):
    """Signals: `changed`, after every edit."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Result file"), parent)
        self._folder = Path()
        self.name = QLineEdit(self)
        self.name.setAccessibleName(self.tr("Name of the result file"))
        self.name.textEdited.connect(self._on_name)
        self.format = ComboBox(self)
        self.format.setAccessibleName(self.tr("File type"))
        for suffix in OUTPUT_SUFFIXES:
            self.format.addItem(suffix[1:], suffix)
        self.format.activated.connect(self._on_format)
        self._place = ElidedLabel(self)
        self._place.setProperty("role", "secondary")
        self.change = push_button(self, self.tr("Another folder…"), self._choose_folder)
        line = hbox((self.name, 1), self.format, self.change)
        into = text_label(self, self.tr("In"), role="secondary")
        where = hbox(into, (self._place, 1), gap=6)
        self._words = muted_label(self)
        self.body.addLayout(line)
        self.body.addLayout(where)
        self.body.addWidget(self._words)

    def suggest(self, preview: InputPreview) -> None:
        """Suggests a free name beside the input."""
        suffix = ".jsonl" if preview.openai else usual_suffix(preview.path)
        output = free_output(preview.path, suffix)
        self._folder = output.parent
        self.name.setText(output.name)
        self.format.setEnabled(not preview.openai)
        self._words.setText(
            self.tr("In OpenAI's output format; rows that fail go into an error file beside it.")
            if preview.openai
            else self.tr(
                "Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why."
            )
        )
        self._show()

    @property
    def path(self) -> Path:
        return self._folder / self.name.text().strip()

    def problem(self) -> str:
        """Why this file name is invalid, as a sentence; empty if it is valid."""
        name = self.name.text().strip()
        if not name or name in (".", ".."):
            return self.tr("Name the result file.")
        if "/" in name or "\\" in name:
            return self.tr("The result file's name contains a slash: choose the folder beside it instead.")
        return ""

    def _show(self) -> None:
        index = self.format.findData(Path(self.name.text()).suffix.lower())
        self.format.setCurrentIndex(index)
        self._place.set_full_text(str(self._folder))
        self.changed.emit()

    def _on_name(self) -> None:
        self.format.setCurrentIndex(self.format.findData(Path(self.name.text().strip()).suffix.lower()))
        self.changed.emit()

    def _on_format(self) -> None:
        name = Path(self.name.text().strip() or "answers")
        known = name.suffix.lower() in OUTPUT_SUFFIXES
        self.name.setText(f"{name.stem if known else name.name}{self.format.currentData(Qt.ItemDataRole.UserRole)}")
        self.changed.emit()

    def _choose_folder(self) -> None:
        ask_path(self, self.tr("Folder of the result file"), self._take_folder, folder=True, start=str(self._folder))

    def _take_folder(self, folder: Path) -> None:
        self._folder = folder
        self._show()
