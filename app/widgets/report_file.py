"""Asks where the report of a fault goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QDir, Qt
from PySide6.QtWidgets import QFileDialog, QWidget

translate = QCoreApplication.translate


def ask_where(parent: QWidget, write: Callable[[Path], object]) -> None:
    """`write` gets the file that was chosen, if one was."""
    dialog = QFileDialog(parent, translate("Report", "Save a report"), QDir.homePath())
    dialog.setNameFilter(translate("Report", "Text (*.txt)"))
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    dialog.setDefaultSuffix("txt")
    dialog.selectFile(f"switchyard-report-{time.strftime('%Y-%m-%d')}.txt")
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.fileSelected.connect(lambda path: write(Path(path)))
    dialog.open()
