"""A settings card: a heading, then rows of a name, its explanation and a control.

The rows of what people set come from the entries of `engine.common.settings` and `engine.common.config`: each kind of
setting has its control here, and follows changes that are made elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QFrame,
    QLabel,
    QLineEdit,
    QPushButton,
    QWidget,
)

from app.services.settings import Settings
from app.theme import use_tabular_figures
from app.widgets.fields import ComboBox, Slider, SpinBox
from app.widgets.quantities import duration, memory
from app.widgets.scaffold import STRETCH, hbox, muted_label, push_button, text_label, vbox
from engine.common.schema import Choice, Number, Setting, Size, Switch, Text
from engine.common.settings import kept_settings

COMBO_WIDTH_PX, SLIDER_WIDTH_PX, NUMBER_WIDTH_PX = 240, 180, 148
SHARES = 32
"""Steps of a memory's slider; the last one takes all that is free."""
_SEGMENTS_CHARACTERS = 20
"""Names of a choice that have room beside one another."""

translate = QCoreApplication.translate


def setting_words(text: str) -> str:
    """A text of a setting's entry in the window's language."""
    return translate("Setting", text) if text else ""


class SettingsCard(QFrame):
    """Rows are added top to bottom, which is also their tab order.

    Args:
        heading: of the card; none in a card within another one.
        folded: its rows are shown once people want them.
    """

    def __init__(self, heading: str = "", parent: QWidget | None = None, *, folded: bool = False) -> None:
        super().__init__(parent)
        self.setProperty("card", "true" if heading else "false")
        self.setAccessibleName(heading)
        self.controls: dict[str, QWidget] = {}
        """Of its settings, by key."""
        self._rows: list[Row] = []
        self._shows: dict[str, Callable[[], None]] = {}
        self._column = vbox(into=self, margins=(20, 16, 20, 18) if heading else (0, 0, 0, 0), gap=16)
        self.heading = heading
        self.unfold: QPushButton | None = None
        if heading:
            title = text_label(self, heading, role="heading")
            head = hbox((title, 1), gap=-1)
            if folded:
                self.unfold = push_button(self, checkable=True)
                self.unfold.toggled.connect(self._show_body)
                head.addWidget(self.unfold)
                self._show_body(shown=False)
            self._column.addLayout(head)

    def _show_body(self, shown: bool) -> None:
        assert self.unfold is not None
        for row in self._rows:
            row.setVisible(shown)
        self.unfold.setText(self.tr("Hide") if shown else self.tr("Show"))
        self.unfold.setAccessibleName(f"{self.unfold.text()}: {self.heading}")

    def add_row(self, name: str, explanation: str, *controls: QWidget) -> QLabel:
        """Adds a row; returns the label of its explanation."""
        return self._add(Row(name, explanation, controls, self)).words

    def add_setting(
        self,
        setting: Setting[Any],
        settings: Settings,
        *beside: QWidget,
        names: Mapping[str, str] | None = None,
        field: QWidget | None = None,
    ) -> QLabel:
        """Adds the row of a setting; returns the label of its explanation.

        Args:
            beside: further controls.
            names: of values, beyond those of its entry.
            field: its control, where it is not that of its kind.
        """
        made = (field,) if field is not None else _CONTROLS[type(setting.kind)](setting, settings, names or {}, self)
        self.controls[setting.key] = made[0]
        costs = {"now": "", "load": self.tr("Needs a reload."), "start": self.tr("Needs a restart.")}
        explained = f"{setting_words(setting.help)} {costs[setting.applies]}".strip()
        row = Row(setting_words(setting.name), explained, (*made, *beside), self)
        row.hidden_words = f"{setting.key} {setting.option}"
        return self._add(row).words

    def add_settings(self, card: str, settings: Settings) -> None:
        """Adds the row of each setting of this card that has none yet."""
        for setting in settings_on(card):
            if setting.key not in self.controls:
                self.add_setting(setting, settings)

    def follow(self, widget: QWidget, setting: Setting[Any], settings: Settings, show: Callable[[Any], None]) -> None:
        """Shows a setting's value, now and whenever it changes."""
        if not self._shows:
            settings.changed.connect(self._on_changed)

        def show_quietly() -> None:
            was = widget.blockSignals(True)
            show(settings.value(setting))
            widget.blockSignals(was)

        self._shows[setting.key] = show_quietly
        show_quietly()

    def _on_changed(self, key: str) -> None:
        if key in self._shows:
            self._shows[key]()

    def add_wide(self, widget: QWidget) -> None:
        """Adds a widget as wide as the card."""
        self._column.addWidget(widget)

    def show_found(self, wanted: str) -> bool:
        """Shows only the rows with these words; whether there are any.  Without words it is as it was."""
        words = wanted.casefold().split()
        is_meant = bool(self.heading) and all(word in self.heading.casefold() for word in words)
        inside = [card.show_found(wanted) for card in self.findChildren(SettingsCard)]
        found = [is_meant or row.has(words) for row in self._rows]
        is_folded = self.unfold is not None and not self.unfold.isChecked() and not words
        for row, shown in zip(self._rows, found, strict=True):
            row.setVisible(shown and not is_folded)
        if self.unfold is not None:
            self.unfold.setVisible(not words)
        return any(found) or any(inside)

    def _add(self, row: Row) -> Row:
        self._rows.append(row)
        self._column.addWidget(row)
        row.setHidden(self.unfold is not None and not self.unfold.isChecked())
        return row


