"""The timeline as a table, for screen readers and exact numbers."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QAbstractTableModel, QCoreApplication, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.services.history.buckets import Floats
from app.widgets.timeline.lanes import BOTH_WAYS, Lane, LaneData, amount_text

translate = QCoreApplication.translate

Index = QModelIndex | QPersistentModelIndex


class LaneTable(QAbstractTableModel):
    """A row per lane, for stacks one per part: last value, average, maximum."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._rows: list[tuple[str, str, str, str]] = []

    def show_lanes(self, lanes: list[tuple[Lane, LaneData]]) -> None:
        """Shows the timeline's current data."""
        rows = [row for lane, data in lanes for row in rows_of_lane(lane, data)]
        if len(rows) != len(self._rows):
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
        elif rows != self._rows:
            self._rows = rows
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, 3))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 4

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or index.row() >= len(self._rows):
            return None
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return self._rows[index.row()][index.column()]
        if role == Qt.ItemDataRole.TextAlignmentRole and index.column():
            return int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return (
                translate("Timeline", "Lane"),
                translate("Timeline", "Last"),
                translate("Timeline", "Average"),
                translate("Timeline", "Max"),
            )[section]
        return None


def rows_of_lane(lane: Lane, data: LaneData) -> list[tuple[str, str, str, str]]:
    """A lane's (name, last, average, maximum); none for phases, which have no values."""
    if lane.kind == "phase":
        return []
    series: list[tuple[str, Floats]] = []
    names = data.names if len(data.names) == len(data.values) else ("",) * len(data.values)
    for name, values in zip(names, data.values, strict=True):
        series.append((f"{lane.title}, {name}" if name else lane.title, values))
    if data.line is not None:
        title = lane.title
        if lane.key in BOTH_WAYS:
            title = translate("Timeline", "{0}, out").format(lane.title)
        elif lane.kind != "rate":
            title = translate("Timeline", "{0}, whole machine").format(lane.title)
        series.append((title, data.line))
    rows = []
    for title, values in series:
        known = values[np.isfinite(values)]
        figures = (float(values[-1]), float(known.mean()), float(known.max())) if len(known) else (np.nan,) * 3
        at_end, mean, most = (amount_text(lane, figure) for figure in figures)
        rows.append((title, at_end, mean, most))
    return rows
