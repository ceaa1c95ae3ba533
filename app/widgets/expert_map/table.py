"""The map as a sortable table, for screen readers and exact numbers: one row per expert."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.widgets.expert_map.data import MapData, place_text
from app.widgets.quantities import memory, nearest_percent, number

Index = QModelIndex | QPersistentModelIndex
LAYER, EXPERT, USES, HITS, LAST, BYTES, PLACE = range(7)


class ExpertTable(QAbstractTableModel):
    """All experts that exist, by layer and number until sorted by a column."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._data: MapData | None = None
        self._cells: NDArray[np.intp] = np.empty(0, np.intp)
        self._sorted: tuple[int, Qt.SortOrder] = LAYER, Qt.SortOrder.AscendingOrder

    def show_data(self, data: MapData | None) -> None:
        """Shows new data; the sort order is kept."""
        before = len(self._cells)
        self._data = data
        cells = np.flatnonzero(data.exists) if data is not None else np.empty(0, np.intp)
        if len(cells) != before:
            self.beginResetModel()
            self._cells = self._ordered(cells)
            self.endResetModel()
        elif len(cells):
            self._cells = self._ordered(cells)
            self.dataChanged.emit(self.index(0, 0), self.index(len(cells) - 1, PLACE))

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self._sorted = column, order
        self.layoutAboutToBeChanged.emit()
        self._cells = self._ordered(np.sort(self._cells))
        self.layoutChanged.emit()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._cells)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else PLACE + 1

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        data = self._data
        if data is None or not index.isValid() or index.row() >= len(self._cells):
            return None
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            row, expert = divmod(int(self._cells[index.row()]), data.shape[1])
            return self._text(data, row, expert, index.column())
        if role == Qt.ItemDataRole.TextAlignmentRole and index.column() != PLACE:
            return int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return (
                self.tr("Layer"),
                self.tr("Expert"),
                self.tr("Uses"),
                self.tr("Hits"),
                self.tr("Steps ago"),
                self.tr("Size"),
                self.tr("Where"),
            )[section]
        return None

    def _text(self, data: MapData, row: int, expert: int, column: int) -> str:
        uses, last = int(data.uses[row, expert]), int(data.last_step[row, expert])
        if column == LAYER:
            return str(data.layers[row])
        if column == EXPERT:
            return str(expert)
        if column == USES:
            return number(uses, 0)
        if column == HITS:
            return nearest_percent(int(data.hits[row, expert]) / uses) if uses else "–"
        if column == LAST:
            return number(max(0, data.step - last), 0) if last else "–"
        if column == BYTES:
            return memory(data.record_bytes[row])
        return place_text(int(data.places[row, expert]))

    def _ordered(self, cells: NDArray[np.intp]) -> NDArray[np.intp]:
        """The cells, which come by layer and number, in the chosen order."""
        data, (column, order) = self._data, self._sorted
        if data is None or not len(cells):
            return cells
        columns = data.shape[1]
        uses = data.uses.reshape(-1)[cells].astype(np.float64)
        keys: dict[int, NDArray[Any]] = {
            LAYER: cells,
            EXPERT: cells % columns,
            USES: uses,
            HITS: data.hits.reshape(-1)[cells] / np.maximum(uses, 1),
            LAST: -data.last_step.reshape(-1)[cells].astype(np.float64),
            BYTES: np.array(data.record_bytes)[cells // columns],
            PLACE: data.places.reshape(-1)[cells],
        }
        key = keys.get(column, cells)
        by_key = np.argsort(-key if order == Qt.SortOrder.DescendingOrder else key, kind="stable")
        return np.asarray(cells[by_key])
