"""Confirmation dialogs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import QMessageBox, QPushButton, QWidget

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
