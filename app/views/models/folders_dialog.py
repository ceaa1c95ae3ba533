"""The folders in which models are looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QListWidget, QWidget

from app.services.background import TaskQueue
from app.widgets.asking import ask_path
from app.widgets.scaffold import STRETCH, hbox, muted_label, push_button, set_message, vbox, warning_label
from engine.checkpoint.model_directories import add_model_folder, drop_model_folder, model_folders
from engine.common.errors import EngineError


class FoldersDialog(QDialog):
    """Folders are added and dropped in the background: one on a network that does not answer takes long to look at.

    Signals: `changed`, when a folder was added or dropped.
    """

    changed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Model folders"))
        self._changes = TaskQueue(self)
        words = muted_label(
            self,
            self.tr(
                "Models in these folders are listed and used where they lie. The Models page asks which of them a "
                "download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found "
                "automatically."
            ),
        )
        self.list = QListWidget(self)
        self.list.setAccessibleName(self.tr("Model folders"))
        self.list.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.trouble = warning_label(self)
        self.add = push_button(self, self.tr("Add a folder…"), self._ask)
        self.drop = push_button(self, self.tr("Remove from list"), self._drop)
        self.open_ = push_button(self, self.tr("Open"), self._open)
        close = push_button(self, self.tr("Close"), self.accept)
        vbox(
            words,
            self.list,
            self.trouble,
            hbox(self.add, self.drop, self.open_, STRETCH, close, gap=-1),
            into=self,
            margins=(20, 18, 20, 18),
            gap=10,
        )
        self.resize(560, 320)
        self.list.currentRowChanged.connect(lambda _at: self._show_buttons())
        self.finished.connect(lambda _result: self._delete_when_idle())
        self._show(model_folders())

    def add_folder(self, folder: Path) -> None:
        """Adds it to the list, or says why that is not possible."""
        self._change(lambda: add_model_folder(folder))

    def _ask(self) -> None:
        ask_path(self, self.tr("Folder with models"), self.add_folder, folder=True)

    def _drop(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            folder = Path(item.text())
            self._change(lambda: drop_model_folder(folder))

    def _open(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(item.text()))

    def _change(self, change: Callable[[], tuple[Path, ...]]) -> None:
        set_message(self.trouble, "")
        self._changes.add(change, self._on_changed, self._on_failed)
        self._show_buttons()

    def _on_changed(self, folders: tuple[Path, ...]) -> None:
        self._show(folders)
        self.changed.emit()
        self._delete_when_idle()

    def _on_failed(self, error: Exception) -> None:
        self._show_buttons()
        self._delete_when_idle()
        if not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message)

    def _delete_when_idle(self) -> None:
        """A change that goes on when the dialog is closed is still reported."""
        if self.isHidden() and not self._changes.is_busy:
            self.deleteLater()

    def _show_buttons(self) -> None:
        self.add.setEnabled(not self._changes.is_busy)
        self.drop.setEnabled(not self._changes.is_busy and self.list.currentRow() > 0)

    def _show(self, folders: tuple[Path, ...]) -> None:
        self.list.clear()
        self.list.addItems([str(folder) for folder in folders])
        self.list.setCurrentRow(0)
        self._show_buttons()
