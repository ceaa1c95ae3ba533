"""The model loaded at the start, and how models answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask
from app.services.settings import Settings
from app.views.settings.card import SettingsCard
from app.widgets.fields import ComboBox
from app.widgets.scaffold import push_button
from app.widgets.setting_controls import COMBO_WIDTH_PX, setting_words
from engine.common.config import MODEL_CARD
from engine.common.settings import STARTER

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry


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
