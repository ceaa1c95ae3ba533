"""A job's progress: percentage, rows, rate, expected end, and current step."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QVBoxLayout, QWidget

from app.services.batch_job import UNDER_WAY, JobEntry, JobState
from app.theme import set_look, use_tabular_figures
from app.views.batch.phrases import pace_text, rows_text, state_text, status_text
from app.views.batch.place_rows import PlaceRows
from app.widgets.flow_layout import Flow
from app.widgets.quantities import percent
from app.widgets.wrapped_label import WrappedLabel


class ProgressCard(QFrame):
    """Text, a bar, and while the job runs a view of the machine at work."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._percent = QLabel(self)
        self._percent.setObjectName("percent")
        self._rows = QLabel(self)
        self._rows.setProperty("role", "lead")
        self._rate = QLabel(self)
        self._rate.setStyleSheet("font-weight: 600;")
        self._end = QLabel(self)
        self._end.setProperty("role", "lead")
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        self._bar.setAccessibleName(self.tr("Job progress"))
        self._status = WrappedLabel("", self)
        self._status.setProperty("role", "secondary")
        for label in (self._percent, self._rows, self._rate, self._end):
            use_tabular_figures(label)
        left = QWidget(self)
        line = QHBoxLayout(left)
        line.setContentsMargins(0, 0, 0, 0)
        line.setSpacing(10)
        for label in (self._percent, self._rows):
            line.addWidget(label, 0, Qt.AlignmentFlag.AlignBaseline)
        # An end on another day is long: in a narrow window it is below the rate.
        self._right = right = Flow(self._rate, self._end, parent=self, gap=10)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 14, 16, 14)
        column.setSpacing(10)
        right.hide()
        column.addWidget(Flow(left, right, parent=self, ends_right=True))
        column.addWidget(self._bar)
        column.addWidget(self._status)
        self._places = PlaceRows(self)
        column.addWidget(self._places)
        self._column = column
        self._make_strip: Callable[[QWidget], QWidget] | None = None
        self._strip: QWidget | None = None

    def add_strip(self, make: Callable[[QWidget], QWidget]) -> None:
        """Shown below the text while a job runs; created for the first one."""
        self._make_strip = make

    def _show_strip(self, shown: bool) -> None:
        if shown and self._strip is None and self._make_strip is not None:
            self._strip = self._make_strip(self)
            self._column.addWidget(self._strip)
        if self._strip is not None:
            self._strip.setVisible(shown)

    def show_job(self, job: JobEntry) -> None:
        """Shows this job's progress."""
        share = job.share
        self._percent.setText(percent(share) if share is not None else state_text(job).capitalize())
        self._rows.setText(rows_text(job))
        rate, end = pace_text(job)
        self._rate.setText(rate)
        self._end.setText(end)
        self._right.setVisible(bool(rate or end))
        busy = share is None and job.state is JobState.RUNNING
        self._bar.setRange(0, 0 if busy else 1000)
        if not busy:
            self._bar.setValue(int((share or 0.0) * 1000))
        self._show_strip(job.state in UNDER_WAY and job.needs_model)
        self._places.show_places(job.places)
        status = status_text(job)
        warns = bool(job.blocked) or job.state is JobState.FAILED
        set_look(self._status, "tone", "warning" if warns else "")
        self._status.setText(status)
        self.setAccessibleName(self.tr("Job progress"))
        self.setAccessibleDescription(f"{self._percent.text()}. {self._rows.text()}. {rate} {end}. {status}")
