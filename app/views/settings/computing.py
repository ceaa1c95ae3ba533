"""Where and how models run: device, precision, threads and budgets, with the speed that is predicted for them."""

from __future__ import annotations

import os

from PySide6.QtCore import Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QLabel, QPushButton, QWidget

from app.services.background import LatestTask
from app.services.model_start import wanted_config
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import STARTER, Settings
from app.theme import use_tabular_figures
from app.views.settings.card import COMBO_WIDTH_PX, SettingsCard
from app.widgets.card import muted_label
from app.widgets.fields import ComboBox, Slider
from app.widgets.quantities import figures, memory, rough
from engine.common.config import CACHE_POLICIES
from engine.formats import FORMATS
from engine.tuning.machine_state import MachineLook, look_at_machine

_SLIDER_PX = 180
_SHARES = 32
"""Steps of a memory's slider; the last one takes all that is free."""
_OFFERED = ("auto", "bf16", "int8", "int4")
"""Precisions that most people choose from; another one that is set is offered, too."""


class ComputingCard(SettingsCard):
    """What is set holds when the model is loaded the next time.

    Signals: `reload_wanted`, to load the default model with it now; `timing_wanted`, to time it besides.
    """

    reload_wanted = Signal()
    timing_wanted = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Speed and memory"))
        self._settings = settings
        self._look: MachineLook | None = None
        self._looking = LatestTask(self)
        self.planning = Planning(self)
        self.device = self._choice([(self.tr("Automatic"), "auto"), (self.tr("Processor only"), "cpu")])
        self._offer(self.device, settings.device, settings.device)
        self.add_row(
            self.tr("Runs on"),
            self.tr("Automatic takes the graphics card, if there is one, and the processor for what does not fit."),
            self.device,
        )
        self.precision = self._choice([])
        for name in _OFFERED:
            words = self.tr("Automatic") if name == "auto" else f"{name}, {FORMATS[name].words}"
            self.precision.addItem(words, name)
        self._offer(self.precision, settings.precision, settings.precision)
        self.add_row(
            self.tr("Precision"),
            self.tr("Automatic keeps the best that fits. Coarser weights take less memory and are faster."),
            self.precision,
        )
        self.threads, self._threads_text = self._slider(os.cpu_count() or 1)
        self.threads.setValue(settings.threads or self.threads.maximum())
        self.add_row(
            self.tr("CPU threads"),
            self.tr("Automatic uses one per core. Fewer leave room for other programs."),
            self.threads,
            self._threads_text,
        )
        self.vram, self._vram_text = self._slider(_SHARES)
        self._vram_words = self.add_row(self.tr("Graphics memory to use"), " ", self.vram, self._vram_text)
        self.ram, self._ram_text = self._slider(_SHARES)
        self._ram_words = self.add_row(self.tr("RAM to use"), " ", self.ram, self._ram_text)
        self.predicted = QLabel(self)
        self.predicted.setProperty("tone", "head")
        self.predicted.setWordWrap(True)
        use_tabular_figures(self.predicted)
        self.bottleneck = muted_label(self)
        self.time = QPushButton(self.tr("Time it"), self)
        self.time.setToolTip(self.tr("Loads the model with these settings, has it write a little, and measures that"))
        self.apply = QPushButton(self.tr("Reload model"), self)
        self.add_wide(self.predicted)
        self.add_wide(self.bottleneck)
        self.add_row("", self.tr("Changes apply at the next start, or now with these buttons."), self.time, self.apply)
        self.policy = self._choice([(self.tr("Automatic"), "auto")])
        for policy in CACHE_POLICIES[1:]:
            self.policy.addItem(policy.upper() if policy.startswith("l") else policy, policy)
        self._offer(self.policy, settings.cache_policy, settings.cache_policy)
        self.add_row(
            self.tr("Which experts stay on the card"),
            self.tr("Automatic watches which rule would have kept the right ones, and takes that one."),
            self.policy,
        )
        self._show_memories()
        self._connect()

    def close_down(self) -> None:
        """Waits for background work."""
        self._looking.close()
        self.planning.close()

    def show_timing(self) -> None:
        """The model is being timed."""
        self.time.setEnabled(False)
        self.predicted.setText(self.tr("Loading the model and timing it…"))
        self.bottleneck.setText("")

    def show_timed(self, tokens_per_s: float, problem: str) -> None:
        """What came of it; nothing if it was stopped."""
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
        device = self._settings.device
        self._looking.ask(lambda: look_at_machine(device), self._on_looked, lambda _error: None)

    def _on_looked(self, look: MachineLook) -> None:
        self._look = look
        gpu = look.probe.compute_gpu
        if gpu is not None and gpu.total_bytes and self.device.findData(look.probe.card_device) < 0:
            self.device.insertItem(1, gpu.name, look.probe.card_device)
            self.device.setCurrentIndex(self.device.findData(self._settings.device))
        self._show_memories()
        self._plan()

    def _plan(self) -> None:
        if self._look is not None and self.time.isEnabled() and self.isVisible():
            config = wanted_config(self._settings, self._settings.default_model)
            self.planning.ask(PlanQuestion(self._look, config))

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

    @property
    def _memories(self) -> tuple[int, int]:
        """Of the card and of the machine; 0 where there is none, or it is not known."""
        if self._look is None:
            return 0, 0
        gpu = self._look.profile.gpu if self._look.device else None
        return (int(gpu.memory_bytes) if gpu is not None else 0), self._look.probe.ram_bytes

    def _show_memories(self) -> None:
        vram, ram = self._memories
        held = self._settings
        for slider, total, budget in ((self.vram, vram, held.vram_bytes), (self.ram, ram, held.ram_bytes)):
            slider.blockSignals(True)
            slider.setEnabled(bool(total))
            share = _SHARES if budget is None or not total else max(1, min(_SHARES, round(_SHARES * budget / total)))
            slider.setValue(share)
            slider.blockSignals(False)
        card = self.tr("For experts that are used often; the rest is left to other programs.")
        self._vram_words.setText(card if vram or self._look is None else self.tr("No graphics card computes here."))
        self._ram_words.setText(self.tr("For the model; what does not fit is read from the disk again and again."))
        self._show_values()

    def _show_values(self) -> None:
        free = self.tr("all that is free")
        for label, budget in ((self._vram_text, self._settings.vram_bytes), (self._ram_text, self._settings.ram_bytes)):
            label.setText(free if budget is None else self.tr("at most {0}").format(memory(budget)))
        threads = self._settings.threads
        self._threads_text.setText(self.tr("Automatic") if threads is None else str(threads))
        for slider, label in (
            (self.vram, self._vram_text),
            (self.ram, self._ram_text),
            (self.threads, self._threads_text),
        ):
            slider.setAccessibleDescription(label.text())

    def _budget(self, slider: Slider, total: int) -> int | None:
        share = slider.value()
        return None if share == _SHARES or not total else total * share // _SHARES

    def _on_changed(self) -> None:
        vram, ram = self._memories
        settings, threads = self._settings, self.threads.value()
        settings.precision = self.precision.currentData()
        settings.cache_policy = self.policy.currentData()
        settings.threads = None if threads == self.threads.maximum() else threads
        if vram:
            settings.vram_bytes = self._budget(self.vram, vram)
        if ram:
            settings.ram_bytes = self._budget(self.ram, ram)
        self.apply.setEnabled(True)
        self._show_values()
        self._plan()

    def _on_device(self) -> None:
        self._settings.device = self.device.currentData()
        self.apply.setEnabled(True)
        self._look_again()

    def _connect(self) -> None:
        self.apply.setEnabled(False)
        self.device.activated.connect(self._on_device)
        for box in (self.precision, self.policy):
            box.activated.connect(self._on_changed)
        for slider in (self.threads, self.vram, self.ram):
            slider.valueChanged.connect(self._on_changed)
        self.planning.planned.connect(self._on_planned)
        self.time.clicked.connect(self.timing_wanted)
        self.apply.clicked.connect(self._reload)
        self._settings.changed.connect(self._on_setting)

    def _on_setting(self, key: str) -> None:
        if key in ("default_model", "kv_precision"):
            self._plan()

    def _reload(self) -> None:
        self.apply.setEnabled(False)
        self.reload_wanted.emit()

    def _choice(self, items: list[tuple[str, str]]) -> ComboBox:
        box = ComboBox(self)
        box.setFixedWidth(COMBO_WIDTH_PX)
        for words, data in items:
            box.addItem(words, data)
        return box

    def _offer(self, box: ComboBox, data: str, words: str) -> None:
        """Chooses what is set, which may be none of the usual ones."""
        if box.findData(data) < 0:
            box.addItem(words, data)
        box.setCurrentIndex(box.findData(data))

    def _slider(self, most: int) -> tuple[Slider, QLabel]:
        slider, value = Slider(self), QLabel(self)
        slider.setRange(1, most)
        slider.setPageStep(1)
        slider.setValue(most)
        slider.setFixedWidth(_SLIDER_PX)
        value.setProperty("role", "secondary")
        value.setMinimumWidth(self.fontMetrics().averageCharWidth() * 15)
        use_tabular_figures(value)
        return slider, value
