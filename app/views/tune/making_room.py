"""Tuning needs the engine to itself: asks before it interrupts anything, and resumes a batch job afterwards."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.services.batch_job import JobState
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient
from app.widgets.asking import ask, before_loading


class MakingRoom(QObject):
    """Asks before a run pauses a batch job or waits for an answer."""

    def __init__(self, client: EngineClient, jobs: BatchJobs, page: QWidget) -> None:
        super().__init__(page)
        self._client, self._jobs, self._page = client, jobs, page
        self._holds = False
        self._precision = ""

    def before_run(self, run: Callable[[], object]) -> None:
        """Does `run` at once if the engine is idle, else after the user agrees."""
        running = len(self._jobs.running)
        if running == 1:
            self._ask(
                self.tr("A batch job is running."),
                self.tr(
                    "Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. "
                    "No answered row is lost."
                ),
                [(self.tr("Pause it and tune"), lambda: self._begin(run))],
            )
        elif running:
            self._ask(
                self.tr("{0} batch jobs are running.", "", running).format(running),
                self.tr(
                    "Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. "
                    "No answered row is lost."
                ),
                [(self.tr("Pause them and tune"), lambda: self._begin(run))],
            )
        elif self._client.answering:
            self._ask(
                self.tr("An answer is being written."),
                self.tr("Tuning needs the engine to itself. A stopped answer keeps its text so far."),
                [
                    (self.tr("Tune after the answer"), lambda: self._begin(run)),
                    (self.tr("Stop the answer"), lambda: self._stop_answers(run)),
                ],
            )
        else:
            self._begin(run)

    def before_loading(self, load: Callable[[], object]) -> None:
        """Does `load`, which reloads the model, at once if no batch job runs, else after the user agrees."""
        before_loading(self._jobs, self._page, load)

    def run_ended(self) -> str:
        """Resumes paused jobs; returns a sentence about those that cannot be resumed, or an empty text."""
        held, self._holds = self._holds, False
        if not held:
            return ""
        jobs = self._jobs
        now = self._client.model.precision if self._client.model is not None else self._precision
        waiting = [entry for entry in jobs.entries if entry.state is JobState.QUEUED and entry.done]
        stays = waiting if now != self._precision else []
        for entry in stays:  # the engine would refuse to mix answers of two precisions
            jobs.pause(entry.key)
        jobs.release()
        if not stays:
            return ""
        return self.tr(
            "The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets "
            "you resume it."
        ).format(stays[0].output.name, self._precision, now)

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, run: Callable[[], object]) -> None:
        self._precision = self._client.model.precision if self._client.model is not None else ""
        self._jobs.hold()
        self._holds = True
        run()

    def _stop_answers(self, run: Callable[[], object]) -> None:
        for answer in self._client.answering:
            answer.cancel()
        self._begin(run)

    def _ask(self, question: str, details: str, choices: list[tuple[str, Callable[[], object]]]) -> None:
        ask(self._page.window(), question, details, [(label, "do", answer) for label, answer in choices])
