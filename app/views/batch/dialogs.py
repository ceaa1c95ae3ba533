"""Choosing files, and the few things that are asked before they are done."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from PySide6.QtCore import QDir, Qt
from PySide6.QtWidgets import QFileDialog, QMessageBox, QPushButton, QWidget

from app.views.batch.phrases import translate
from engine.batch_files.opening import INPUT_SUFFIXES

Answer = Callable[[], object]


def ask_input_files(parent: QWidget, then: Callable[[list[Path]], None]) -> None:
    """Ask for files of rows."""
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


def ask(
    parent: QWidget,
    question: str,
    details: str,
    choices: Sequence[tuple[str, Literal["do", "destroy"], Answer]],
    cancel: str = "",
) -> QMessageBox:
    """Ask before something is done; Esc and the button that is set beforehand leave everything as it is."""
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.NoIcon)
    box.setText(f"<b>{html.escape(question)}</b>")
    box.setInformativeText(details)
    answers: dict[QPushButton, Answer] = {}
    for label, kind, answer in choices:
        role = QMessageBox.ButtonRole.AcceptRole if kind == "do" else QMessageBox.ButtonRole.DestructiveRole
        button = box.addButton(label, role)
        if kind == "destroy":
            button.setProperty("kind", "danger")
        answers[button] = answer
    stay = box.addButton(cancel or translate("Batch", "Cancel"), QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(stay)
    box.setEscapeButton(stay)

    def clicked(button: object) -> None:
        answer = answers.get(button) if isinstance(button, QPushButton) else None
        if answer is not None:
            answer()

    box.buttonClicked.connect(clicked)
    box.open()
    return box
