"""Sampling settings: the model's own, a preset, or custom values; and how much a model is to think."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Signal
from PySide6.QtGui import QIntValidator
from PySide6.QtWidgets import QGridLayout, QLabel, QLineEdit, QPushButton, QWidget

from app.services.kept import SavedPresets
from app.services.sampling_presets import Preset, own_sampling, preset_of, suggests_nothing
from app.theme import scaled
from app.widgets.fields import ComboBox, DoubleSpinBox, SpinBox
from app.widgets.flow_layout import Flow
from app.widgets.popover import Popover
from app.widgets.quantities import number
from app.widgets.scaffold import WrappedLabel, hbox, push_button, text_label
from engine.common.config import MOST_BREAKERS, SamplingParams, Thinking
from engine.common.model_info import ModelInfo

translate = QCoreApplication.translate

MOST_TOKENS = 1_000_000
ROWS = 7
WIDEST_PX = 520
TEXT_MARGINS = (10, 0, 0, 0)


class SamplingPopover(Popover):
    """Signals:
    changed: the `SamplingParams` after every edit; None if they are the model's own.
    default_chosen: what new chats are to begin with; None for the model's own.

    Args:
        saved: people's own presets; without them there is nothing to save or rename.
    """

    changed = Signal(object)
    default_chosen = Signal(object)

    def __init__(self, parent: QWidget, saved: SavedPresets | None = None) -> None:
        super().__init__(self.tr("Sampling"), parent)
        self._filling = False
        self._saved = saved
        self._default: SamplingParams | None = None
        self.own = own_sampling(None)
        self.own_button = self._segment(self.tr("Recommended"), lambda: self._choose(self.own))
        self.presets: dict[Preset, QPushButton] = {}
        for preset in Preset:
            self.presets[preset] = self._segment(preset_text(preset), partial(self._choose_preset, preset))
        self.saved_buttons: dict[str, QPushButton] = {}
        self._segments = Flow(self.own_button, *self.presets.values(), parent=self, gap=8)
        self._mine = Flow(parent=self, gap=8)
        self._mine.setMaximumWidth(scaled(WIDEST_PX))
        self.column.addWidget(self._segments)
        self.column.addWidget(self._mine)
        self._mine.hide()
        self._thinking: Thinking = "auto"
        self._explained: dict[QObject, tuple[str, str, QWidget]] = {}
        self._make_fields()
        self._lay_out_fields()
        self.explanation = WrappedLabel("", self)
        self.explanation.setProperty("role", "secondary")
        self.explanation.setMinimumHeight(2 * self.explanation.fontMetrics().lineSpacing())
        self.column.addWidget(self.explanation)
        self._make_keeping()
        self._describe_own()
        self._show_keeping()
        self.set_thinking(())
        if saved is not None:
            saved.changed.connect(self._show_saved)
            self._show_saved()

    # --- people's own presets ---

    def _make_keeping(self) -> None:
        self.save_button = self._small(self.tr("Save as…"), lambda: self._ask_name(""))
        self.rename_button = self._small(self.tr("Rename…"), lambda: self._ask_name(self._shown_name))
        self.delete_button = self._small(self.tr("Delete"), self._delete)
        self.default_button = self._small("", self._use_as_default)
        buttons = (self.save_button, self.rename_button, self.delete_button, self.default_button)
        self._keeping = Flow(*buttons, parent=self, gap=8, ends_right=True)
        self._naming = QWidget(self)
        self.name = QLineEdit(self)
        self.name.setPlaceholderText(self.tr("Name of the preset"))
        self.name.setAccessibleName(self.tr("Name of the preset"))
        self.name.returnPressed.connect(self._keep)
        self.keep_button = self._small(self.tr("Save"), self._keep)
        self.name.textChanged.connect(lambda text: self.keep_button.setEnabled(bool(text.strip())))
        hbox(self.name, self._small(self.tr("Cancel"), self._stop_naming), self.keep_button, into=self._naming)
        for part in (self._keeping, self._naming):
            self.column.addWidget(part)
        self._keeping.setVisible(self._saved is not None)
        self._naming.hide()
        self._renaming = ""

    def set_default(self, sampling: SamplingParams | None) -> None:
        """What new chats begin with; None is the model's own."""
        self._default = sampling
        self._show_keeping()

    def _show_saved(self) -> None:
        self._mine.clear()
        self.saved_buttons = {}
        for entry in self._saved.entries if self._saved is not None else ():
            button = self._segment(entry.name, partial(self._choose, entry.value))
            button.setToolTip(sampling_words(entry.value))
            self.saved_buttons[entry.name] = button
            self._mine.add(button)
            button.show()
        self._mine.setVisible(bool(self.saved_buttons))
        self._mine.updateGeometry()
        self._show_preset(self.sampling())

    @property
    def _shown_name(self) -> str:
        return self._saved_name(self.sampling())

    def _saved_name(self, sampling: SamplingParams) -> str:
        """What people call these settings; empty if they do not."""
        entries = self._saved.entries if self._saved is not None else ()
        return next((entry.name for entry in entries if _drawn(entry.value) == _drawn(sampling)), "")

    def _ask_name(self, renaming: str) -> None:
        self._renaming = renaming
        self.name.setText(renaming)
        self._keeping.hide()
        self._naming.show()
        self.keep_button.setEnabled(bool(renaming))
        self.name.setFocus()
        self.name.selectAll()

    def _stop_naming(self) -> None:
        self._naming.hide()
        self._keeping.setVisible(self._saved is not None)
        self.save_button.setFocus()

    def _keep(self) -> None:
        if self._saved is not None and self.name.text().strip():
            self._saved.put(self.name.text(), _drawn(self.sampling()), instead_of=self._renaming)
            self._stop_naming()

    def _delete(self) -> None:
        if self._saved is not None:
            self._saved.remove(self._shown_name)
            self.save_button.setFocus()

    def _use_as_default(self) -> None:
        sampling = self.sampling()
        self.default_chosen.emit(None if _drawn(sampling) == self.own else sampling)

    def _show_keeping(self) -> None:
        sampling = self.sampling()
        is_saved = bool(self._saved_name(sampling))
        self.rename_button.setVisible(is_saved)
        self.delete_button.setVisible(is_saved)
        is_default = _drawn(sampling) == (self.own if self._default is None else _drawn(self._default))
        words = self.tr("New chats begin with this") if is_default else self.tr("Use for new chats")
        self.default_button.setText(words)
        self.default_button.setEnabled(not is_default)

    def _small(self, text: str, do: Callable[[], object]) -> QPushButton:
        return push_button(self, text, lambda: do(), compact=True)

    # --- the model's own ---

    def set_model(self, model: ModelInfo | None) -> None:
        """The loaded model, whose own settings are shown if the former model's were."""
        self.set_own(own_sampling(model))
        self.set_thinking(model.thinking if model is not None else ())

    def set_thinking(self, choices: Sequence[Thinking]) -> None:
        """What the loaded model can be told about thinking; nothing is shown if it can be told nothing."""
        self.thinking.clear()
        for choice in ("auto", *choices):
            self.thinking.addItem(thinking_text(choice), choice)
        for widget in (self.thinking, self._thinking_label):
            widget.setVisible(bool(choices))
        self._show_thinking()

    def _show_thinking(self) -> None:
        # A chat may have been told how much to think by another model: this one thinks as it would then.
        wanted = (self._thinking, "on") if self._thinking in ("low", "medium", "high") else (self._thinking,)
        self.thinking.setCurrentIndex(max((0, *(self.thinking.findData(choice) for choice in wanted))))

    def _on_thinking(self) -> None:
        self._thinking = self.thinking.currentData()
        self._on_edited()

    def _make_fields(self) -> None:
        """In the order of the Tab key, which is that of `_lay_out_fields`."""
        self.thinking = ComboBox(self)
        self.thinking.activated.connect(self._on_thinking)
        self.temperature = self._decimal(0.0, 2.0, 0.1)
        self.top_k = self._whole(0, 10_000)
        self.top_k.setSpecialValueText(self.tr("off"))
        self.top_p = self._decimal(0.01, 1.0, 0.05)
        self.min_p = self._decimal(0.0, 0.99, 0.01)
        self.repetition_penalty = self._decimal(0.5, 2.0, 0.05)
        self.presence_penalty = self._decimal(-2.0, 2.0, 0.1)
        self.frequency_penalty = self._decimal(-2.0, 2.0, 0.1)
        self.dry_multiplier = self._decimal(0.0, 5.0, 0.1)
        self.dry_base = self._decimal(1.0, 4.0, 0.05)
        self.dry_allowed_length = self._whole(0, 100)
        self.dry_range = self._whole(-1, MOST_TOKENS)
        self.dry_range.setSpecialValueText(self.tr("answer"))
        self.max_tokens = self._whole(1, MOST_TOKENS)
        self.beams = self._whole(1, 16)
        self.seed = QLineEdit(self)
        self.seed.setPlaceholderText(self.tr("random"))
        self.seed.setValidator(QIntValidator(0, 2**31 - 1, self.seed))
        self.dry_breakers = QLineEdit(self)
        self.dry_breakers.setPlaceholderText(self.tr("none; separate with commas"))
        self.stop = QLineEdit(self)
        self.stop.setPlaceholderText(self.tr("none; separate with commas"))
        for line_edit in (self.seed, self.stop, self.dry_breakers):
            line_edit.textEdited.connect(self._on_edited)

    def _lay_out_fields(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(6)
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
            (
                self.tr("Presence penalty"),
                self.presence_penalty,
                self.tr("Makes every token that the answer has already less likely, once; 0 is off"),
            ),
            (
                self.tr("Frequency penalty"),
                self.frequency_penalty,
                self.tr("Makes tokens less likely with each time that the answer has them already; 0 is off"),
            ),
            (
                self.tr("Loop guard"),
                self.dry_multiplier,
                self.tr("Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual"),
            ),
            (
                self.tr("Guard: growth"),
                self.dry_base,
                self.tr("How much stronger the loop guard gets with each repeated token"),
            ),
            (
                self.tr("Guard: length"),
                self.dry_allowed_length,
                self.tr("Repetitions shorter than this many tokens are free"),
            ),
            (
                self.tr("Guard: range"),
                self.dry_range,
                self.tr(
                    "How many of the last tokens, earlier messages included, are searched; by default only the answer"
                ),
            ),
            (self.tr("Max tokens"), self.max_tokens, self.tr("Answers stop at this length")),
            (
                self.tr("Beams"),
                self.beams,
                self.tr("Beam search if above 1; ignores temperature, top-k, top-p and min-p"),
            ),
            (self.tr("Seed"), self.seed, self.tr("The same seed gives the same answer to the same chat")),
        )
        self._thinking_label = self._label(
            self.tr("Thinking"),
            self.thinking,
            self.tr("Whether the model reasons before it answers; its thoughts count as tokens of the answer"),
            grid,
            0,
            0,
            3,
        )
        field: QWidget
        for place, (name, field, tip) in enumerate(rows):
            at_row, at_column = 1 + place % ROWS, place // ROWS * 2
            self._label(name, field, tip, grid, at_row, at_column)
            field.setFixedWidth(112)
        self._label(
            self.tr("Guard: ends at"),
            self.dry_breakers,
            self.tr("Repetitions are not followed across these texts; \\n is a line break"),
            grid,
            ROWS + 1,
            0,
            3,
        )
        self._label(
            self.tr("Stop strings"),
            self.stop,
            self.tr("An answer ends before the first of these"),
            grid,
            ROWS + 2,
            0,
            3,
        )
        self.column.addLayout(grid)

    def edit(self, sampling: SamplingParams | None, button: QWidget) -> None:
        """Open with these settings; None means the model's own."""
        self.fill(sampling or self.own)
        self.open_at(button)
        self.temperature.setFocus()

    def set_own(self, own: SamplingParams) -> None:
        """What a model's own settings are; they are shown if the former ones were."""
        showed_own, is_new = _drawn(self.sampling()) == self.own, own != self.own
        self.own = own
        self._describe_own()
        if showed_own and is_new:  # or typing 0.35 past the model's own 0.3 would end there
            self.fill(replace(own, thinking=self._thinking))

    def _describe_own(self) -> None:
        suggests_none = suggests_nothing(self.own)
        text = (
            self.tr("The model suggests nothing: {0}")
            if suggests_none
            else self.tr("As the model's makers suggest: {0}")
        )
        self.own_button.setToolTip(text.format(sampling_words(self.own)))
        self.own_button.setAccessibleDescription(self.own_button.toolTip())
        self._explain(None)

    def _explain(self, what: QObject | None) -> None:
        """In a sentence, what a field does, and what the model's makers suggest for it."""
        if what not in self._explained:
            words = self.own_button.toolTip()
        else:
            name, tip, field = self._explained[what]
            own = self._own_of(field)
            words = self.tr("{0}: {1}.").format(name, tip)
            if own:
                suggested = self.tr("Recommended: {0}.").format(own)
                words = f"{words} {suggested}"
        self.explanation.setText(words)

    def _own_of(self, field: QWidget) -> str:
        """The model's own value of a field, as it would stand there; empty where there is none."""
        name = next((name for name, value in vars(self).items() if value is field), "")
        value = getattr(self.own, name, None)
        if isinstance(field, DoubleSpinBox) and isinstance(value, float):
            return field.textFromValue(value)
        if isinstance(field, SpinBox) and isinstance(value, int):
            return field.specialValueText() if value == field.minimum() and field.specialValueText() else str(value)
        return ""

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Enter, QEvent.Type.FocusIn) and watched in self._explained:
            self._explain(watched)
        return super().eventFilter(watched, event)

    def words_of(self, sampling: SamplingParams | None) -> str:
        """What these settings are; None means the model's own."""
        return sampling_words(self.own if sampling is None else sampling)

    def name_of(self, sampling: SamplingParams | None) -> str:
        """A short name of these settings; None means the model's own."""
        if sampling is None or _drawn(sampling) == self.own:
            return self.own_button.text()
        return self._saved_name(sampling) or preset_text(preset_of(_drawn(sampling), self.own))

    def without_beams(self) -> None:
        """Hide beam search where it is not available."""
        self.beams.hide()
        for label in self.findChildren(QLabel):
            if label.buddy() is self.beams:
                label.hide()

    def fill(self, sampling: SamplingParams) -> None:
        """Show these settings."""
        self._filling = True
        self._thinking = sampling.thinking
        self._show_thinking()
        self.temperature.setValue(sampling.temperature)
        self.top_k.setValue(sampling.top_k)
        self.top_p.setValue(sampling.top_p)
        self.min_p.setValue(sampling.min_p)
        self.repetition_penalty.setValue(sampling.repetition_penalty)
        self.max_tokens.setValue(sampling.max_tokens)
        self.beams.setValue(sampling.beams)
        self.presence_penalty.setValue(sampling.presence_penalty)
        self.frequency_penalty.setValue(sampling.frequency_penalty)
        self.seed.setText("" if sampling.seed is None else str(sampling.seed))
        self.stop.setText(_joined(sampling.stop))
        self.dry_multiplier.setValue(sampling.dry_multiplier)
        self.dry_base.setValue(sampling.dry_base)
        self.dry_allowed_length.setValue(sampling.dry_allowed_length)
        self.dry_range.setValue(sampling.dry_range)
        self.dry_breakers.setText(_joined(sampling.dry_breakers))
        self._filling = False
        self._show_preset(sampling)

    def sampling(self) -> SamplingParams:
        """The settings as entered."""
        return SamplingParams(
            temperature=round(self.temperature.value(), 4),
            top_k=self.top_k.value(),
            top_p=round(self.top_p.value(), 4),
            min_p=round(self.min_p.value(), 4),
            repetition_penalty=round(self.repetition_penalty.value(), 4),
            seed=int(self.seed.text()) if self.seed.text() else None,
            stop=_split(self.stop.text()),
            max_tokens=self.max_tokens.value(),
            beams=self.beams.value(),
            dry_multiplier=round(self.dry_multiplier.value(), 4),
            dry_base=round(self.dry_base.value(), 4),
            dry_allowed_length=self.dry_allowed_length.value(),
            dry_range=self.dry_range.value(),
            dry_breakers=_split(self.dry_breakers.text())[:MOST_BREAKERS],
            presence_penalty=round(self.presence_penalty.value(), 4),
            frequency_penalty=round(self.frequency_penalty.value(), 4),
            thinking=self._thinking,
        )

    def _choose_preset(self, preset: Preset) -> None:
        self._choose(preset.beside(self.own))

    def _choose(self, sampling: SamplingParams) -> None:
        sampling = replace(sampling, thinking=self._thinking)
        self.fill(sampling)
        self.changed.emit(None if sampling == self.own else sampling)

    def _on_edited(self) -> None:
        if not self._filling:
            sampling = self.sampling()
            self._show_preset(sampling)
            self.changed.emit(None if sampling == self.own else sampling)

    def _show_preset(self, sampling: SamplingParams) -> None:
        is_own = _drawn(sampling) == self.own
        self.own_button.setChecked(is_own)
        now = None if is_own else preset_of(_drawn(sampling), self.own)
        for preset, button in self.presets.items():
            button.setChecked(preset is now)
        name = "" if is_own or now is not None else self._saved_name(sampling)
        for saved, button in self.saved_buttons.items():
            button.setChecked(saved == name)
        self._show_keeping()
        for field in (self.dry_base, self.dry_allowed_length, self.dry_range, self.dry_breakers):
            field.setEnabled(sampling.dry_multiplier > 0)

    def _segment(self, text: str, choose: Callable[[], None]) -> QPushButton:
        return push_button(self, text, lambda _on: choose(), kind="segment", checkable=True)

    def _label(
        self, name: str, field: QWidget, tip: str, grid: QGridLayout, row: int, column: int, span: int = 1
    ) -> QLabel:
        label = text_label(self, name, role="secondary", buddy=field)
        for what in (label, field):
            self._explained[what] = (name, tip, field)
            what.installEventFilter(self)
        field.setAccessibleName(name)
        field.setAccessibleDescription(tip)
        grid.addWidget(label, row, column)
        grid.addWidget(field, row, column + 1, 1, span)
        return label

    def _decimal(self, least: float, most: float, step: float) -> DoubleSpinBox:
        box = DoubleSpinBox(self)
        box.setRange(least, most)
        box.setSingleStep(step)
        box.setDecimals(2)
        box.lineEdit().setTextMargins(*TEXT_MARGINS)
        box.valueChanged.connect(self._on_edited)
        return box

    def _whole(self, least: int, most: int) -> SpinBox:
        box = SpinBox(self)
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


