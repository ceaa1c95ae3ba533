"""The folders in which models are looked for."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QDir, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QFileDialog, QHBoxLayout, QListWidget, QPushButton, QVBoxLayout, QWidget

from app.widgets.card import muted_label, set_message, warning_label
from engine.checkpoint.shelves import add_model_folder, drop_model_folder, model_folders
from engine.common.errors import EngineError


class FoldersDialog(QDialog):
    """Signals: `changed`, when a folder was added or dropped."""

    changed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Model folders"))
        words = muted_label(
            self,
            self.tr(
                "Models in these folders are listed and used where they lie. Downloads go into the first. Those of LM "
                "Studio, Ollama, Jan, GPT4All and the hub's own cache are found by themselves."
            ),
        )
        self.list = QListWidget(self)
        self.list.setAccessibleName(self.tr("Model folders"))
        self.list.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.trouble = warning_label(self)
        self.add = QPushButton(self.tr("Add a folder…"), self)
        self.drop = QPushButton(self.tr("Take off the list"), self)
        self.open_ = QPushButton(self.tr("Open"), self)
        close = QPushButton(self.tr("Close"), self)
        row = QHBoxLayout()
        for button in (self.add, self.drop, self.open_):
            row.addWidget(button)
        row.addStretch(1)
        row.addWidget(close)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 18, 20, 18)
        column.setSpacing(10)
        for widget in (words, self.list, self.trouble):
            column.addWidget(widget)
        column.addLayout(row)
        self.resize(560, 320)
        self.add.clicked.connect(self._ask)
        self.drop.clicked.connect(self._drop)
        self.open_.clicked.connect(self._open)
        close.clicked.connect(self.accept)
        self.list.currentRowChanged.connect(lambda at: self.drop.setEnabled(at > 0))
        self._show(model_folders())

    def add_folder(self, folder: Path) -> None:
        """Adds it to the list, or says why that is not possible."""
        self._change(lambda: add_model_folder(folder))

    def _ask(self) -> None:
        dialog = QFileDialog(self, self.tr("Folder with models"), QDir.homePath())
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        dialog.setOption(QFileDialog.Option.ShowDirsOnly)
        dialog.fileSelected.connect(lambda path: self.add_folder(Path(path)))
        dialog.open()

    def _drop(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            self._change(lambda: drop_model_folder(Path(item.text())))

    def _open(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(item.text()))

    def _change(self, change: object) -> None:
        try:
            folders = change()  # type: ignore[operator]
        except EngineError as error:
            set_message(self.trouble, error.message)
            return
        set_message(self.trouble, "")
        self._show(folders)
        self.changed.emit()

    def _show(self, folders: tuple[Path, ...]) -> None:
        self.list.clear()
        self.list.addItems([str(folder) for folder in folders])
        self.list.setCurrentRow(0)
