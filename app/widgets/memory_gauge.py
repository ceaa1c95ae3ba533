"""A memory's name, its usage, a bar of its parts, and the legend."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.theme import use_tabular_figures
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import memory, used_of
from app.widgets.scaffold import STRETCH, hbox, text_label, vbox


class MemoryGauge(QWidget):
    """A name, `used / total`, and the bar below."""

    def __init__(self, name: str, parent: QWidget) -> None:
        super().__init__(parent)
        self._name = name
        label = text_label(self, name, role="caption")
        self._amount = text_label(self, role="caption", tabular=True)
        self._bar = MemoryBar(self)
        vbox(hbox(label, STRETCH, self._amount, gap=-1), self._bar, into=self, gap=4)

    def set_narrow(self, narrow: bool) -> None:
        """Shows only the name and the bar."""
        self._amount.setVisible(not narrow)

    def show_parts(self, parts: tuple[BarPart, ...], used: int, total: int, *, source: str) -> None:
        """`source` says where the figures come from."""
        self._amount.setText(used_of(used, total))
        self._bar.show_parts(parts, total)
        spoken = ", ".join(f"{part.name} {memory(part.amount)}" for part in parts)
        self.setAccessibleName(f"{self._name} {used_of(used, total)}: {spoken}")
        self.setToolTip(f"{self.accessibleName()}\n{source}")


class MemoryLegend(QWidget):
    """Each part's name, amount, colour and hatching."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(1, 1)
        self._rows: list[tuple[MemoryBar, QLabel, QLabel]] = []

    def show_parts(self, parts: tuple[BarPart, ...]) -> None:
        while len(self._rows) < len(parts):
            self._add_row()
        for row, widgets in enumerate(self._rows):
            for widget in widgets:
                widget.setVisible(row < len(parts))
        for part, (swatch, name, amount) in zip(parts, self._rows, strict=False):
            swatch.show_parts((replace(part, amount=1),), 1)
            name.setText(part.name)
            amount.setText(memory(part.amount))

    def _add_row(self) -> None:
        swatch, name, amount = MemoryBar(self), QLabel(self), QLabel(self)
        swatch.setFixedSize(QSize(10, 8))
        row = len(self._rows)
        for label in (name, amount):
            label.setProperty("role", "caption")
        use_tabular_figures(amount)
        self._grid.addWidget(swatch, row, 0)
        self._grid.addWidget(name, row, 1)
        self._grid.addWidget(amount, row, 2, Qt.AlignmentFlag.AlignRight)
        self._rows.append((swatch, name, amount))
