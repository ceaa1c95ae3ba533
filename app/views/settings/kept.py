"""What was computed of chats and is kept on disk: whether, how much, and away with it."""

from __future__ import annotations

from dataclasses import asdict

from PySide6.QtCore import QCoreApplication
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QWidget

from app.services.background import TaskQueue
from app.views.settings.card import SettingsCard
from app.widgets.quantities import file_size
from app.widgets.scaffold import push_button
from app.widgets.setting_controls import SettingValues
from engine.common.kept_context import (
    KeptContextSettings,
    clear_kept_context,
    kept_context_bytes,
    kept_context_settings,
    save_kept_context_settings,
)
from engine.common.schema import settings_of

translate = QCoreApplication.translate


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
