"""File and folder dialogs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QDir, Qt
from PySide6.QtWidgets import QFileDialog, QWidget

from app.views.batch.phrases import translate
from engine.batch_files.opening import INPUT_SUFFIXES


def ask_input_files(parent: QWidget, then: Callable[[list[Path]], None]) -> None:
    """Ask for input files."""
    kinds = " ".join(f"*{suffix}" for suffix in INPUT_SUFFIXES)
    dialog = QFileDialog(
        parent,
        translate("Batch", "Files of prompts"),
        QDir.homePath(),
        f"{translate('Batch', 'Files of prompts')} ({kinds})",
    )
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFiles)
    dialog.filesSelected.connect(lambda paths: then([Path(path) for path in paths]))
    dialog.open()


def ask_folder(parent: QWidget, title: str, start: str, then: Callable[[Path], None]) -> None:
    """Ask for a folder."""
    dialog = QFileDialog(parent, title, start or QDir.homePath())
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.Directory)
    dialog.setOption(QFileDialog.Option.ShowDirsOnly)
    dialog.fileSelected.connect(lambda path: then(Path(path)))
    dialog.open()
