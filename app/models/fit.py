"""The rows of a fit card."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from engine.tuning.fit import FitCard, FitRow

FIT_ROLE = Qt.ItemDataRole.UserRole + 1
RECOMMENDED_ROLE = Qt.ItemDataRole.UserRole + 2
"""Whether it is the row to take."""

_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()


class FitColumn(IntEnum):
    FILE = 0
    MEMORY = 1
    SPEED = 2
    VERDICT = 3


class FitTableModel(QAbstractTableModel):
    """`FIT_ROLE` gives a `FitRow`.

    Args:
        describe: a row in words; it is told whether the row is the recommended one.
    """

    def __init__(
        self, headings: tuple[str, ...], describe: Callable[[FitRow, bool], str], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._headings, self._describe = headings, describe
        self._card = FitCard((), None, "")

    @property
    def card(self) -> FitCard:
        return self._card

    def show(self, card: FitCard) -> None:
        """Shows another card; of the same files, the current row stays current."""
        before = [row.candidate.label for row in self._card.rows]
        if [row.candidate.label for row in card.rows] != before:
            self.beginResetModel()
            self._card = card
            self.endResetModel()
        elif card != self._card:
            self._card = card
            if card.rows:
                self.dataChanged.emit(self.index(0, 0), self.index(len(card.rows) - 1, len(FitColumn) - 1))

    def row_of(self, label: str) -> int:
        """The row of a file; -1 if it is not there."""
        return next((at for at, row in enumerate(self._card.rows) if row.candidate.label == label), -1)

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self._card.rows)

    def columnCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(FitColumn)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation is Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return self._headings[section]
        return None

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row = self._card.rows[index.row()]
        if role == FIT_ROLE:
            return row
        if role == RECOMMENDED_ROLE:
            return index.row() == self._card.recommended
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            return self._describe(row, index.row() == self._card.recommended)
        return None
