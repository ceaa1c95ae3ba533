"""The list of batch jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.services.batch_job import JobEntry

JOB_ROLE = Qt.ItemDataRole.UserRole + 1

Index = QModelIndex | QPersistentModelIndex


class JobListModel(QAbstractListModel):
    """Jobs, newest first; `JOB_ROLE` gives a `JobEntry`.

    Args:
        describe: a job in words, for screen readers.
    """

    def __init__(self, describe: Callable[[JobEntry], str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._describe = describe
        self._jobs: list[JobEntry] = []

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._jobs)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        job = self._jobs[index.row()]
        if role == JOB_ROLE:
            return job
        if role == Qt.ItemDataRole.DisplayRole:
            return job.input.name
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            return self._describe(job)
        return None

    def put(self, job: JobEntry) -> None:
        row = self.row_of(job.key)
        if row >= 0:
            self._jobs[row] = job
            place = self.index(row)
            self.dataChanged.emit(place, place)
            return
        row = sum(other.created_s > job.created_s for other in self._jobs)
        self.beginInsertRows(QModelIndex(), row, row)
        self._jobs.insert(row, job)
        self.endInsertRows()

    def remove(self, key: str) -> None:
        """Removes a job; no effect if it is not in the list."""
        row = self.row_of(key)
        if row >= 0:
            self.beginRemoveRows(QModelIndex(), row, row)
            del self._jobs[row]
            self.endRemoveRows()

    def row_of(self, key: str) -> int:
        """A job's row; -1 if it is not in the list."""
        return next((row for row, job in enumerate(self._jobs) if job.key == key), -1)
