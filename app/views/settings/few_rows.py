"""Cards of a few rows: the model, what is kept of chats, updates, and the version with its licences and logs."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import PySide6
from PySide6.QtCore import QCoreApplication, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QShowEvent
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QPushButton, QWidget

from app.services.background import LatestTask, TaskQueue
from app.services.diagnosis import Diagnosis
from app.services.settings import Settings
from app.services.updates import Updates, UpdateStage
from app.views.settings.card import SettingsCard
from app.views.settings.hub import AddressField
from app.widgets.asking import ask_where_to_report
from app.widgets.downloads_card import download_words
from app.widgets.fields import ComboBox
from app.widgets.quantities import file_size
from app.widgets.scaffold import push_button, set_message, vbox, warning_label
from app.widgets.setting_controls import COMBO_WIDTH_PX, SettingValues, setting_words
from engine.checkpoint.mirror import updates_address, use_updates_address
from engine.common.config import MODEL_CARD
from engine.common.errors import EngineError
from engine.common.files import private_folder
from engine.common.installed import version
from engine.common.kept_context import (
    KeptContextSettings,
    clear_kept_context,
    kept_context_bytes,
    kept_context_settings,
    save_kept_context_settings,
)
from engine.common.paths import log_dir, resources_dir
from engine.common.schema import settings_of
from engine.common.settings import STARTER, UPDATES_CARD

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry

translate = QCoreApplication.translate


class UpdatesCard(SettingsCard):
    """Only for packages that can be updated."""

    def __init__(self, updates: Updates, parent: QWidget | None = None) -> None:
        super().__init__(setting_words(UPDATES_CARD), parent)
        self._updates = updates
        self.add_settings(UPDATES_CARD, updates.settings)
        self.look = self._button(self.tr("Check now"), updates.look)
        self.get = self._button(self.tr("Download"), updates.fetch)
        self.cancel = self._button(self.tr("Cancel"), updates.cancel)
        self.words = self.add_row(self.tr("Switchyard {0}").format(version()), " ", self.get, self.look, self.cancel)
        self.back = self._button(self.tr("Go back"), updates.go_back)
        self.back_words = self.add_row(self.tr("Previous version"), " ", self.back)
        self._doing = TaskQueue(self)
        self.server = AddressField(updates_address, use_updates_address, self._doing, self._tell, self)
        self.server.setPlaceholderText(self.tr("the official one"))
        words = self.tr(
            "Where newer versions come from. Only versions signed by Switchyard's developers are installed."
        )
        self.add_row(self.tr("Update server"), words, self.server)
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        updates.changed.connect(self._show_state)
        self._show_state()

    def close_down(self) -> None:
        """Waits for what is being done."""
        self._doing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_state()

    def _button(self, text: str, do: object) -> QPushButton:
        button = push_button(self, text)
        button.clicked.connect(lambda: do())  # type: ignore[operator]  # without Qt's "checked"
        return button

    def _tell(self, error: Exception | None) -> None:
        if error is not None and not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message if error is not None else "")

    def _show_state(self) -> None:
        updates, stage = self._updates, self._updates.stage
        self.words.setText(self._said())
        self.words.show()
        set_message(self.trouble, updates.problem if stage is UpdateStage.FAILED else "")
        self.get.setVisible(
            stage is UpdateStage.OFFERED or (stage is UpdateStage.FAILED and updates.update is not None)
        )
        self.look.setVisible(stage in (UpdateStage.IDLE, UpdateStage.NEWEST, UpdateStage.FAILED))
        self.cancel.setVisible(stage in (UpdateStage.FETCHING, UpdateStage.WAITING, UpdateStage.INSTALLING))
        before = updates.previous
        self.back.setEnabled(bool(before) and stage not in (UpdateStage.WAITING, UpdateStage.INSTALLING))
        kept = self.tr("{0} is kept. Going back takes effect at the next start.").format(before)
        self.back_words.setText(kept if before else self.tr("There is none."))

    def _said(self) -> str:
        updates, found = self._updates, self._updates.update
        new = found.version if found is not None else ""
        if updates.stage is UpdateStage.OFFERED and found is not None:
            offer = self.tr("{0} is available ({1}).").format(new, file_size(found.bytes))
            return f"{offer} {found.notes}".strip()
        if updates.stage is UpdateStage.FETCHING and updates.download is not None:
            return download_words(updates.download)
        return {
            UpdateStage.IDLE: self.tr("Not checked yet."),
            UpdateStage.LOOKING: self.tr("Checking…"),
            UpdateStage.NEWEST: self.tr("This is the newest version."),
            UpdateStage.FETCHING: self.tr("Downloading {0}…").format(new),
            UpdateStage.WAITING: self.tr("{0} will be installed when answers and jobs are done.").format(new),
            UpdateStage.INSTALLING: self.tr("Installing and testing {0}…").format(new),
            UpdateStage.READY: self.tr("Restart Switchyard to use the other version."),
        }.get(updates.stage, self.tr("Nothing has changed."))


class KeptCard(SettingsCard):
    """Changes hold at once, for the model that is loaded too."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("KeptCard", "Continuing chats"), parent)
        self._tasks = TaskQueue(self)
        self._values = SettingValues(asdict(kept_context_settings()), self)
        for setting in settings_of(KeptContextSettings):
            self.add_setting(setting, self._values)
        self._values.changed.connect(self._save)
        self.clear = push_button(self, self.tr("Clear"), self._clear, name=self.tr("Clear kept context"))
        self.held = self.add_row(self.tr("Now"), " ", self.clear)
        self._enable()

    def close_down(self) -> None:
        self._tasks.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._count()

    def _save(self, key: str) -> None:
        settings = KeptContextSettings(**self._values.values)
        went_off = key == "on_disk" and not settings.on_disk
        self._enable()

        def save() -> None:
            save_kept_context_settings(settings)
            if went_off:
                clear_kept_context()

        self._tasks.add(save, lambda _done: self._count(), self._failed)

    def _clear(self) -> None:
        self.clear.setEnabled(False)
        self._tasks.add(clear_kept_context, lambda _removed: self._count(), self._failed)

    def _count(self) -> None:
        self._tasks.add(kept_context_bytes, self._show, self._failed)

    def _show(self, nbytes: int) -> None:
        self.held.setText(
            self.tr("{0} of all chats and models together.").format(file_size(nbytes))
            if nbytes
            else self.tr("Nothing is kept.")
        )
        self.clear.setEnabled(nbytes > 0)

    def _failed(self, error: Exception) -> None:
        self.held.setText(self.tr("The folder cannot be changed: {0}").format(str(error)))
        self.clear.setEnabled(True)

    def _enable(self) -> None:
        self.controls["disk_bytes"].setEnabled(self._values.values["on_disk"])


