"""Where chats and models are stored."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QMessageBox, QPushButton, QWidget

from app.services.data_folder import (
    FolderChange,
    cancel_change,
    holds_our_data,
    plan_change,
    planned_change,
)
from app.views.settings.card import SettingsCard
from app.widgets.card import muted_label
from engine.common.errors import EngineError
from engine.common.files import private_folder
from engine.common.paths import data_dir


class DataCard(SettingsCard):
    """A change is scheduled here and carried out at the next start."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Data"))
        self._open = QPushButton(self.tr("Open folder"), self)
        self._open.clicked.connect(self._open_folder)
        self._change = QPushButton(self.tr("Change…"), self)
        self._change.clicked.connect(self._choose)
        self._where = self.add_row(self.tr("Data folder"), str(data_dir()), self._open, self._change)
        self._plan = muted_label(self)
        self._undo = QPushButton(self.tr("Undo"), self)
        self._undo.clicked.connect(self._undo_change)
        self.add_wide(self._plan)
        self.add_wide(self._undo)
        self._show_plan()

    def plan(self, target: Path, *, copy: bool) -> None:
        """Schedules the change and shows it, or shows why it is not possible."""
        try:
            plan_change(FolderChange(target, copy))
        except EngineError as error:
            self._plan.setText(error.message)
            self._plan.show()
            return
        self._show_plan()

    def _choose(self) -> None:
        chosen = QFileDialog.getExistingDirectory(self, self.tr("Folder for chats and models"), str(data_dir()))
        if not chosen:
            return
        target = Path(chosen)
        if holds_our_data(target) or target.resolve() == data_dir().resolve():
            self.plan(target, copy=False)
            return
        if any(target.iterdir()):
            target = target / "Switchyard"
        box = QMessageBox(self)
        box.setWindowTitle(self.tr("Data folder"))
        box.setText(self.tr("Copy your chats and models to {0}?").format(target))
        box.setInformativeText(
            self.tr("They are copied at the next start. The current folder stays until you delete it.")
        )
        copy = box.addButton(self.tr("Copy them"), QMessageBox.ButtonRole.AcceptRole)
        empty = box.addButton(self.tr("Start empty"), QMessageBox.ButtonRole.DestructiveRole)
        box.addButton(QMessageBox.StandardButton.Cancel)
        box.setDefaultButton(copy)
        box.exec()
        if box.clickedButton() in (copy, empty):
            self.plan(target, copy=box.clickedButton() is copy)

    def _undo_change(self) -> None:
        cancel_change()
        self._show_plan()

    def _show_plan(self) -> None:
        planned = planned_change()
        self._plan.setVisible(planned is not None)
        self._undo.setVisible(planned is not None)
        if planned is not None:
            sentence = (
                self.tr("At the next start your chats and models are copied to {0}, which is then used.")
                if planned.copy
                else self.tr("The data in {0} is used from the next start.")
            )
            self._plan.setText(sentence.format(planned.target))

    def _open_folder(self) -> None:
        private_folder(data_dir())
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(data_dir())))
