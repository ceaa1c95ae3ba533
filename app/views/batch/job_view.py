"""One job: its progress, finished rows and settings."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, Qt, QTimer
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QScrollArea, QStackedWidget, QVBoxLayout, QWidget

from app.services.batch_job import JobEntry
from app.theme import scaled
from app.views.batch.progress_card import ProgressCard
from app.views.batch.row_detail import RowDetail
from app.views.batch.rows_card import RowsCard
from app.views.batch.settings_card import SharedSettingsCard
from engine.batch_files.messages import BatchRow

SIDE_PX = 320
NARROW_PX = 860
LEAST_ROWS_PX = 260


class JobView(QWidget):
    """Shows one job at a time."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._key = ""
        self.progress = ProgressCard(self)
        self.rows = RowsCard(self)
        self.settings = SharedSettingsCard(self)
        self.detail = RowDetail(self)
        self._side = QStackedWidget(self)
        self._side.addWidget(self.settings)
        self._side.addWidget(self.detail)
        self.rows.setMinimumHeight(LEAST_ROWS_PX)
        self._below = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._below.setSpacing(14)
        self._below.addWidget(self.rows, 1)
        self._below.addWidget(self._side)
        holder = QWidget(self)
        column = QVBoxLayout(holder)
        column.setContentsMargins(20, 18, 20, 18)
        column.setSpacing(14)
        column.addWidget(self.progress)
        column.addLayout(self._below, 1)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setWidget(holder)
        page = QVBoxLayout(self)
        page.setContentsMargins(0, 0, 0, 0)
        page.addWidget(scroll)
        self._scroll = scroll
        self.rows.opened.connect(self._open_row)
        self.rows.moved.connect(self._move_to)
        self.rows.left.connect(self._close_row)
        self.detail.closed.connect(self._close_row)
        self._fit()

    @property
    def key(self) -> str:
        """The shown job; empty before the first."""
        return self._key

    def show_job(self, entry: JobEntry) -> None:
        """Shows a job, or updates the one shown."""
        self.progress.show_job(entry)
        if entry.key != self._key:
            self._key = entry.key
            self._scroll.verticalScrollBar().setValue(0)  # a different job is shown from its top
            self._side.setCurrentWidget(self.settings)
            self.settings.show_job(entry)
            self.rows.show_job(entry)
        else:
            self.settings.show_job(entry)
            self.rows.update_job(entry)

    def forget(self) -> None:
        """Clears the view: the shown job was removed."""
        self._key = ""

    def add_rows(self, key: str, rows: Sequence[BatchRow]) -> None:
        """Adds newly finished rows of a job."""
        if key == self._key:
            self.rows.add_latest(rows)

    def close_down(self) -> None:
        """Waits for a running read."""
        self.rows.close_down()
        self.detail.close_down()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _open_row(self, row: BatchRow) -> None:
        self.detail.show_row(row, self.rows.answers)
        self._side.setCurrentWidget(self.detail)
        # In a narrow window it is below the rows: lay out first, then scroll to it.
        QTimer.singleShot(0, self, lambda: self._scroll.ensureWidgetVisible(self.detail, 0, 0))

    def _move_to(self, row: BatchRow) -> None:
        if self._side.currentWidget() is self.detail:
            self.detail.show_row(row, self.rows.answers)

    def _close_row(self) -> None:
        self._side.setCurrentWidget(self.settings)
        self.rows.table.setFocus()

    def _fit(self) -> None:
        narrow = self.width() < scaled(NARROW_PX)
        self._below.setDirection(QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight)
        if narrow:
            self._side.setMinimumWidth(0)
            self._side.setMaximumWidth(16_777_215)
        else:
            self._side.setFixedWidth(scaled(SIDE_PX))
