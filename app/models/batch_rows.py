"""Jobs, and rows of a batch: a job's finished ones, and the first ones of an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt

from app.models.headed_table import ROW_ROLE, HeadedTable, Index
from app.services.batch_job import JobEntry
from engine.common.plain_text import few_marks
from engine.protocol import BatchRow

JOB_ROLE = ROW_ROLE


class JobListModel(HeadedTable):
    """Jobs, newest first; `JOB_ROLE` gives a `JobEntry`."""

    def __init__(self, describe: Callable[[JobEntry], str], parent: QObject | None = None) -> None:
        super().__init__(
            parent=parent, cell=lambda job, _column: str(job.input.name), describe=describe, key=lambda job: job.key
        )

    def put(self, job: JobEntry) -> None:
        row = self.row_of(job.key)
        if row >= 0:
            self._rows[row] = job
            self.dataChanged.emit(self.index(row, 0), self.index(row, 0))
        else:
            self.insert_row(sum(other.created_s > job.created_s for other in self._rows), job)

    def remove(self, key: str) -> None:
        row = self.row_of(key)
        if row >= 0:
            self.drop_rows(row, row)


__all__ = ["ROW_ROLE", "AnsweredRowsModel", "Column", "InputRowsModel", "one_line"]

MOST_LATEST = 500
LEAST_LEFT_OUT = 12


class Column(IntEnum):
    ROW = 0
    PROMPT = 1
    ANSWER = 2
    END = 3
    TOKENS = 4


class AnsweredRowsModel(HeadedTable):
    """Finished rows; `ROW_ROLE` gives a `BatchRow`."""

    def __init__(
        self,
        headings: Sequence[str],
        end_text: Callable[[BatchRow], str],
        count_text: Callable[[int], str] = str,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(headings, (Column.TOKENS,), parent)
        self._end_text, self._count_text = end_text, count_text
        self._beginning = ""

    def set_beginning(self, text: str) -> None:
        self._beginning = text if len(one_line(text)) >= LEAST_LEFT_OUT else ""

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid() or role not in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return super().data(index, role)
        row = self._rows[index.row()]
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
        self.show_rows(tuple(rows))

    def append(self, rows: Sequence[BatchRow]) -> None:
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
            self.drop_rows(MOST_LATEST, MOST_LATEST + over - 1)

    @property
    def last_row(self) -> int:
        return self._rows[-1].row if self._rows else -1


class InputRowsModel(HeadedTable):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__((), parent=parent)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        text = self._rows[index.row()][index.column()]
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return one_line(text)
        return text if role == Qt.ItemDataRole.ToolTipRole else None

    def set_rows(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.beginResetModel()
        self._headings = tuple(columns)
        self._rows = [tuple(row) for row in rows]
        self.endResetModel()


def one_line(text: str) -> str:
    return few_marks(" ".join(text.split()))
