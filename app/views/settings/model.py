"""The model loaded at the start, speculative decoding, and how it holds conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QCheckBox, QPushButton, QWidget

from app.services.background import LatestTask
from app.services.settings import MOST_JOBS_AT_ONCE, STARTER, Settings
from app.views.settings.card import COMBO_WIDTH_PX, SettingsCard, minutes_choice
from app.widgets.fields import ComboBox, SpinBox

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry
    from engine.common.config import KvPrecision

_KV_PRECISIONS: tuple[KvPrecision, ...] = ("auto", "int8")
"""Those that are offered here."""


class ModelCard(SettingsCard):
    """Signals: `changed`: something that holds when the model is loaded the next time; `tune_wanted`."""

    changed = Signal()
    tune_wanted = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Model"))
        self._settings = settings
        self._listing = LatestTask(self)
        self._model = ComboBox(self)
        self._model.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)
        self._model.setMinimumWidth(COMBO_WIDTH_PX)
        self._show(())
        self._model.activated.connect(self._choose)
        self.add_row(self.tr("Default model"), self.tr("Loaded when Switchyard starts."), self._model)
        self.guesses = QCheckBox(self)
        self.guesses.setChecked(settings.speculation)
        self.guesses.toggled.connect(self._set_guesses)
        self.add_row(
            self.tr("Speculative decoding"),
            self.tr(
                "Answers that quote, such as edits of a text, come faster: likely next words are tried together, only "
                "as long as that pays. Answers stay the same."
            ),
            self.guesses,
        )
        self._kv = ComboBox(self)
        self._kv.setFixedWidth(COMBO_WIDTH_PX)
        for precision, words in zip(_KV_PRECISIONS, (self.tr("As in the model"), self.tr("int8")), strict=True):
            self._kv.addItem(words, precision)
        self._kv.setCurrentIndex(max(0, self._kv.findData(settings.kv_precision)))
        self._kv.activated.connect(self._set_kv)
        self.add_row(
            self.tr("Keys and values"),
            self.tr(
                "What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly "
                "(with the starter, perplexity rose by 0.08%)."
            ),
            self._kv,
        )
        self.idle = minutes_choice((10, 30, 120, 0), settings.idle_minutes, self.tr("Never"), self)
        self.idle.activated.connect(self._set_idle)
        self.add_row(
            self.tr("Free the memory after"),
            self.tr("If nobody uses the model for so long; the next question loads it again."),
            self.idle,
        )
        self.jobs = SpinBox(self)
        self.jobs.setRange(1, MOST_JOBS_AT_ONCE)
        self.jobs.setFixedWidth(140)
        self.jobs.lineEdit().setTextMargins(8, 0, 0, 0)
        self.jobs.setValue(settings.jobs_at_once)
        self.jobs.valueChanged.connect(self._set_jobs)
        self.add_row(
            self.tr("Batch jobs at once"),
            self.tr("They share each pass through the model; others wait for their turn."),
            self.jobs,
        )

        tune = QPushButton(self.tr("Tune…"), self)
        tune.clicked.connect(self.tune_wanted)
        self.add_row(self.tr("Speed"), self.tr("Times this machine and keeps the fastest settings."), tune)

    def close_down(self) -> None:
        """Waits for a running listing."""
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

    def _choose(self) -> None:
        name = self._model.currentData()
        if name != self._settings.default_model:
            self._settings.default_model = name
            self.changed.emit()

    def _set_guesses(self, on: bool) -> None:
        self._settings.speculation = on
        self.changed.emit()

    def _set_idle(self) -> None:
        self._settings.idle_minutes = self.idle.currentData()

    def _set_jobs(self, count: int) -> None:
        self._settings.jobs_at_once = count

    def _set_kv(self) -> None:
        chosen = self._kv.currentData()
        if chosen != self._settings.kv_precision:
            self._settings.kv_precision = chosen
            self.changed.emit()


def _list_models() -> list[LibraryEntry]:
    from engine.checkpoint.library import list_models  # imported late: it is slow to load

    return list_models()
