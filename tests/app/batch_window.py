"""The real window, offscreen, with somebody who wants one job done: clicks Restart engine and Resume until it is.

Run as a program: `python -m tests.app.batch_window INPUT OUTPUT MOST_TOKENS`; ends when the result is there.
"""

import sys

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QPushButton

from app import main as program
from app.services.batch_job import RESUMABLE, JobState, key_of
from app.services.engine_client import EngineState
from app.views.main_window.window import MainWindow
from app.widgets.page import BATCH
from engine.common.config import BatchJob, SamplingParams

_LOOK_MS = 20


class Somebody:
    """Looks at the window a few times a second, and does what a person would."""

    def __init__(self, window: MainWindow, job: BatchJob) -> None:
        self._window, self._job = window, job
        self._is_listed = False
        window.show_page(BATCH)
        page = window.page(BATCH)
        self._page = page
        page._jobs.listed.connect(self._listed)
        self._timer = QTimer(window, interval=_LOOK_MS)
        self._timer.timeout.connect(self._look)
        self._timer.start()

    def _listed(self) -> None:
        self._is_listed = True

    def _look(self) -> None:
        window, jobs = self._window, self._page._jobs
        entry = jobs.entry(key_of(self._job.output))
        if window.services.client.state is EngineState.DIED:
            _click(window.engine_banner.findChildren(QPushButton)[0])
        elif not self._is_listed or window.services.client.model is None:
            return
        elif entry is None:
            self._page.form.start_wanted.emit(self._job, None)
        elif entry.state in RESUMABLE:
            self._page.show_job(entry.key)
            _click(self._page.head.resume)
        elif entry.state is JobState.FINISHED:
            self._timer.stop()
            window.close()
            QApplication.quit()


def _click(button: QPushButton) -> None:
    if button.isVisible() and button.isEnabled():
        button.click()


def main(source: str, output: str, most_tokens: str) -> int:
    """Opens the window; its exit code."""
    job = BatchJob(source, output, sampling=SamplingParams(max_tokens=int(most_tokens)))
    begin = MainWindow.begin

    def begin_with_somebody(window: MainWindow) -> None:
        begin(window)
        window.somebody = Somebody(window, job)  # type: ignore[attr-defined]

    MainWindow.begin = begin_with_somebody  # type: ignore[method-assign]
    return program.main([sys.argv[0]])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
