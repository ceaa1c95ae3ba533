"""The controls of settings, each made from its entry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from PySide6.QtCore import QCoreApplication, QObject, QSignalBlocker, Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QCheckBox, QLineEdit, QWidget

from app.services.settings import Settings
from app.widgets.fields import ComboBox, DoubleSpinBox, Slider, SpinBox
from app.widgets.quantities import duration, file_size, memory
from app.widgets.scaffold import hbox, line_edit, push_button, text_label
from engine.common.schema import Choice, Number, Setting, Size, Switch, Text, Texts

COMBO_WIDTH_PX, SLIDER_WIDTH_PX, NUMBER_WIDTH_PX = 240, 180, 148
SHARES = 32
"""Steps of a memory's slider; the last one takes all that is free."""
DECIMALS = 2
_SEGMENTS_CHARACTERS = 20
"""Names of a choice that have room beside one another."""
_MOST = 2**31 - 1

translate = QCoreApplication.translate


def setting_words(text: str) -> str:
    return translate("Setting", text) if text else ""


class SettingValues(QObject):
    """Values of settings that are in no file, such as a chat's sampling.

    Signals: `changed(str)`: the key of a setting that was given another value.
    """

    changed = Signal(str)

    def __init__(self, values: Mapping[str, Any], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.values = dict(values)

    def value(self, setting: Setting[Any]) -> Any:
        return self.values[setting.key]

    def set(self, key: str, value: Any) -> None:
        if self.values[key] != value:
            self.values[key] = value
            self.changed.emit(key)


class SettingControls(QObject):
    def __init__(self, holder: Settings | SettingValues, parent: QWidget) -> None:
        super().__init__(parent)
        self.holder, self.around = holder, parent
        self.made: dict[str, QWidget] = {}
        self._shows: dict[str, Callable[[], None]] = {}
        holder.changed.connect(self._on_changed)

    def make(self, setting: Setting[Any], names: Mapping[str, str] | None = None) -> tuple[QWidget, ...]:
        """The control of a setting's kind, perhaps with what stands beside it."""
        made = _CONTROLS[type(setting.kind)](setting, self, names or {})
        self.made[setting.key] = made[0]
        return made

    def follow(self, widget: QWidget, setting: Setting[Any], show: Callable[[Any], object]) -> None:
        """Shows a setting's value, now and whenever it changes."""

        def show_quietly() -> None:
            with QSignalBlocker(widget):
                show(self.holder.value(setting))

        self._shows[setting.key] = show_quietly
        show_quietly()

    def set(self, key: str, value: Any) -> None:
        self.holder.set(key, value)

    def _on_changed(self, key: str) -> None:
        if key in self._shows:
            self._shows[key]()


# --- one of each kind -------------------------------------------------------------------------------

_Names = Mapping[str, str]


def _switch(setting: Setting[Any], to: SettingControls, _names: _Names) -> tuple[QWidget, ...]:
    box = QCheckBox(to.around)
    to.follow(box, setting, box.setChecked)
    box.toggled.connect(lambda on: to.set(setting.key, on))
    return (box,)


def _choice(setting: Setting[Any], to: SettingControls, names: _Names) -> tuple[QWidget, ...]:
    kind = setting.kind
    assert isinstance(kind, Choice)
    named = {value: names.get(value) or setting_words(kind.names.get(value, "")) or value for value in kind.values}
    if len(named) <= 3 and sum(len(kind.names.get(value, value)) for value in named) <= _SEGMENTS_CHARACTERS:
        return (_segments(setting, to, named),)
    box = ComboBox(to.around)
    box.setMinimumWidth(COMBO_WIDTH_PX)
    box.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)
    for value, name in named.items():
        box.addItem(name, value)

    def show(value: str) -> None:
        if box.findData(value) < 0:
            box.addItem(value, value)
        box.setCurrentIndex(box.findData(value))

    to.follow(box, setting, show)
    box.activated.connect(lambda _at: to.set(setting.key, box.currentData()))
    return (box,)


def _segments(setting: Setting[Any], to: SettingControls, named: _Names) -> QWidget:
    row = QWidget(to.around)
    group = QButtonGroup(row)
    buttons = {
        value: push_button(row, name, kind="segment", checkable=True, name=f"{setting_words(setting.name)}: {name}")
        for value, name in named.items()
    }
    hbox(*buttons.values(), into=row, gap=6)
    to.follow(row, setting, lambda value: buttons[value].setChecked(True))
    for value, button in buttons.items():
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        group.addButton(button)
        button.toggled.connect(lambda on, chosen=value: to.set(setting.key, chosen) if on else None)
    return row


