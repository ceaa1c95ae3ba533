"""Cards of a few rows: computing, the model, what is kept of chats, updates, and the version with its licences."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import PySide6
from PySide6.QtCore import QCoreApplication, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QHideEvent, QShowEvent
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QPlainTextEdit, QPushButton, QWidget

from app.services.background import LatestTask, TaskQueue, sentence_of
from app.services.installation import Diagnosis
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import Settings
from app.services.updates import Updates, UpdateStage
from app.views.settings.card import SettingsCard, settings_on
from app.views.settings.hub import AddressField
from app.widgets.asking import ask_where_to_report
from app.widgets.downloads_card import download_words
from app.widgets.fields import ComboBox
from app.widgets.quantities import figures, file_size, rough
from app.widgets.scaffold import muted_label, push_button, set_message, text_label, vbox, warning_label
from app.widgets.setting_controls import COMBO_WIDTH_PX, Budget, SettingValues, setting_words
from engine.common.config import COMPUTING_CARD, MODEL_CARD
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
from engine.common.settings import STARTER, UPDATES_CARD, kept_settings
from engine.formats import FORMATS, PRECISIONS
from engine.tuning.machine_state import MachineLook, look_at_machine

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry


class ComputingCard(SettingsCard):
    """What is set holds when the model is loaded the next time.

    Signals: `reload_wanted`, to load the default model with it now; `timing_wanted`, to time it besides.
    """

    reload_wanted = Signal()
    timing_wanted = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(setting_words(COMPUTING_CARD), parent)
        self._settings = settings
        self._look: MachineLook | None = None
        self._looking = LatestTask(self)
        self.planning = Planning(self)
        names = {"precision": {name: f"{name}, {FORMATS[name].words}" for name in PRECISIONS if name in FORMATS}}
        explained = {
            setting.key: self.add_setting(setting, settings, names=names.get(setting.key))
            for setting in settings_on(COMPUTING_CARD)
        }
        self._vram_words, self._vram_help = explained["vram_bytes"], explained["vram_bytes"].text()
        self.predicted = text_label(self, tone="head", wrap=True, tabular=True)
        self.bottleneck = muted_label(self)
        self.time = push_button(
            self,
            self.tr("Time it"),
            self.timing_wanted,
            tip=self.tr("Loads the model with these settings, has it write a little, and measures that"),
        )
        self.apply = push_button(self, self.tr("Reload model"), self._reload)
        self.apply.setEnabled(False)
        self.add_wide(self.predicted)
        self.add_wide(self.bottleneck)
        self.add_row("", self.tr("Changes apply at the next start, or now with these buttons."), self.time, self.apply)
        self.planning.planned.connect(self._on_planned)
        settings.changed.connect(self._on_setting)

    @property
    def is_busy(self) -> bool:
        return self._looking.is_busy or self.planning.is_busy

    def close_down(self) -> None:
        self._looking.close()
        self.planning.close()

    def show_timing(self) -> None:
        self.time.setEnabled(False)
        self.predicted.setText(self.tr("Loading the model and timing it…"))
        self.bottleneck.setText("")

    def show_timed(self, tokens_per_s: float, problem: str) -> None:
        self.time.setEnabled(True)
        self.apply.setEnabled(False)
        if tokens_per_s:
            self.predicted.setText(
                self.tr("{0}: {1} tokens/s, measured just now").format(self._name, figures(tokens_per_s))
            )
        else:
            self._plan()
        self.bottleneck.setText(problem)

    # --- inside ---

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._look_again()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._looking.forget()

    @property
    def _name(self) -> str:
        model = self._settings.default_model
        return self.tr("Starter") if model == STARTER else model.rstrip("/").rpartition("/")[2]

    def _look_again(self) -> None:
        device = self._settings.engine("").device
        self._looking.ask(lambda: look_at_machine(device), self._on_looked, lambda _error: None)

    def _on_looked(self, look: MachineLook) -> None:
        self._look = look
        gpu, box = look.probe.compute_gpu, self.controls["device"]
        assert isinstance(box, ComboBox)
        if gpu is not None and gpu.total_bytes and box.findData(look.probe.card_device) < 0:
            box.insertItem(1, gpu.name, look.probe.card_device)
            box.setCurrentIndex(box.findData(self._settings.engine("").device))
        profile = look.profile.gpu if look.device else None
        vram = int(profile.memory_bytes) if profile is not None else 0
        for key, total in (("vram_bytes", vram), ("ram_bytes", look.probe.ram_bytes)):
            slider = self.controls[key]
            assert isinstance(slider, Budget)
            slider.set_total(total)
        self._vram_words.setText(self._vram_help if vram else self.tr("No graphics card computes here."))
        self._plan()

    def _plan(self) -> None:
        if self._look is not None and self.time.isEnabled() and self.isVisible():
            self.planning.ask(PlanQuestion(self._look, self._settings.engine(self._settings.default_model)))

    def _on_planned(self, answer: PlanAnswer) -> None:
        if not self.time.isEnabled():
            return
        if answer.plan is None:
            self.predicted.setText("")
            self.bottleneck.setText(answer.problem)
            return
        speed = answer.plan.speed
        if speed.timed_at:
            words = self.tr("{0}: {1} tokens/s, measured").format(self._name, figures(speed.decode_tokens_per_s))
        else:
            words = self.tr("{0}: about {1} tokens/s, {2} to {3}").format(
                self._name, rough(speed.decode_tokens_per_s), rough(speed.low), rough(speed.high)
            )
        self.predicted.setText(words)
        self.bottleneck.setText(answer.plan.bottleneck)

    def _on_setting(self, key: str) -> None:
        setting = kept_settings().get(key)
        if setting is not None and setting.applies == "load":
            self.apply.setEnabled(True)
            self._look_again() if key == "device" else self._plan()

    def _reload(self) -> None:
        self.apply.setEnabled(False)
        self.reload_wanted.emit()


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
        self.server = AddressField("updates", self._doing, self._tell, self)
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
        self._doing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_state()

    def _button(self, text: str, do: object) -> QPushButton:
        button = push_button(self, text)
        button.clicked.connect(lambda: do())  # type: ignore[operator]  # without Qt's "checked"
        return button

    def _tell(self, error: Exception | None) -> None:
        set_message(self.trouble, sentence_of(error) if error is not None else "")

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
