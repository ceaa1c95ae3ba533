"""A settings card: a heading, then rows of a name, its explanation and a control.

The rows of what people set come from the entries of `engine.common.settings` and `engine.common.config`: each kind of
setting has its control here, and follows changes that are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QCheckBox, QFrame, QLabel, QPushButton, QWidget

from app.services.settings import Settings
from app.widgets.scaffold import LEFT, MIDDLE, STRETCH, add_items, hbox, muted_label, push_button, text_label, vbox
from app.widgets.setting_controls import SettingControls, SettingValues, setting_words
from engine.common.schema import Setting
from engine.common.settings import kept_settings

BESIDE_PX, BELOW_PX = 24, 6
LEAST_WORDS = 16
"""Characters that have room beside a control, or it is put below them."""


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
        self._rows: list[Row] = []
        self._maker: SettingControls | None = None
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
        return self._add(Row(name, explanation, controls, self)).words

    def add_setting(
        self,
        setting: Setting[Any],
        settings: Settings | SettingValues,
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
        if self._maker is None:
            self._maker = SettingControls(settings, self)
        made = (field,) if field is not None else self._maker.make(setting, names)
        self.controls[setting.key] = made[0]
        costs = {"now": "", "load": self.tr("Needs a reload."), "start": self.tr("Needs a restart.")}
        explained = f"{setting_words(setting.help)} {costs[setting.applies]}".strip()
        row = Row(setting_words(setting.name), explained, (*made, *beside), self)
        row.hidden_words = f"{setting.key} {setting.option}"
        return self._add(row).words

    def add_settings(self, card: str, settings: Settings | SettingValues) -> None:
        for setting in settings_on(card):
            if setting.key not in self.controls:
                self.add_setting(setting, settings)

    def add_wide(self, widget: QWidget) -> None:
        self._column.addWidget(widget)

    def show_found(self, wanted: str) -> bool:
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
    def __init__(self, name: str, explanation: str, controls: Sequence[QWidget], parent: QWidget) -> None:
        super().__init__(parent)
        self.hidden_words = ""
        self._name = text_label(self, name, wrap=True)
        self.words = muted_label(self, explanation)  # has no minimum width, however long a path it shows
        self._name.setVisible(bool(name))
        self.words.setVisible(bool(explanation))
        self._controls = hbox(*((control, MIDDLE) for control in controls))
        self._line = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._line.setContentsMargins(0, 0, 0, 0)
        self._line.setSpacing(BESIDE_PX)
        add_items(self._line, (vbox(STRETCH, self._name, self.words, STRETCH, gap=2), 1), self._controls)
        for control in controls:
            if isinstance(control, QLabel):  # it says the value of the control before it
                continue
            does = control.text() if isinstance(control, QPushButton) else ""
            control.setAccessibleName(control.accessibleName() or ": ".join(filter(None, (name, does))))
            control.setAccessibleDescription(control.accessibleDescription() or explanation)
            if isinstance(control, QCheckBox) and not control.text():  # the room for its text goes to the left
                control.setLayoutDirection(Qt.LayoutDirection.RightToLeft)
        if controls:
            self._name.setBuddy(controls[0])

    @property
    def _least_words(self) -> int:
        return LEAST_WORDS * self.fontMetrics().averageCharWidth()

    def minimumSizeHint(self) -> QSize:
        return QSize(max(self._controls.minimumSize().width(), self._least_words), super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        beside = self._controls.sizeHint().width() + BESIDE_PX + self._least_words
        is_below = self._controls.count() > 0 and self.width() < beside
        way = QBoxLayout.Direction.TopToBottom if is_below else QBoxLayout.Direction.LeftToRight
        if way != self._line.direction():
            self._line.setDirection(way)
            self._line.setSpacing(BELOW_PX if is_below else BESIDE_PX)
            self._line.setAlignment(self._controls, LEFT if is_below else Qt.AlignmentFlag(0))

    def has(self, words: Sequence[str]) -> bool:
        said = f"{self._name.text()} {self.words.text()} {self.hidden_words}".casefold()
        return all(word in said for word in words)


def settings_on(card: str) -> list[Setting[Any]]:
    return [setting for setting in kept_settings().values() if setting.name and setting.card == card]
