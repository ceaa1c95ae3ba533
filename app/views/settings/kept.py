"""What was computed of chats and is kept on disk: whether, how much, and away with it."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QCoreApplication
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QCheckBox, QWidget

from app.services.background import TaskQueue
from app.views.settings.card import SettingsCard
from app.widgets.fields import ComboBox
from app.widgets.quantities import file_size
from app.widgets.scaffold import push_button
from engine.common.kept_context import (
    KeptContextSettings,
    clear_kept_context,
    kept_context_bytes,
    kept_context_settings,
    save_kept_context_settings,
)

translate = QCoreApplication.translate

BUDGETS = tuple(gigabytes * 10**9 for gigabytes in (1, 2, 4, 8, 16, 32, 64))


class KeptCard(SettingsCard):
    """Changes hold at once, for the model that is loaded too."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("KeptCard", "Continuing chats"), parent)
        self._tasks = TaskQueue(self)
        self._settings = kept_context_settings()
        self.keep = QCheckBox(self)
        self.keep.setChecked(self._settings.on_disk)
        self.keep.toggled.connect(self._set)
        self.add_row(
            self.tr("Keep chats' computed context on disk"),
            self.tr(
                "A chat then goes on at once after another one or a restart: what the model has read need not be read "
                "again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in "
                "the system's keyring; where there is none it is a file beside the settings, and whoever can read your "
                "files can decrypt it. Turning this off removes what is kept."
            ),
            self.keep,
        )
        self.budget = ComboBox(self)
        for nbytes in sorted({*BUDGETS, self._settings.disk_bytes}):
            self.budget.addItem(file_size(nbytes), nbytes)
        self.budget.setCurrentIndex(self.budget.findData(self._settings.disk_bytes))
        self.budget.activated.connect(self._set)
        self.add_row(
            self.tr("At most"),
            self.tr("What was of no use for longest is removed first. 2 GB of the disk always stay free."),
            self.budget,
        )
        self.clear = push_button(self, self.tr("Clear"), self._clear, name=self.tr("Clear kept context"))
        self.held = self.add_row(self.tr("Now"), " ", self.clear)
        self._enable()

    def close_down(self) -> None:
        """Waits for background work."""
        self._tasks.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._count()

    def _set(self, *_change: object) -> None:
        settings = KeptContextSettings(self.keep.isChecked(), self.budget.currentData())
        went_off = self._settings.on_disk and not settings.on_disk
        self._settings = settings
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
        self.budget.setEnabled(self.keep.isChecked())
        self._settings = replace(self._settings, on_disk=self.keep.isChecked())
