"""Rows of a batch: a job's finished ones, and the first ones of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from engine.batch_files.messages import BatchRow

ROW_ROLE = Qt.ItemDataRole.UserRole + 1
MOST_LATEST = 500
LEAST_LEFT_OUT = 12

Index = QModelIndex | QPersistentModelIndex


class Column(IntEnum):
    """Columns of `AnsweredRowsModel`."""

    ROW = 0
    PROMPT = 1
    ANSWER = 2
    END = 3
    TOKENS = 4


class AnsweredRowsModel(QAbstractTableModel):
    """Finished rows; `ROW_ROLE` gives a `BatchRow`.

    Args:
        headings: of the columns, in their order.
        end_text: how a row ended, in words.
        count_text: a number, formatted for display.
    """

    def __init__(
        self,
        headings: Sequence[str],
        end_text: Callable[[BatchRow], str],
        count_text: Callable[[int], str] = str,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._headings = tuple(headings)
        self._end_text, self._count_text = end_text, count_text
        self._rows: list[BatchRow] = []
        self._beginning = ""

    def set_beginning(self, text: str) -> None:
        """Sets the prefix that all prompts share: it is left out where a prompt is shown as one line."""
        self._beginning = text if len(one_line(text)) >= LEAST_LEFT_OUT else ""

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._headings)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal:
            if role == Qt.ItemDataRole.DisplayRole:
                return self._headings[section]
            if role == Qt.ItemDataRole.TextAlignmentRole:
                return _alignment(section == Column.TOKENS)
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row = self._rows[index.row()]
        if role == ROW_ROLE:
            return row
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _alignment(index.column() == Column.TOKENS)
        if role not in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return None
        return {
            Column.ROW: self._count_text(row.row + 1),
            Column.PROMPT: self._prompt(row),
            Column.ANSWER: one_line(f"{row.problem[:1].upper()}{row.problem[1:]}" if row.problem else row.answer),
            Column.END: self._end_text(row),
            Column.TOKENS: self._count_text(row.generated_tokens),
        }[Column(index.column())]

    def _prompt(self, row: BatchRow) -> str:
        if self._beginning and row.prompt.startswith(self._beginning):
            return f"… {one_line(row.prompt[len(self._beginning) :])}"
        return one_line(row.prompt)

    def set_rows(self, rows: Iterable[BatchRow]) -> None:
        """Replaces all rows."""
        self.beginResetModel()
        self._rows = list(rows)
        self.endResetModel()

    def append(self, rows: Sequence[BatchRow]) -> None:
        """Adds rows at the end."""
        if rows:
            first = len(self._rows)
            self.beginInsertRows(QModelIndex(), first, first + len(rows) - 1)
            self._rows += rows
            self.endInsertRows()

    def put_latest(self, rows: Sequence[BatchRow]) -> None:
        """Inserts rows that have just finished at the top; beyond `MOST_LATEST` the oldest are dropped."""
        rows = list(rows)[-MOST_LATEST:]
        if not rows:
            return
        self.beginInsertRows(QModelIndex(), 0, len(rows) - 1)
        self._rows[:0] = reversed(rows)
        self.endInsertRows()
        over = len(self._rows) - MOST_LATEST
        if over > 0:
            self.beginRemoveRows(QModelIndex(), MOST_LATEST, MOST_LATEST + over - 1)
            del self._rows[MOST_LATEST:]
            self.endRemoveRows()

    @property
    def last_row(self) -> int:
        """Index in the input of the row at the end; -1 if there is none."""
        return self._rows[-1].row if self._rows else -1


class InputRowsModel(QAbstractTableModel):
    """The first rows of an input, as text."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._columns: tuple[str, ...] = ()
        self._rows: tuple[tuple[str, ...], ...] = ()

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._columns)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal:
            if role == Qt.ItemDataRole.DisplayRole:
                return self._columns[section]
            if role == Qt.ItemDataRole.TextAlignmentRole:
                return _alignment(False)
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        text = self._rows[index.row()][index.column()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return one_line(text)
        return text if role == Qt.ItemDataRole.ToolTipRole else None

    def set_rows(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Shows these rows; each has one text per column."""
        self.beginResetModel()
        self._columns = tuple(columns)
        self._rows = tuple(tuple(row) for row in rows)
        self.endResetModel()


def one_line(text: str) -> str:
    """Text without line breaks, for a table cell."""
    return " ".join(text.split())


def _alignment(right: bool) -> int:
    side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
    return int(side | Qt.AlignmentFlag.AlignVCenter)
