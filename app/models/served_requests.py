"""What other programs asked, as a table without any texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from PySide6.QtCore import QDateTime, QLocale, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.models.headed_table import HeadedTable
from engine.serving.front_messages import Served

TIME, PROGRAM, MODEL, READ, WRITTEN, SECONDS, OUTCOME = range(7)
MOST_ROWS = 200
_Index = QModelIndex | QPersistentModelIndex


class ServedRequests(HeadedTable):
    """The latest first."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__((), (READ, WRITTEN, SECONDS), parent)
        self._headings = (
            self.tr("Time"),
            self.tr("Program"),
            self.tr("Model"),
            self.tr("Read"),
            self.tr("Written"),
            self.tr("Seconds"),
            self.tr("Outcome"),
        )
        self._rows: list[Served] = []

    def show_all(self, requests: Iterable[Served]) -> None:
        """Shows these, the latest first."""
        self.beginResetModel()
        self._rows = list(requests)
        self.endResetModel()

    def add(self, request: Served) -> None:
        self.beginInsertRows(QModelIndex(), 0, 0)
        self._rows.insert(0, request)
        self.endInsertRows()
        if len(self._rows) > MOST_ROWS:
            self.beginRemoveRows(QModelIndex(), MOST_ROWS, len(self._rows) - 1)
            del self._rows[MOST_ROWS:]
            self.endRemoveRows()

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        request = self._rows[index.row()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self._cell(request, index.column())
        if role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            return self._spoken(request)
        return super().data(index, role)

    def _cell(self, request: Served, column: int) -> str:
        locale = QLocale()
        if column == TIME:
            when = QDateTime.fromMSecsSinceEpoch(round(request.began_s * 1000))
            return locale.toString(when.time(), "HH:mm:ss")
        if column in (READ, WRITTEN):
            tokens = request.read_tokens if column == READ else request.written_tokens
            return locale.toString(tokens) if request.model else "–"
        if column == SECONDS:
            return locale.toString(request.seconds, "f", 1)
        if column == OUTCOME:
            return self._outcome(request)
        return (request.program if column == PROGRAM else request.model) or "–"

    def _outcome(self, request: Served) -> str:
        if request.outcome == "answered":
            return self.tr("answered")
        if request.outcome == "left":
            return self.tr("client left")
        if request.outcome == "refused":
            return (
                self.tr("wrong key") if request.status == _NO_KEY else self.tr("refused ({0})").format(request.status)
            )
        return self.tr("failed")

    def _spoken(self, request: Served) -> str:
        words = self.tr("{0}, {1}: {2}; {3} tokens read, {4} written, {5} s").format(
            self._cell(request, TIME),
            self._cell(request, PROGRAM),
            self._outcome(request),
            self._cell(request, READ),
            self._cell(request, WRITTEN),
            self._cell(request, SECONDS),
        )
        return f"{words}\n{request.path}"


_NO_KEY = 401
