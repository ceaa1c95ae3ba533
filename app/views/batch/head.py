"""The page's header: which job is shown, and its actions."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QMenu, QPushButton, QWidget

from app.services.batch_job import RESUMABLE, JobEntry, JobState
from app.widgets.chip import ElidedLabel
from app.widgets.scaffold import PageHeader, push_button, text_label

LEAST_NAMES_PX = 180


class BatchHead(PageHeader):
    """Signals: the menus' actions; `moved` carries the number of places in the queue.

    `pause`, `resume`, `retry` and `open` are buttons.
    """

    file_wanted = Signal()
    folder_wanted = Signal()
    stop_wanted = Signal()
    restart_wanted = Signal()
    remove_wanted = Signal()
    moved = Signal(int)
    folder_shown = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.title.setText(self.tr("Batch"))
        self._names = ElidedLabel(self)
        self._names.setProperty("role", "secondary")
        self._more = text_label(self, role="secondary")
        self.set_middle(self._names, least_px=LEAST_NAMES_PX, stretch=1)
        self.row.addWidget(self._more)
        self.retry = self._button(self.tr("Retry failed"))
        self.pause = self._button(self.tr("Pause"))
        self.resume = self._button(self.tr("Resume"))
        self.open = self._button(self.tr("Open result"))
        self.menu = self._button(self.tr("More"))
        self.new = self._button(self.tr("New job"))
        self.new.setProperty("kind", "primary")
        more = QMenu(self)
        self.show_folder = more.addAction(self.tr("Show in folder"), self.folder_shown.emit)
        self.stop = more.addAction(self.tr("Stop and keep answers"), self.stop_wanted.emit)
        self.restart = more.addAction(self.tr("Start over…"), self.restart_wanted.emit)
        self.earlier = more.addAction(self.tr("Move up in queue"), lambda: self.moved.emit(-1))
        self.later = more.addAction(self.tr("Move down in queue"), lambda: self.moved.emit(1))
        more.addSeparator()
        self.remove = more.addAction(self.tr("Remove from list"), self.remove_wanted.emit)
        self.menu.setMenu(more)
        kinds = QMenu(self)
        kinds.addAction(self.tr("From a file…"), self.file_wanted.emit)
        kinds.addAction(self.tr("From a folder…"), self.folder_wanted.emit)
        self.new.setMenu(kinds)

    def show_job(self, job: JobEntry | None, *, on_form: bool, empty: bool, waiting: int = 0) -> None:
        """Offers this job's actions.

        Args:
            on_form: whether the form for a new job is shown; empty: whether there are no jobs.
            waiting: jobs in the queue.
        """
        state = job.state if job is not None else None
        self._names.set_full_text(f"{job.input.name} → {job.output.name}" if job is not None else "")
        if on_form:
            self._names.set_full_text(self.tr("New job"))
        # Each has its place, whatever the job does while the pointer is over it.
        width = max(self.pause.sizeHint().width(), self.resume.sizeHint().width())
        for button in (self.pause, self.resume):
            button.setMinimumWidth(width)
        self.pause.setVisible(job is not None and state not in RESUMABLE)
        self.pause.setEnabled(state in (JobState.RUNNING, JobState.QUEUED))
        self.resume.setVisible(state in RESUMABLE)
        self.retry.setVisible(job is not None and state is JobState.FINISHED and job.failed > 0)
        written = state in (JobState.FINISHED, JobState.STOPPED, JobState.PAUSED)
        self.open.setVisible(job is not None)
        self.open.setEnabled(job is not None and written and (job.done > 0 or state is JobState.FINISHED))
        self.menu.setVisible(job is not None)
        self.new.setVisible(not on_form and not empty)
        idle = state in RESUMABLE or state is JobState.FINISHED
        self.stop.setVisible(state in (JobState.RUNNING, JobState.PAUSED, JobState.QUEUED))
        self.restart.setVisible(idle)
        turn = job.turn if job is not None else 0
        self.earlier.setVisible(turn > 1)
        self.later.setVisible(0 < turn < waiting)
        self.remove.setVisible(idle or state is JobState.QUEUED)

    def show_more(self, text: str) -> None:
        """How many dropped files follow the one shown."""
        self._more.setText(text)
        self._more.setVisible(bool(text))

    def _button(self, text: str) -> QPushButton:
        button = push_button(self, text)
        button.hide()
        self.row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        return button
