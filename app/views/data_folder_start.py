"""Before the window opens: changing the data folder, and what to do when the folder is missing."""

from __future__ import annotations

import threading
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEventLoop, Qt
from PySide6.QtWidgets import QMessageBox, QProgressDialog

from app.services.background import LatestTask, timer
from app.services.data_folder import FolderChange, cancel_change, carry_out, use_folder
from engine.common.errors import EngineError
from engine.common.paths import data_dir, standard_data_dir

translate = QCoreApplication.translate


def carry_out_change(change: FolderChange) -> None:
    dialog = QProgressDialog(
        translate("DataFolderStart", "Copying chats and models to {0}…").format(change.target),
        translate("DataFolderStart", "Keep the current folder"),
        0,
        1000,
    )
    dialog.setWindowTitle("Switchyard")
    dialog.setWindowModality(Qt.WindowModality.ApplicationModal)
    dialog.setAutoClose(False)
    dialog.setAutoReset(False)
    dialog.setMinimumDuration(500)
    stopped = threading.Event()
    share = [0]
    dialog.canceled.connect(stopped.set)

    def on_progress(done: int, total: int) -> None:
        share[0] = 1000 * done // max(1, total)

    loop = QEventLoop()
    task = LatestTask(dialog)
    failures: list[Exception] = []

    def on_failed(error: Exception) -> None:
        failures.append(error)
        loop.quit()

    refresh = timer(dialog, lambda: dialog.setValue(share[0]), 100)
    refresh.start()
    task.ask(lambda: carry_out(change, on_progress, stopped.is_set), lambda _done: loop.quit(), on_failed)
    loop.exec()
    refresh.stop()
    dialog.close()
    if stopped.is_set() or failures:
        cancel_change()
    if failures:
        error = failures[0]
        sentence = (
            error.message
            if isinstance(error, EngineError)
            else translate("DataFolderStart", "The data folder could not be changed.")
        )
        QMessageBox.information(None, "Switchyard", sentence)


def chosen_folder_is_missing() -> bool:
    return data_dir() != standard_data_dir() and not data_dir().is_dir()


def ask_about_missing_folder() -> bool:
    while chosen_folder_is_missing():
        box = QMessageBox()
        box.setWindowTitle("Switchyard")
        box.setText(translate("DataFolderStart", "The data folder {0} is missing.").format(data_dir()))
        box.setInformativeText(
            translate(
                "DataFolderStart", "Plug in its drive and try again, or continue with the default folder {0}."
            ).format(standard_data_dir())
        )
        again = box.addButton(translate("DataFolderStart", "Try again"), QMessageBox.ButtonRole.AcceptRole)
        standard = box.addButton(
            translate("DataFolderStart", "Use the default folder"), QMessageBox.ButtonRole.DestructiveRole
        )
        box.addButton(translate("DataFolderStart", "Quit"), QMessageBox.ButtonRole.RejectRole)
        box.setDefaultButton(again)
        box.exec()
        if box.clickedButton() is standard:
            use_folder(standard_data_dir())
        elif box.clickedButton() is not again:
            return False
    return True


def warn_not_responding() -> None:
    QMessageBox.warning(
        None,
        "Switchyard",
        translate(
            "DataFolderStart",
            "Switchyard is already open with the data folder {0}, but does not respond. "
            "End it, in the system's task manager if necessary, and start again.",
        ).format(data_dir()),
    )


def warn_not_writable() -> None:
    QMessageBox.warning(
        None,
        "Switchyard",
        translate(
            "DataFolderStart",
            "The data folder {0} cannot be written to; check its permissions and free space, then start again.",
        ).format(data_dir()),
    )


def warn_no_file(path: Path) -> None:
    QMessageBox.warning(
        None,
        "Switchyard",
        translate(
            "DataFolderStart", "{0} is not a file, and Switchyard keeps one there: move it away, then start again."
        ).format(path),
    )
