"""Where and how models run, with the speed that is predicted for it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import Settings
from app.views.settings.card import SettingsCard, settings_on
from app.widgets.fields import ComboBox
from app.widgets.quantities import figures, rough
from app.widgets.scaffold import muted_label, push_button, text_label
from app.widgets.setting_controls import Budget, setting_words
from engine.common.config import COMPUTING_CARD
from engine.common.settings import STARTER, kept_settings
from engine.formats import FORMATS, PRECISIONS
from engine.tuning.machine_state import MachineLook, look_at_machine


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
        """Whether what it says of this PC is still being found out."""
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