def _number(setting: Setting[Any], to: SettingControls, _names: _Names) -> tuple[QWidget, ...]:
    kind = setting.kind
    assert isinstance(kind, Number)
    if kind.common:
        return (_usual(setting, kind, to),)
    if kind.unit == "px":
        return _pixels(setting, kind, to)
    is_open, finest = setting.default is None, 10**-DECIMALS
    box: SpinBox | DoubleSpinBox
    if kind.whole:
        box, most = SpinBox(to.around), int(min(kind.most, _MOST))
        box.setRange(int(kind.least) - is_open, (os.cpu_count() or 1) if setting.key == "threads" else most)
    else:
        box, least = DoubleSpinBox(to.around), kind.least if round(kind.least, DECIMALS) == kind.least else finest
        box.setRange(least, kind.most - finest if kind.below else kind.most)
        box.setDecimals(DECIMALS)
        box.setSingleStep(kind.step)
    box.setKeyboardTracking(False)
    box.setFixedWidth(NUMBER_WIDTH_PX)
    box.lineEdit().setTextMargins(8, 0, 0, 0)
    box.setSpecialValueText(setting_words(kind.special or ("Automatic" if is_open else "")))

    def show(value: float | None) -> None:
        wanted: Any = box.minimum() if value is None else min(value, box.maximum())
        if box.value() != wanted:  # else it would write over what is being typed
            box.setValue(wanted)

    def take(value: float) -> None:
        to.set(setting.key, None if value < kind.least else value if kind.whole else round(value, 4))

    to.follow(box, setting, show)
    box.valueChanged.connect(take)
    return (box,)


def _usual(setting: Setting[Any], kind: Number, to: SettingControls) -> QWidget:
    box = ComboBox(to.around)
    box.setMinimumWidth(COMBO_WIDTH_PX)
    box.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)

    def show(chosen: int) -> None:
        box.clear()
        for value in sorted({*kind.common, chosen}, key=lambda each: (each == 0, each)):
            said = file_size(value) if kind.unit == "bytes" else duration(60 * value)
            box.addItem(said if value else setting_words(kind.special), value)
        box.setCurrentIndex(box.findData(chosen))

    to.follow(box, setting, show)
    box.activated.connect(lambda _at: to.set(setting.key, box.currentData()))
    return box


def _pixels(setting: Setting[Any], kind: Number, to: SettingControls) -> tuple[QWidget, ...]:
    slider, figure = Slider(to.around), text_label(to.around, role="secondary", tabular=True)
    slider.setRange(int(kind.least), int(kind.most))
    slider.setPageStep(1)
    slider.setFixedWidth(SLIDER_WIDTH_PX)

    def say(value: int) -> None:
        figure.setText(translate("SettingsCard", "{0} px").format(value))
        if not slider.isSliderDown():  # a new text size would resize the slider under the pointer
            to.set(setting.key, slider.value())

    to.follow(slider, setting, slider.setValue)
    slider.valueChanged.connect(say)
    slider.sliderReleased.connect(lambda: to.set(setting.key, slider.value()))
    say(slider.value())
    return slider, figure


class Budget(Slider):
    """How much of a memory may be used, once it is known how much there is."""

    def __init__(self, setting: Setting[Any], to: SettingControls) -> None:
        super().__init__(to.around)
        self._setting, self._to, self._total = setting, to, 0
        self.figure = text_label(to.around, role="secondary", tabular=True)
        self.figure.setMinimumWidth(self.fontMetrics().averageCharWidth() * 15)
        self.setRange(1, SHARES)
        self.setPageStep(1)
        self.setFixedWidth(SLIDER_WIDTH_PX)
        self.set_total(0)
        to.follow(self, setting, lambda _value: self._show())
        self.valueChanged.connect(self._set)

    def set_total(self, nbytes: int) -> None:
        self._total = nbytes
        self.setEnabled(bool(nbytes))
        with QSignalBlocker(self):
            self._show()

    def _show(self) -> None:
        budget: int | None = self._to.holder.value(self._setting)
        has_all = budget is None or not self._total
        self.setValue(SHARES if has_all else max(1, min(SHARES, round(SHARES * (budget or 0) / self._total))))
        free = translate("SettingsCard", "all that is free")
        words = free if budget is None else translate("SettingsCard", "at most {0}").format(memory(budget))
        self.figure.setText(words)
        self.setAccessibleDescription(words)

    def _set(self, share: int) -> None:
        self._to.set(self._setting.key, None if share == SHARES else self._total * share // SHARES)


def _text(setting: Setting[Any], to: SettingControls, _names: _Names) -> tuple[QWidget, ...]:
    field = QLineEdit(to.around)
    field.setFixedWidth(COMBO_WIDTH_PX)
    to.follow(field, setting, field.setText)
    field.editingFinished.connect(lambda: to.set(setting.key, field.text()))
    return (field,)


def _budget(setting: Setting[Any], to: SettingControls, _names: _Names) -> tuple[QWidget, ...]:
    slider = Budget(setting, to)
    return slider, slider.figure


def _texts(setting: Setting[Any], to: SettingControls, _names: _Names) -> tuple[QWidget, ...]:
    field = line_edit(to.around, "", hint=translate("SettingsCard", "none; separate with commas"))

    def show(texts: tuple[str, ...]) -> None:
        if split_texts(field.text()) != texts:
            field.setText(joined_texts(texts))

    to.follow(field, setting, show)
    field.textChanged.connect(lambda line: to.set(setting.key, split_texts(line)))
    return (field,)


def joined_texts(texts: Iterable[str]) -> str:
    return ", ".join(text.replace("\n", "\\n").replace(",", "\\,") for text in texts)


def split_texts(line: str) -> tuple[str, ...]:
    texts = (text.strip().replace("\\,", ",").replace("\\n", "\n") for text in re.split(r"(?<!\\),", line))
    return tuple(text for text in texts if text)


_CONTROLS: Mapping[type, Callable[[Setting[Any], SettingControls, _Names], tuple[QWidget, ...]]] = {
    Switch: _switch,
    Choice: _choice,
    Number: _number,
    Size: _budget,
    Text: _text,
    Texts: _texts,
}
