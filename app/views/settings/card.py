"""A settings card: a heading, then rows of a name, its explanation and a control."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QFrame, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.widgets.card import muted_label
from app.widgets.fields import ComboBox
from app.widgets.quantities import duration

COMBO_WIDTH_PX = 240


def minutes_choice(choices: tuple[int, ...], chosen: int, never: str, parent: QWidget) -> ComboBox:
    """After how many minutes; 0 is never."""
    box = ComboBox(parent)
    box.setFixedWidth(COMBO_WIDTH_PX)
    for minutes in sorted({*choices, chosen}, key=lambda each: (each == 0, each)):
        box.addItem(duration(60 * minutes) if minutes else never, minutes)
    box.setCurrentIndex(box.findData(chosen))
    return box


class SettingsCard(QFrame):
    """Rows are added top to bottom, which is also their tab order."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(20, 16, 20, 18)
        self._column.setSpacing(16)

    def set_heading(self, text: str) -> None:
        """The card's heading, above its first row."""
        title = QLabel(text, self)
        title.setProperty("role", "heading")
        self._column.insertWidget(0, title)
        self.setAccessibleName(text)

    def add_row(self, name: str, explanation: str, *controls: QWidget) -> QLabel:
        """Adds a row; returns the label of its explanation."""
        label = QLabel(name, self)
        label.setWordWrap(True)
        words = muted_label(self, explanation)  # has no minimum width, however long a path it shows
        label.setVisible(bool(name))
        words.setVisible(bool(explanation))
        left = QVBoxLayout()
        left.setSpacing(2)
        left.addStretch(1)
        left.addWidget(label)
        left.addWidget(words)
        left.addStretch(1)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addLayout(left, 1)
        row.addSpacing(16)
        for control in controls:
            row.addWidget(control, 0, Qt.AlignmentFlag.AlignVCenter)
            if isinstance(control, QLabel):  # it says the value of the control before it
                continue
            does = control.text() if isinstance(control, QPushButton) else ""
            control.setAccessibleName(control.accessibleName() or ": ".join(filter(None, (name, does))))
            control.setAccessibleDescription(explanation)
            if isinstance(control, QCheckBox) and not control.text():  # the room for its text goes to the left
                control.setLayoutDirection(Qt.LayoutDirection.RightToLeft)
        if controls:
            label.setBuddy(controls[0])
        self._column.addLayout(row)
        return words

    def add_wide(self, widget: QWidget) -> None:
        """Adds a widget as wide as the card."""
        self._column.addWidget(widget)
