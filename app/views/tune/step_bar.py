"""The steps of the Tune page."""

from __future__ import annotations

from PySide6.QtCore import QSize, Signal
from PySide6.QtWidgets import QButtonGroup, QWidget

from app.widgets.scaffold import hbox, push_button, text_label

MACHINE, MEASURE, PLAN, TIMED = range(4)


class StepBar(QWidget):
    """Signals: `chosen(int)`, when the user picks a step."""

    chosen = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(self.tr("Steps"))
        row = hbox(into=self, gap=4)
        self._group = QButtonGroup(self)
        self._short = False
        self._names = (self.tr("Your machine"), self.tr("Measure"), self.tr("Plan"), self.tr("Timed tokens"))
        for at, name in enumerate(self._names):
            if at:
                between = text_label(self, "›", role="secondary")
                row.addWidget(between)
            button = push_button(
                self,
                f"{at + 1} {name}",
                kind="chip",
                checkable=True,
                name=self.tr("Step {0}: {1}").format(at + 1, name),
                tip=self.tr("Alt+{0}").format(at + 1),
            )
            self._group.addButton(button, at)
            row.addWidget(button)
        row.addStretch(1)
        self._group.idClicked.connect(self.chosen)

    def show_step(self, step: int) -> None:
        """Marks a step; emits nothing."""
        self._group.button(step).setChecked(True)
        self._name_them()

    def show_short(self, *, short: bool) -> None:
        if short != self._short:
            self._short = short
            self._name_them()

    def minimumSizeHint(self) -> QSize:
        # Of the short names: the full ones are shown only where they fit.
        widest = max(self.fontMetrics().horizontalAdvance(name) for name in self._names)
        return QSize(widest + 44 + 3 * 56, super().minimumSizeHint().height())

    def full_width(self) -> int:
        texts = [self._text(at, short=False) for at in range(len(self._names))]
        return sum(self.fontMetrics().horizontalAdvance(text) + 44 for text in texts)

    def _name_them(self) -> None:
        for at in range(len(self._names)):
            button = self._group.button(at)
            button.setText(self._text(at, short=self._short))
            button.setShortcut(f"Alt+{at + 1}")  # setting a text clears the shortcut

    def _text(self, at: int, *, short: bool) -> str:
        button = self._group.button(at)
        return f"{at + 1} {self._names[at]}" if not short or button.isChecked() else str(at + 1)
