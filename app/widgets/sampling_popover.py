"""Sampling settings of a chat: a preset, or custom values."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import (
    QDoubleSpinBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPushButton,
    QSpinBox,
    QWidget,
)

from app.models.conversation_defaults import DEFAULT_PRESET, Preset, preset_of
from app.widgets.popover import Popover
from engine.common.config import SamplingParams

translate = QCoreApplication.translate

MOST_TOKENS = 1_000_000
TEXT_MARGINS = (10, 0, 0, 0)


class SamplingPopover(Popover):
    """Signals: `changed`, the `SamplingParams` after every edit."""

    changed = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(self.tr("Sampling"), parent)
        self._filling = False
        self.presets: dict[Preset, QPushButton] = {}
        line = QHBoxLayout()
        line.setSpacing(8)
        for preset in Preset:
            button = QPushButton(preset_text(preset), self)
            button.setProperty("kind", "segment")
            button.setCheckable(True)
            button.clicked.connect(lambda _=False, preset=preset: self._choose(preset))
            self.presets[preset] = button
            line.addWidget(button)
        self.column.addLayout(line)

        self.temperature = self._decimal(0.0, 2.0, 0.1)
        self.top_k = self._whole(0, 10_000)
        self.top_k.setSpecialValueText(self.tr("off"))
        self.top_p = self._decimal(0.01, 1.0, 0.05)
        self.min_p = self._decimal(0.0, 0.99, 0.01)
        self.repetition_penalty = self._decimal(0.5, 2.0, 0.05)
        self.max_tokens = self._whole(1, MOST_TOKENS)
        self.beams = self._whole(1, 16)
        self.seed = QLineEdit(self)
        self.seed.setPlaceholderText(self.tr("random"))
        self.seed.setValidator(QIntValidator(0, 2**31 - 1, self.seed))
        self.stop = QLineEdit(self)
        self.stop.setPlaceholderText(self.tr("none; separate with commas"))
        for line_edit in (self.seed, self.stop):
            line_edit.textEdited.connect(self._on_edited)

        grid = QGridLayout()
        grid.setHorizontalSpacing(16)
        grid.setVerticalSpacing(8)
        rows = (
            (
                self.tr("Temperature"),
                self.temperature,
                self.tr("0 always takes the likeliest token; higher is more varied"),
            ),
            (self.tr("Top-k"), self.top_k, self.tr("Sample from the k likeliest tokens")),
            (
                self.tr("Top-p"),
                self.top_p,
                self.tr("Sample from the likeliest tokens with a total probability of p; 1 is off"),
            ),
            (
                self.tr("Min-p"),
                self.min_p,
                self.tr("Drop tokens below this share of the likeliest one's probability; 0 is off"),
            ),
            (
                self.tr("Repetition penalty"),
                self.repetition_penalty,
                self.tr("Above 1, tokens already used become less likely; 1 is off"),
            ),
            (self.tr("Seed"), self.seed, self.tr("The same seed gives the same answer to the same chat")),
            (self.tr("Max tokens"), self.max_tokens, self.tr("Answers stop at this length")),
            (
                self.tr("Beams"),
                self.beams,
                self.tr("Beam search if above 1; ignores temperature, top-k, top-p and min-p"),
            ),
        )
        field: QWidget
        for number, (name, field, tip) in enumerate(rows):
            at_row, at_column = number % 4, number // 4 * 2
            self._label(name, field, tip, grid, at_row, at_column)
            field.setFixedWidth(112)
        self._label(
            self.tr("Stop strings"), self.stop, self.tr("An answer ends before the first of these"), grid, 4, 0, 3
        )
        self.column.addLayout(grid)

    def edit(self, sampling: SamplingParams | None, button: QWidget) -> None:
        """Open with these settings; None means the defaults."""
        self.fill(sampling or DEFAULT_PRESET.value)
        self.open_above(button)
        self.temperature.setFocus()

    def without_beams(self) -> None:
        """Hide beam search where it is not available."""
        self.beams.hide()
        for label in self.findChildren(QLabel):
            if label.buddy() is self.beams:
                label.hide()

    def fill(self, sampling: SamplingParams) -> None:
        """Show these settings."""
        self._filling = True
        self.temperature.setValue(sampling.temperature)
        self.top_k.setValue(sampling.top_k)
        self.top_p.setValue(sampling.top_p)
        self.min_p.setValue(sampling.min_p)
        self.repetition_penalty.setValue(sampling.repetition_penalty)
        self.max_tokens.setValue(sampling.max_tokens)
        self.beams.setValue(sampling.beams)
        self.seed.setText("" if sampling.seed is None else str(sampling.seed))
        self.stop.setText(", ".join(text.replace("\n", "\\n") for text in sampling.stop))
        self._filling = False
        self._show_preset(sampling)

    def sampling(self) -> SamplingParams:
        """The settings as entered."""
        stop = (text.strip().replace("\\n", "\n") for text in self.stop.text().split(","))
        return SamplingParams(
            temperature=round(self.temperature.value(), 4),
            top_k=self.top_k.value(),
            top_p=round(self.top_p.value(), 4),
            min_p=round(self.min_p.value(), 4),
            repetition_penalty=round(self.repetition_penalty.value(), 4),
            seed=int(self.seed.text()) if self.seed.text() else None,
            stop=tuple(text for text in stop if text),
            max_tokens=self.max_tokens.value(),
            beams=self.beams.value(),
        )

    def _choose(self, preset: Preset) -> None:
        self.fill(preset.value)
        self.changed.emit(preset.value)

    def _on_edited(self) -> None:
        if not self._filling:
            sampling = self.sampling()
            self._show_preset(sampling)
            self.changed.emit(sampling)

    def _show_preset(self, sampling: SamplingParams) -> None:
        now = preset_of(sampling)
        for preset, button in self.presets.items():
            button.setChecked(preset is now)

    def _label(
        self, name: str, field: QWidget, tip: str, grid: QGridLayout, row: int, column: int, span: int = 1
    ) -> None:
        label = QLabel(name, self)
        label.setProperty("role", "secondary")
        label.setBuddy(field)
        label.setToolTip(tip)
        field.setToolTip(tip)
        field.setAccessibleName(name)
        field.setAccessibleDescription(tip)
        grid.addWidget(label, row, column)
        grid.addWidget(field, row, column + 1, 1, span)

    def _decimal(self, least: float, most: float, step: float) -> QDoubleSpinBox:
        box = QDoubleSpinBox(self)
        box.setRange(least, most)
        box.setSingleStep(step)
        box.setDecimals(2)
        box.lineEdit().setTextMargins(*TEXT_MARGINS)
        box.valueChanged.connect(self._on_edited)
        return box

    def _whole(self, least: int, most: int) -> QSpinBox:
        box = QSpinBox(self)
        box.setRange(least, most)
        box.setGroupSeparatorShown(True)
        box.lineEdit().setTextMargins(*TEXT_MARGINS)
        box.valueChanged.connect(self._on_edited)
        return box


def preset_text(preset: Preset | None) -> str:
    """The name of a preset."""
    if preset is None:
        return translate("Chat", "Custom")
    return {
        Preset.PRECISE: translate("Chat", "Precise"),
        Preset.BALANCED: translate("Chat", "Balanced"),
        Preset.CREATIVE: translate("Chat", "Creative"),
    }[preset]
