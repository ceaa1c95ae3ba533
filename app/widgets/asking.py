"""Confirmation dialogs."""

from __future__ import annotations

import html
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
    box.setText(f"<b>{html.escape(question)}</b>")
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
    if running is None:
        load()
        return

    def pause_and_load() -> None:
        if jobs.running is not None:
            jobs.pause(running.key)
        load()

    ask(
        parent.window(),
        translate("Asking", "A batch job is running."),
        translate(
            "Asking",
            "Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and "
            "precision.",
        ),
        [(translate("Asking", "Pause the job"), "do", pause_and_load)],
    )