class Row(QWidget):
    """A name, its explanation, and controls to the right."""

    def __init__(self, name: str, explanation: str, controls: Sequence[QWidget], parent: QWidget) -> None:
        super().__init__(parent)
        self.hidden_words = ""
        self._name = text_label(self, name, wrap=True)
        self.words = muted_label(self, explanation)  # has no minimum width, however long a path it shows
        self._name.setVisible(bool(name))
        self.words.setVisible(bool(explanation))
        row = hbox((vbox(STRETCH, self._name, self.words, STRETCH, gap=2), 1), 16, into=self)
        for control in controls:
            row.addWidget(control, 0, Qt.AlignmentFlag.AlignVCenter)
            if isinstance(control, QLabel):  # it says the value of the control before it
                continue
            does = control.text() if isinstance(control, QPushButton) else ""
            control.setAccessibleName(control.accessibleName() or ": ".join(filter(None, (name, does))))
            control.setAccessibleDescription(control.accessibleDescription() or explanation)
            if isinstance(control, QCheckBox) and not control.text():  # the room for its text goes to the left
                control.setLayoutDirection(Qt.LayoutDirection.RightToLeft)
        if controls:
            self._name.setBuddy(controls[0])

    def has(self, words: Sequence[str]) -> bool:
        """Whether it is about all of these."""
        said = f"{self._name.text()} {self.words.text()} {self.hidden_words}".casefold()
        return all(word in said for word in words)


def settings_on(card: str) -> list[Setting[Any]]:
    """The settings of a card, in order."""
    return [setting for setting in kept_settings().values() if setting.name and setting.card == card]


# --- the control of each kind -----------------------------------------------------------------------

_Names = Mapping[str, str]


def _switch(setting: Setting[Any], settings: Settings, _names: _Names, parent: SettingsCard) -> tuple[QWidget, ...]:
    box = QCheckBox(parent)
    parent.follow(box, setting, settings, box.setChecked)
    box.toggled.connect(lambda on: settings.set(setting.key, on))
    return (box,)


def _choice(setting: Setting[Any], settings: Settings, names: _Names, parent: SettingsCard) -> tuple[QWidget, ...]:
    kind = setting.kind
    assert isinstance(kind, Choice)
    named = {value: names.get(value) or setting_words(kind.names.get(value, "")) or value for value in kind.values}
    if len(named) <= 3 and sum(len(kind.names.get(value, value)) for value in named) <= _SEGMENTS_CHARACTERS:
        return (_segments(setting, settings, named, parent),)
    box = ComboBox(parent)
    box.setFixedWidth(COMBO_WIDTH_PX)
    for value, name in named.items():
        box.addItem(name, value)

    def show(value: str) -> None:
        if box.findData(value) < 0:
            box.addItem(value, value)
        box.setCurrentIndex(box.findData(value))

    parent.follow(box, setting, settings, show)
    box.activated.connect(lambda _at: settings.set(setting.key, box.currentData()))
    return (box,)


def _segments(setting: Setting[Any], settings: Settings, named: _Names, parent: SettingsCard) -> QWidget:
    holder = QWidget(parent)
    row = hbox(into=holder, gap=6)
    group = QButtonGroup(holder)
    buttons: dict[str, QPushButton] = {}
    for value, name in named.items():
        buttons[value] = button = QPushButton(name, holder)
        button.setCheckable(True)
        button.setProperty("kind", "segment")
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        button.setAccessibleName(f"{setting_words(setting.name)}: {name}")
        group.addButton(button)
        row.addWidget(button)
    parent.follow(holder, setting, settings, lambda value: buttons[value].setChecked(True))
    for value, button in buttons.items():
        button.toggled.connect(lambda on, chosen=value: settings.set(setting.key, chosen) if on else None)
    return holder


