"""What people are asked: whether to go on, and which file or folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QCoreApplication, QDir, Qt
from PySide6.QtWidgets import QFileDialog, QMessageBox, QPushButton, QWidget

from app.widgets.fields import SUFFIX

if TYPE_CHECKING:
    from app.services.batch_jobs import BatchJobs

translate = QCoreApplication.translate

Answer = Callable[[], object]


def ask(
    parent: QWidget,
    question: str,
    details: str,
    choices: Sequence[tuple[str, Literal["do", "destroy"], Answer]],
    cancel: str = "",
) -> QMessageBox:
    """Asks before an action; Esc and the default button cancel it."""
    box = QMessageBox(parent)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    box.setIcon(QMessageBox.Icon.NoIcon)
    box.setProperty("asks", True)
    box.setText(question)
    box.setInformativeText(details)
    answers: dict[QPushButton, Answer] = {}
    for label, kind, answer in choices:
        role = QMessageBox.ButtonRole.AcceptRole if kind == "do" else QMessageBox.ButtonRole.DestructiveRole
        button = box.addButton(label, role)
        if kind == "destroy":
            button.setProperty("kind", "danger")
        answers[button] = answer
    stay = box.addButton(cancel or translate("Asking", "Cancel"), QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(stay)
    box.setEscapeButton(stay)

    def clicked(button: object) -> None:
        answer = answers.get(button) if isinstance(button, QPushButton) else None
        if answer is not None:
            answer()

    box.buttonClicked.connect(clicked)
    box.open()
    return box


def before_loading(jobs: BatchJobs, parent: QWidget, load: Answer) -> None:
    """Does `load`, which loads a model, at once if no job runs, else after the user agrees to pause the job."""
    running = jobs.running
    if not running:
        load()
        return

    def pause_and_load() -> None:
        for entry in jobs.running:
            jobs.pause(entry.key)
        load()

    if len(running) == 1:
        question, words, choice = (
            translate("Asking", "A batch job is running."),
            translate(
                "Asking",
                "Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and "
                "precision.",
            ),
            translate("Asking", "Pause the job"),
        )
    else:
        question, words, choice = (
            translate("Asking", "{0} batch jobs are running.", "", len(running)).format(len(running)),
            translate(
                "Asking",
                "Loading a model pauses them. No answered row is lost: you can resume them later, with the same model "
                "and precision.",
            ),
            translate("Asking", "Pause the jobs"),
        )
    ask(parent.window(), question, words, [(choice, "do", pause_and_load)])


# --- files ------------------------------------------------------------------------------------------


def ask_paths(
    parent: QWidget,
    title: str,
    then: Callable[[list[Path]], object],
    *,
    kinds: str = "",
    folder: bool = False,
    start: str = "",
) -> QFileDialog:
    """Asks for files that are there, or for a folder.

    Args:
        kinds: filters by name, separated with `;;`.
        start: the folder to look in first; that of the user if empty.
    """
    dialog = QFileDialog(parent, title, start or QDir.homePath(), kinds)
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setFileMode(QFileDialog.FileMode.Directory if folder else QFileDialog.FileMode.ExistingFiles)
    dialog.setOption(QFileDialog.Option.ShowDirsOnly, folder)
    dialog.filesSelected.connect(lambda paths: then([Path(path) for path in paths]))
    dialog.open()
    return dialog


def ask_path(
    parent: QWidget,
    title: str,
    then: Callable[[Path], object],
    *,
    kinds: str = "",
    folder: bool = False,
    start: str = "",
) -> QFileDialog:
    dialog = ask_paths(parent, title, lambda paths: then(paths[0]), kinds=kinds, folder=folder, start=start)
    dialog.setFileMode(QFileDialog.FileMode.Directory if folder else QFileDialog.FileMode.ExistingFile)
    return dialog


def ask_where(
    parent: QWidget, title: str, name: str, suffixes: Mapping[str, str], then: Callable[[Path], object]
) -> None:
    """Asks for a file to write, called `name` unless people want another one; `suffixes`: of each filter by name."""
    dialog = QFileDialog(parent, title, QDir.homePath(), ";;".join(suffixes))
    dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
    dialog.selectFile(name)
    usual = next(iter(suffixes.values()))
    dialog.setDefaultSuffix(usual)
    dialog.filterSelected.connect(lambda chosen: dialog.setDefaultSuffix(suffixes.get(chosen, usual)))
    dialog.fileSelected.connect(lambda path: then(Path(path)))
    dialog.open()


def ask_where_to_report(parent: QWidget, write: Callable[[Path], object]) -> None:
    """`write` gets the file that a fault is described in, if one was chosen."""
    name = f"switchyard-report-{time.strftime('%Y-%m-%d')}.txt"
    ask_where(parent, translate("Report", "Save a report"), name, {translate("Report", "Text (*.txt)"): "txt"}, write)


def ask_model(parent: QWidget, then: Callable[[Path], object]) -> QFileDialog:
    """Asks for a model's file; any file of a checkpoint stands for the folder it lies in."""
    kinds = translate("ModelDialog", "Models (*.gguf *.safetensors config.json)")
    title = translate("ModelDialog", "Open a model file")
    return ask_path(parent, title, lambda path: then(model_of(path)), kinds=kinds)


def model_of(file: Path) -> Path:
    return file if file.suffix.lower() == SUFFIX else file.parent
