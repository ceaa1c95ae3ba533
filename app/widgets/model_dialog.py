"""The dialog for a model that lies somewhere on this PC: a GGUF file, or a folder with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QDir, Qt
from PySide6.QtWidgets import QFileDialog, QWidget

from app.widgets.dropped_model import SUFFIX

translate = QCoreApplication.translate


def ask_model(parent: QWidget, then: Callable[[Path], object]) -> QFileDialog:
    """Asks for a file; any file of a checkpoint stands for the folder it lies in."""
    files = translate("ModelDialog", "Models (*.gguf *.safetensors config.json)")
    dialog = QFileDialog(parent, translate("ModelDialog", "Open a model file"), QDir.homePath(), files)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
    dialog.fileSelected.connect(lambda path: then(model_of(Path(path))))
    dialog.open()
    return dialog


def model_of(file: Path) -> Path:
    """The model that a chosen file belongs to."""
    return file if file.suffix.lower() == SUFFIX else file.parent