class ModelCard(SettingsCard):
    """Signals: `tune_wanted`."""

    tune_wanted = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(setting_words(MODEL_CARD), parent)
        self._settings = settings
        self._listing = LatestTask(self)
        self._model = ComboBox(self)
        self._model.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)
        self._model.setMinimumWidth(COMBO_WIDTH_PX)
        self._show(())
        self._model.activated.connect(lambda _at: settings.set("default_model", self._model.currentData()))
        self.add_setting(Settings.default_model, settings, field=self._model)
        self.add_settings(MODEL_CARD, settings)
        tune = push_button(self, self.tr("Tune…"), self.tune_wanted)
        self.add_row(self.tr("Speed"), self.tr("Times this machine and keeps the fastest settings."), tune)

    def close_down(self) -> None:
        self._listing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._listing.ask(_list_models, self._on_listed, lambda _error: self._on_listed([]))

    def _on_listed(self, entries: list[LibraryEntry]) -> None:
        self._show(tuple(entry.name for entry in entries if entry.can_chat))

    def _show(self, names: tuple[str, ...]) -> None:
        chosen = self._settings.default_model
        self._model.clear()
        for name in dict.fromkeys((STARTER, *names, chosen)):
            self._model.addItem(self.tr("Starter") if name == STARTER else name, name)
        self._model.setCurrentIndex(self._model.findData(chosen))


