"""Tables and lists of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()
ROW_ROLE = Qt.ItemDataRole.UserRole + 1


class HeadedTable(QAbstractTableModel):
    """Keeps its rows in `_rows`, one after another."""

    def __init__(
        self,
        headings: Sequence[str] = ("",),
        numbers: Sequence[int] = (),
        parent: QObject | None = None,
        *,
        cell: Callable[[Any, int], str] | None = None,
        describe: Callable[[Any], str] | None = None,
        key: Callable[[Any], object] = id,
    ) -> None:
        super().__init__(parent)
        self._headings, self._numbers = tuple(headings), frozenset(numbers)
        self._cell, self._describe, self._key = cell, describe, key
        self._rows: list[Any] = []

    @property
    def rows(self) -> tuple[Any, ...]:
        return tuple(self._rows)

    def row_of(self, key: object) -> int:
        return next((at for at, row in enumerate(self._rows) if self._key(row) == key), -1)

    def show_rows(self, rows: Sequence[Any]) -> None:
        """Shows these; what is current stays so as long as there are the same in the same order."""
        before, rows = self._rows, list(rows)
        if list(map(self._key, rows)) != list(map(self._key, before)):
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
        elif rows != before:
            self._rows = rows
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(self._headings) - 1))

    def insert_row(self, at: int, row: Any) -> None:
        self.beginInsertRows(QModelIndex(), at, at)
        self._rows.insert(at, row)
        self.endInsertRows()

    def drop_rows(self, first: int, last: int) -> None:
        self.beginRemoveRows(QModelIndex(), first, last)
        del self._rows[first : last + 1]
        self.endRemoveRows()

    # --- for views --------------------------------------------------------------------------------

    def rowCount(self, parent: Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self._headings)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation is not Qt.Orientation.Horizontal:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._headings[section]
        return self._alignment(section) if role == Qt.ItemDataRole.TextAlignmentRole else None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row = self._rows[index.row()]
        if role == ROW_ROLE:
            return row
        if role == Qt.ItemDataRole.DisplayRole and self._cell is not None:
            return self._cell(row, index.column())
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole) and self._describe is not None:
            return self._describe(row)
        return self._alignment(index.column()) if role == Qt.ItemDataRole.TextAlignmentRole else None

    def _alignment(self, column: int) -> Qt.AlignmentFlag:
        side = Qt.AlignmentFlag.AlignRight if column in self._numbers else Qt.AlignmentFlag.AlignLeft
        return side | Qt.AlignmentFlag.AlignVCenter