def _number(setting: Setting[Any], settings: Settings, _names: _Names, parent: SettingsCard) -> tuple[QWidget, ...]:
    kind = setting.kind
    assert isinstance(kind, Number)
    if kind.common:
        return (_minutes(setting, kind, settings, parent),)
    if kind.unit == "px":
        return _pixels(setting, kind, settings, parent)
    most = (os.cpu_count() or 1) if setting.key == "threads" else int(min(kind.most, 2**31 - 1))
    least, is_open = int(kind.least), setting.default is None
    box = SpinBox(parent)
    box.setRange(least - is_open, most)
    box.setKeyboardTracking(False)
    box.setFixedWidth(NUMBER_WIDTH_PX)
    box.lineEdit().setTextMargins(8, 0, 0, 0)
    box.setSpecialValueText(setting_words("Automatic") if is_open else setting_words(kind.special))
    parent.follow(box, setting, settings, lambda value: box.setValue(least - 1 if value is None else value))
    box.valueChanged.connect(lambda value: settings.set(setting.key, None if value < least else value))
    return (box,)


def _minutes(setting: Setting[Any], kind: Number, settings: Settings, parent: SettingsCard) -> QWidget:
    box = ComboBox(parent)
    box.setFixedWidth(COMBO_WIDTH_PX)

    def show(chosen: int) -> None:
        box.clear()
        for minutes in sorted({*kind.common, chosen}, key=lambda each: (each == 0, each)):
            box.addItem(duration(60 * minutes) if minutes else setting_words(kind.special), minutes)
        box.setCurrentIndex(box.findData(chosen))

    parent.follow(box, setting, settings, show)
    box.activated.connect(lambda _at: settings.set(setting.key, box.currentData()))
    return box


def _pixels(setting: Setting[Any], kind: Number, settings: Settings, parent: SettingsCard) -> tuple[QWidget, ...]:
    slider, figure = Slider(parent), QLabel(parent)
    slider.setRange(int(kind.least), int(kind.most))
    slider.setPageStep(1)
    slider.setFixedWidth(SLIDER_WIDTH_PX)
    figure.setProperty("role", "secondary")
    use_tabular_figures(figure)

    def say(value: int) -> None:
        figure.setText(translate("SettingsCard", "{0} px").format(value))
        if not slider.isSliderDown():  # a new text size would resize the slider under the pointer
            settings.set(setting.key, slider.value())

    parent.follow(slider, setting, settings, slider.setValue)
    slider.valueChanged.connect(say)
    slider.sliderReleased.connect(lambda: settings.set(setting.key, slider.value()))
    figure.setText(translate("SettingsCard", "{0} px").format(slider.value()))
    return slider, figure


class Budget(Slider):
    """How much of a memory may be used, once it is known how much there is."""

    def __init__(self, setting: Setting[Any], settings: Settings, parent: SettingsCard) -> None:
        super().__init__(parent)
        self._setting, self._settings, self._total = setting, settings, 0
        self.figure = text_label(parent, role="secondary")
        self.figure.setMinimumWidth(self.fontMetrics().averageCharWidth() * 15)
        use_tabular_figures(self.figure)
        self.setRange(1, SHARES)
        self.setPageStep(1)
        self.setFixedWidth(SLIDER_WIDTH_PX)
        self.set_total(0)
        parent.follow(self, setting, settings, lambda _value: self._show())
        self.valueChanged.connect(self._set)

    def set_total(self, nbytes: int) -> None:
        """How much there is; 0 while it is not known."""
        self._total = nbytes
        self.setEnabled(bool(nbytes))
        was = self.blockSignals(True)
        self._show()
        self.blockSignals(was)

    def _show(self) -> None:
        budget: int | None = self._settings.value(self._setting)
        has_all = budget is None or not self._total
        self.setValue(SHARES if has_all else max(1, min(SHARES, round(SHARES * (budget or 0) / self._total))))
        free = translate("SettingsCard", "all that is free")
        words = free if budget is None else translate("SettingsCard", "at most {0}").format(memory(budget))
        self.figure.setText(words)
        self.setAccessibleDescription(words)

    def _set(self, share: int) -> None:
        self._settings.set(self._setting.key, None if share == SHARES else self._total * share // SHARES)


def _text(setting: Setting[Any], settings: Settings, _names: _Names, parent: SettingsCard) -> tuple[QWidget, ...]:
    field = QLineEdit(parent)
    field.setFixedWidth(COMBO_WIDTH_PX)
    parent.follow(field, setting, settings, field.setText)
    field.editingFinished.connect(lambda: settings.set(setting.key, field.text()))
    return (field,)


def _budget(setting: Setting[Any], settings: Settings, _names: _Names, parent: SettingsCard) -> tuple[QWidget, ...]:
    slider = Budget(setting, settings, parent)
    return slider, slider.figure


_CONTROLS: Mapping[type, Callable[[Setting[Any], Settings, _Names, SettingsCard], tuple[QWidget, ...]]] = {
    Switch: _switch,
    Choice: _choice,
    Number: _number,
    Size: _budget,
    Text: _text,
}