def thinking_text(thinking: Thinking) -> str:
    """How much a model is to think, in words."""
    return {
        "auto": translate("Chat", "As the model does"),
        "off": translate("Chat", "Off"),
        "on": translate("Chat", "On"),
        "low": translate("Chat", "Low"),
        "medium": translate("Chat", "Medium"),
        "high": translate("Chat", "High"),
    }[thinking]


def _drawn(sampling: SamplingParams) -> SamplingParams:
    """How tokens are drawn: all but thinking, which presets leave as it is."""
    return replace(sampling, thinking="auto")


def sampling_words(sampling: SamplingParams) -> str:
    """What settings say but for their limits: `temperature 0.3, min-p 0.1, loop guard 0.8`."""
    draws: list[tuple[str, float, bool]]
    if sampling.beams > 1:
        draws = [(translate("Chat", "{0} beams"), sampling.beams, True)]
    elif sampling.temperature == 0:
        draws = [(translate("Chat", "always the likeliest token"), 0, True)]
    else:
        draws = [
            (translate("Chat", "temperature {0}"), sampling.temperature, True),
            (translate("Chat", "top-k {0}"), sampling.top_k, sampling.top_k > 0),
            (translate("Chat", "top-p {0}"), sampling.top_p, sampling.top_p < 1),
            (translate("Chat", "min-p {0}"), sampling.min_p, sampling.min_p > 0),
        ]
    penalties = [
        (translate("Chat", "repetition penalty {0}"), sampling.repetition_penalty, sampling.repetition_penalty != 1),
        (translate("Chat", "presence penalty {0}"), sampling.presence_penalty, sampling.presence_penalty != 0),
        (translate("Chat", "frequency penalty {0}"), sampling.frequency_penalty, sampling.frequency_penalty != 0),
        (translate("Chat", "loop guard {0}"), sampling.dry_multiplier, sampling.uses_dry),
    ]
    words = [text.format(_short(value)) for text, value, counts in (*draws, *penalties) if counts]
    if sampling.thinking != "auto":
        words.append(translate("Chat", "thinking {0}").format(thinking_text(sampling.thinking).lower()))
    return ", ".join(words)


def _short(value: float) -> str:
    """With as many decimals as it has, at most two."""
    return number(value, next(decimals for decimals in range(3) if round(value, decimals) == round(value, 2)))


def _joined(texts: Iterable[str]) -> str:
    """Texts as one line, separated with commas; those within them get a backslash."""
    return ", ".join(text.replace("\n", "\\n").replace(",", "\\,") for text in texts)


def _split(line: str) -> tuple[str, ...]:
    """The texts of `_joined`; empty ones are left out."""
    texts = (text.strip().replace("\\,", ",").replace("\\n", "\n") for text in re.split(r"(?<!\\),", line))
    return tuple(text for text in texts if text)
