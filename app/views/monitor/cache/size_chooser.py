"""The cache size as a number, as an alternative to dragging; and the outcome of the last change."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.widgets.card import muted_label
from app.widgets.fields import SpinBox
from engine.telemetry.messages import TierReport


class SizeChooser(QWidget):
    """A field, a button, and undo.

    Signals:
        moved(int): experts in the field, before they are requested.
        chosen(int): the button was pressed.
        undone: revert to the previous size.
    """

    moved = Signal(int)
    chosen = Signal(int)
    undone = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        label = QLabel(self.tr("Experts kept"), self)
        label.setProperty("role", "secondary")
        self.field = SpinBox(self)
        self.field.setAccessibleName(self.tr("Experts kept in this tier"))
        self.field.setKeyboardTracking(False)
        self.field.setGroupSeparatorShown(True)
        self.field.lineEdit().setTextMargins(8, 0, 0, 0)  # the style sheet's padding does not apply here
        label.setBuddy(self.field)
        self.button = QPushButton(self.tr("Resize"), self)
        self.button.setToolTip(self.tr("Lasts until the model is reloaded; Tune sets a permanent size."))
        self.undo = QPushButton(self.tr("Undo"), self)
        self.undo.setProperty("kind", "quiet")
        stays = self.undo.sizePolicy()
        stays.setRetainSizeWhenHidden(True)  # or the card would change its width
        self.undo.setSizePolicy(stays)
        self.undo.hide()
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(label)
        row.addWidget(self.field)
        row.addWidget(self.button)
        row.addWidget(self.undo)
        row.addStretch(1)
        self._outcome = muted_label(self)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(row)
        column.addWidget(self._outcome)
        self._outcome.hide()
        self._present = 0
        self.field.valueChanged.connect(self._on_value)
        self.button.clicked.connect(lambda: self.chosen.emit(self.field.value()))
        self.undo.clicked.connect(lambda: self.undone.emit())

    @property
    def outcome(self) -> str:
        """The text about the last change."""
        return self._outcome.text()

    def show_tier(self, tier: TierReport, slots: int) -> None:
        """Shows the tier, and the handle's size."""
        self._present = tier.slots
        if not self.field.hasFocus() or self.field.value() == slots:
            self.set_slots(slots, tier.most_slots)

    def set_slots(self, slots: int, most: int) -> None:
        """Updates the field when the handle moves."""
        self.field.blockSignals(True)
        self.field.setRange(1, max(1, most))
        self.field.setSingleStep(max(1, most // 100))
        self.field.setValue(slots)
        self.field.blockSignals(False)
        self.button.setEnabled(self.field.value() != self._present)

    def say(self, outcome: str, *, undoable: bool) -> None:
        """Shows the outcome of the last change; empty if there was none."""
        self._outcome.setText(outcome)
        self._outcome.setVisible(bool(outcome))
        self.undo.setVisible(undoable)

    def _on_value(self, slots: int) -> None:
        self.button.setEnabled(slots != self._present)
        self.moved.emit(slots)
