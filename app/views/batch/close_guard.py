"""Warns before the window closes while a job runs."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject
from PySide6.QtWidgets import QWidget

from app.services.batch_jobs import BatchJobs
from app.widgets.asking import ask


class RunningJobGuard(QObject):
    """Asks when the user closes the window; does not hold up a system shutdown."""

    def __init__(self, jobs: BatchJobs, parent: QWidget) -> None:
        super().__init__(parent)
        self._jobs = jobs
        self._page = parent
        self._window: QWidget | None = None
        self._is_leaving = False

    def watch(self, window: QWidget) -> None:
        """Ask before this window closes."""
        if window is not self._window and window is not self._page:
            self._window = window
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        by_hand = event.type() == QEvent.Type.Close and event.spontaneous()
        if watched is self._window and by_hand and not self._is_leaving and self._jobs.running:
            event.ignore()
            running = len(self._jobs.running)
            question, words, choice = (
                self.tr("A batch job is running."),
                self.tr("It stops with the window. No answered row is lost: you can resume it at the next start."),
                self.tr("Stop it and close"),
            )
            if running > 1:
                question, words, choice = (
                    self.tr("{0} batch jobs are running.").format(running),
                    self.tr(
                        "They stop with the window. No answered row is lost: you can resume them at the next start."
                    ),
                    self.tr("Stop them and close"),
                )
            ask(
                self._window or self._page,
                question,
                words,
                [(choice, "do", self._leave)],
                self.tr("Keep the window open"),
            )
            return True
        return False

    def _leave(self) -> None:
        self._is_leaving = True
        if self._window is not None:
            self._window.close()
