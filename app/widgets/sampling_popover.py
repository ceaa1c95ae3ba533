"""Sampling settings: the model's own, a preset, or custom values; and how much a model is to think."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Signal
from PySide6.QtWidgets import QAbstractSpinBox, QGridLayout, QLabel, QPushButton, QWidget

from app.services.kept import Preset, SavedPresets, own_sampling, preset_of, suggests_nothing
from app.theme import scaled
from app.widgets.fields import ComboBox, DoubleSpinBox, SpinBox
from app.widgets.flow_layout import Flow
from app.widgets.page import GAP, Popover
from app.widgets.quantities import number
from app.widgets.scaffold import WrappedLabel, add_items, hbox, line_edit, push_button, text_label
from app.widgets.setting_controls import SettingControls, SettingValues, setting_words
from engine.common.config import MOST_BREAKERS, SamplingParams, Thinking
from engine.common.model_info import ModelInfo
from engine.common.schema import Choice, Number, Setting, settings_of

translate = QCoreApplication.translate

WIDEST_PX = 520
FIELD_WIDTH_PX = 112


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
        add_items(self.column, self._segments, self._mine)
        self._mine.hide()
        self._explained: dict[QObject, Setting[Any]] = {}
        self.values = SettingValues({each.key: each.default for each in settings_of(SamplingParams)}, self)
        self._make_fields()
        self.explanation = WrappedLabel("", self, role="secondary")
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
        self.name = line_edit(self, self.tr("Name of the preset"), hints=True)
        self.name.returnPressed.connect(self._keep)
        self.keep_button = self._small(self.tr("Save"), self._keep)
        self.name.textChanged.connect(lambda text: self.keep_button.setEnabled(bool(text.strip())))
        hbox(self.name, self._small(self.tr("Cancel"), self._stop_naming), self.keep_button, into=self._naming)
        add_items(self.column, self._keeping, self._naming)
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
        self.set_own(own_sampling(model))
        self.set_thinking(model.thinking if model is not None else ())

    def set_thinking(self, choices: Sequence[Thinking]) -> None:
        self.thinking.clear()
        for choice in ("auto", *choices):
            self.thinking.addItem(thinking_text(choice), choice)
        self._show_row("thinking", shown=bool(choices))
        self._show_thinking()

    def _show_thinking(self) -> None:
        # A chat may have been told how much to think by another model: this one thinks as it would then.
        told = self.values.values["thinking"]
        wanted = (told, "on") if told in ("low", "medium", "high") else (told,)
        self.thinking.setCurrentIndex(max((0, *(self.thinking.findData(choice) for choice in wanted))))

    def _make_fields(self) -> None:
        controls = SettingControls(self.values, self)
        self.fields = controls.made
        self._labels: dict[str, QLabel] = {}
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(6)
        self._columns = 0
        entries = settings_of(SamplingParams)
        self._numbers = [each.key for each in entries if isinstance(each.kind, Number)]
        self._wide = [each.key for each in entries if each.key not in (*self._numbers, "thinking")]
        self.thinking = ComboBox(self)
        self.thinking.activated.connect(lambda _at: self.values.set("thinking", self.thinking.currentData()))
        for setting in sorted(entries, key=lambda each: each.key != "thinking"):  # in the order of the Tab key
            field = self.thinking if setting.key == "thinking" else controls.make(setting)[0]
            controls.made[setting.key] = field
            label = self._labels[setting.key] = text_label(
                self, setting_words(setting.name), role="secondary", buddy=field
            )
            if isinstance(field, QAbstractSpinBox):
                field.setKeyboardTracking(True)
                field.setFixedWidth(scaled(FIELD_WIDTH_PX))
            for what in (label, field):
                self._explained[what] = setting
                what.installEventFilter(self)
            field.setAccessibleName(setting_words(setting.name))
            field.setAccessibleDescription(setting_words(setting.help))
        self.values.changed.connect(self._on_edited)
        self._arrange(2)
        self.column.addLayout(self._grid)

    def _arrange(self, columns: int) -> None:
        if columns == self._columns:
            return
        self._columns, rows = columns, -(-len(self._numbers) // columns)
        places = {key: (1 + at % rows, at // rows * 2, 1) for at, key in enumerate(self._numbers)}
        places["thinking"] = (0, 0, 2 * columns - 1)
        places |= {key: (1 + rows + at, 0, 2 * columns - 1) for at, key in enumerate(self._wide)}
        for key, (row, column, span) in places.items():
            self._grid.addWidget(self._labels[key], row, column)
            self._grid.addWidget(self.fields[key], row, column + 1, 1, span)

    def _place(self) -> None:
        page = self.parentWidget()
        if page is not None:
            width = scaled(FIELD_WIDTH_PX)  # the text may have another size since it was last open
            for key in self._numbers:
                self.fields[key].setFixedWidth(width)
            half = -(-len(self._numbers) // 2)
            columns = (self._numbers[:half], self._numbers[half:])
            names = sum(max(self._labels[key].sizeHint().width() for key in column) for column in columns)
            wanted = names + 2 * width + 3 * self._grid.horizontalSpacing() + 4 * GAP
            room = page.width() - 2 * GAP - self._scroll.verticalScrollBar().sizeHint().width() - 2
            self._arrange(2 if wanted <= room else 1)
        super()._place()

    def _show_row(self, key: str, *, shown: bool) -> None:
        for widget in (self._labels[key], self.fields[key]):
            widget.setVisible(shown)

    def edit(self, sampling: SamplingParams | None, button: QWidget) -> None:
        self.fill(sampling or self.own)
        self.open_at(button)
        self.fields["temperature"].setFocus()

    def set_own(self, own: SamplingParams) -> None:
        showed_own, is_new = _drawn(self.sampling()) == self.own, own != self.own
        self.own = own
        self._describe_own()
        if showed_own and is_new:  # or typing 0.35 past the model's own 0.3 would end there
            self.fill(replace(own, thinking=self.values.values["thinking"]))

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
        setting = self._explained.get(what) if what is not None else None
        words = self.own_button.toolTip()
        if setting is not None:
            words = self.tr("{0}: {1}.").format(setting_words(setting.name), setting_words(setting.help))
            own = self._own_of(setting)
            words += " " + self.tr("Recommended: {0}.").format(own) if own else ""
        self.explanation.setText(words)

    def _own_of(self, setting: Setting[Any]) -> str:
        """The model's own value of a setting, as it would stand in its field; empty where there is none."""
        field, value = self.fields[setting.key], getattr(self.own, setting.key)
        if isinstance(field, DoubleSpinBox):
            return field.textFromValue(value)
        if isinstance(field, SpinBox) and value is not None:
            return field.specialValueText() if value == field.minimum() and field.specialValueText() else str(value)
        return ""

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Enter, QEvent.Type.FocusIn) and watched in self._explained:
            self._explain(watched)
        return super().eventFilter(watched, event)

    def words_of(self, sampling: SamplingParams | None) -> str:
        return sampling_words(self.own if sampling is None else sampling)

    def name_of(self, sampling: SamplingParams | None) -> str:
        if sampling is None or _drawn(sampling) == self.own:
            return self.own_button.text()
        return self._saved_name(sampling) or preset_text(preset_of(_drawn(sampling), self.own))

    def without_beams(self) -> None:
        self._show_row("beams", shown=False)

    def fill(self, sampling: SamplingParams) -> None:
        self._filling = True
        for key in self.values.values:
            self.values.set(key, getattr(sampling, key))
        self._filling = False
        self._show_thinking()
        self._show_preset(sampling)

    def sampling(self) -> SamplingParams:
        sampling = SamplingParams(**self.values.values)
        return replace(sampling, dry_breakers=sampling.dry_breakers[:MOST_BREAKERS])

    def _choose_preset(self, preset: Preset) -> None:
        self._choose(preset.beside(self.own))

    def _choose(self, sampling: SamplingParams) -> None:
        sampling = replace(sampling, thinking=self.values.values["thinking"])
        self.fill(sampling)
        self.changed.emit(None if sampling == self.own else sampling)

    def _on_edited(self, key: str) -> None:
        if not self._filling:
            if key == "thinking":
                self._show_thinking()
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
        for key, field in self.fields.items():
            if key.startswith("dry_") and key != "dry_multiplier":
                field.setEnabled(sampling.dry_multiplier > 0)

    def _segment(self, text: str, choose: Callable[[], None]) -> QPushButton:
        return push_button(self, text, lambda _on: choose(), kind="segment", checkable=True)


def preset_text(preset: Preset | None) -> str:
    if preset is None:
        return translate("Chat", "Custom")
    return {
        Preset.PRECISE: translate("Chat", "Precise"),
        Preset.BALANCED: translate("Chat", "Balanced"),
        Preset.CREATIVE: translate("Chat", "Creative"),
    }[preset]


def thinking_text(thinking: Thinking) -> str:
    kind = next(each.kind for each in settings_of(SamplingParams) if each.key == "thinking")
    assert isinstance(kind, Choice)
    return setting_words(kind.names[thinking])


def _drawn(sampling: SamplingParams) -> SamplingParams:
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
    return number(value, next(decimals for decimals in range(3) if round(value, decimals) == round(value, 2)))
