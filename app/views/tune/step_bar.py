"""The wizard's steps: where one is, and where one may go."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QLabel, QPushButton, QWidget

MACHINE, MEASURE, PLAN, TIMED = range(4)


class StepBar(QWidget):
    """Signals: `chosen(int)`, when the user goes to a step."""

    chosen = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(self.tr("Steps"))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(4)
        self._group = QButtonGroup(self)
        self._names = (self.tr("Your machine"), self.tr("Measure"), self.tr("Plan"), self.tr("Timed tokens"))
        for at, name in enumerate(self._names):
            if at:
                between = QLabel("›", self)
                between.setProperty("role", "secondary")
                row.addWidget(between)
            button = QPushButton(f"{at + 1} {name}", self)
            button.setProperty("kind", "chip")
            button.setCheckable(True)
            button.setAccessibleName(self.tr("Step {0}: {1}").format(at + 1, name))
            button.setToolTip(self.tr("Alt+{0}").format(at + 1))
            button.setShortcut(f"Alt+{at + 1}")
            self._group.addButton(button, at)
            row.addWidget(button)
        self._group.idClicked.connect(self.chosen)

    def show_step(self, step: int) -> None:
        """Marks a step; emits nothing."""
        self._group.button(step).setChecked(True)