def _list_models() -> list[LibraryEntry]:
    from engine.checkpoint.library import list_models  # imported late: it is slow to load

    return list_models()


_LICENCES = (
    ("Switchyard", "Apache License 2.0"),
    ("Inter, the typeface", "SIL Open Font License 1.1, Copyright 2016-2022 The Inter Project Authors"),
    ("Qt and PySide6", "LGPL 3.0"),
    ("PyTorch", "BSD 3-Clause"),
    ("Transformers, Tokenizers, Safetensors, Hugging Face Hub", "Apache License 2.0"),
    ("NumPy, psutil, Jinja", "BSD 3-Clause"),
    ("Pygments", "BSD 2-Clause"),
    ("markdown-it-py, platformdirs, gguf", "MIT"),
    ("SmolLM2-135M-Instruct, which the starter model is made from", "Apache License 2.0"),
)


class AboutCard(SettingsCard):
    """Version, components and logs."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("AboutCard", "About"), parent)
        licences = push_button(self, self.tr("Licences"), self._show_licences)
        logs = push_button(self, self.tr("Open logs"), self._open_logs)
        self.add_row(
            self.tr("Switchyard {0}").format(version()),
            self.tr("Python {0}, Qt {1}").format(platform.python_version(), PySide6.__version__),
            licences,
        )
        self.add_row(self.tr("Logs"), self.tr("Contain no prompts and no answers: {0}").format(log_dir()), logs)
        self.diagnosis = Diagnosis(self)
        self.diagnosis.written.connect(self._on_written)
        self.diagnosis.problem.connect(self._on_problem)
        self.save_report = push_button(self, self.tr("Save report…"), lambda: ask_where_to_report(self, self._write))
        self.report_words = self.add_row(
            self.tr("Report"),
            self.tr("One file to attach to a bug report: versions, hardware, findings and the end of the logs. ")
            + self.tr("No prompts, no names; nothing is sent."),
            self.save_report,
        )

    def close_down(self) -> None:
        """Stops a report that is being written."""
        self.diagnosis.close()

    def _write(self, path: Path) -> None:
        self.save_report.setEnabled(False)
        self.report_words.setText(self.tr("Looking at this PC…"))
        self.diagnosis.write(path)

    def _on_written(self, path: Path) -> None:
        self.save_report.setEnabled(True)
        self.report_words.setText(self.tr("It is in {0}: read it before you pass it on.").format(path))

    def _on_problem(self, sentence: str) -> None:
        self.save_report.setEnabled(True)
        self.report_words.setText(sentence)

    def _open_logs(self) -> None:
        private_folder(log_dir())
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(log_dir())))

    def _show_licences(self) -> None:
        dialog = LicencesDialog(self)
        dialog.exec()
        dialog.deleteLater()


class LicencesDialog(QDialog):
    """Every component and its licence, with the full text of the one bundled here."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Licences"))
        self.resize(640, 520)
        text = QPlainTextEdit(self)
        text.setReadOnly(True)
        text.setTabChangesFocus(True)
        text.setAccessibleName(self.tr("Licences"))
        font_licence = (resources_dir() / "fonts" / "OFL.txt").read_text(encoding="utf-8")
        listed = "\n".join(f"{part}\n    {licence}" for part, licence in _LICENCES)
        text.setPlainText(f"{listed}\n\n\n{font_licence}")
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close, self)
        buttons.rejected.connect(self.reject)
        vbox(text, buttons, into=self, margins=(20, 20, 20, 20), gap=16)
