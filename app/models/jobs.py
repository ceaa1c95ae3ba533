"""The list of batch jobs."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject

from app.models.headed_table import ROW_ROLE, HeadedTable, Index
from app.services.batch_job import JobEntry

JOB_ROLE = ROW_ROLE
__all__ = ["JOB_ROLE", "Index", "JobListModel"]


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
