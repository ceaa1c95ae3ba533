"""A tuning run on the page: its progress, its measurements and its result."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QWidget

from app.services.batch_job import JobState
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient, EngineState
from app.services.tuning import Tuning
from app.views.tune.cards import MEASURE, PLAN, TIMED, TuneCards
from app.views.tune.machine_boxes import PART_OF
from app.views.tune.phrases import number_words, stage_sentence
from app.widgets.asking import ask, before_loading
from app.widgets.quantities import number
from engine.hardware.probe import is_busy
from engine.planner.plan_parts import Plan
from engine.protocol import (
    Failed,
    Measured,
    TuningFinished,
    TuningMeasured,
    TuningNumber,
    TuningPlans,
    TuningProgress,
    TuningTimed,
    Until,
)
from engine.tuning.known_speed import with_timed
from engine.tuning.result import TuningResult


class MakingRoom(QObject):
    def __init__(self, client: EngineClient, jobs: BatchJobs, page: QWidget) -> None:
        super().__init__(page)
        self._client, self._jobs, self._page = client, jobs, page
        self._holds = False
        self._precision = ""

    def before_run(self, run: Callable[[], object]) -> None:
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


class RunFollowing(QObject):
    """Starts runs and shows their progress in the cards.

    Signals:
        began: a run was requested.
        reached(int): the step it has reached.
        planned(Plan): the engine's first choice.
        stopped(str): it ended early, for this reason; empty if it was cancelled.
        ended: emitted after every run.
    """

    began = Signal()
    reached = Signal(int)
    planned = Signal(object)
    stopped = Signal(str)
    ended = Signal()

    def __init__(
        self, client: EngineClient, tuning: Tuning, room: MakingRoom, cards: TuneCards, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._client, self._tuning, self._room, self._cards = client, tuning, room, cards
        self._found: dict[Measured, TuningNumber] = {}
        self._plan: Plan | None = None
        self._unsaved: TuningFinished | None = None
        tuning.progressed.connect(self._on_progress)
        tuning.measured.connect(self._on_measured)
        tuning.planned.connect(self._on_contestants)
        tuning.timed.connect(self._on_timed)
        tuning.ended.connect(self._on_ended)
        tuning.recalled.connect(self._on_recalled)
        tuning.chosen.connect(self._on_chosen)
        client.model_loaded.connect(self._on_model_loaded)
        tuning.problem.connect(self._on_problem)
        cards.run.run_wanted.connect(lambda: self.ask_to_run(only_measure=False))
        cards.run.measuring_wanted.connect(lambda: self.ask_to_run(only_measure=True))
        cards.run.cancel_wanted.connect(self.cancel)
        cards.run.keep_wanted.connect(self._keep_anyway)
        cards.race.use_wanted.connect(self._use)

    def _on_problem(self, sentence: str) -> None:
        self._cards.run.show_notes(sentence)

    def ask_to_run(self, *, only_measure: bool) -> None:
        if not self._tuning.is_running:
            self._room.before_run(lambda: self._run(only_measure=only_measure))

    def cancel(self) -> None:
        if self._tuning.is_running and not self._tuning.is_cancelling:
            self._cards.run.show_cancelling()
            self._tuning.cancel()

    @property
    def has_unsaved(self) -> bool:
        return self._unsaved is not None

    def forget_unsaved(self) -> None:
        self._unsaved = None
        self._cards.run.show_unsaved("")

    def draw_machine(self) -> None:
        if self._tuning.machine is not None:
            self._cards.show_machine(self._tuning.machine, self._found)

    # --- a run ------------------------------------------------------------------------------------

    def _run(self, *, only_measure: bool) -> None:
        if self._tuning.is_running:
            return
        cards, run = self._cards, self._cards.run
        self._found, self._plan, self._unsaved = {}, None, None
        waits = bool(self._client.answering)
        run.show_waiting(self.tr("Waiting for the answer") if waits else self.tr("Waiting for the engine"))
        cards.numbers.show_found({})
        if not only_measure:
            cards.table.clear()
            cards.race.show_none()
        self.began.emit()
        self.reached.emit(MEASURE)
        # “Measure only” always measures again; tuning reuses numbers that are still valid.
        until: Until = "measured" if only_measure else "timed"
        self._tuning.start(run.model, run.kind, until, measure_again=only_measure or self._has_numbers())
        run.cancel.setFocus()

    def _has_numbers(self) -> bool:
        return self._tuning.machine is not None and self._tuning.machine.measurements is not None

    def _on_progress(self, event: TuningProgress) -> None:
        cards, number = self._cards, event.number
        cards.run.show_progress(stage_sentence(event), event.done)
        if event.stage in ("loading", "timing"):
            self.reached.emit(TIMED)
            live = number.value if number is not None and event.stage == "timing" else 0.0
            doing = self.tr("being timed") if event.stage == "timing" else self.tr("being loaded")
            cards.table.show_doing(event.name, doing, live)
        elif event.stage == "measuring" and number is not None:
            known = self._found.get(number.what)
            if known is None or number.value > known.value:
                self._found[number.what] = number
            cards.picture.show_at_work(PART_OF.get(number.what))
            self.draw_machine()
            cards.numbers.show_found(self._found)
            cards.run.show_progress(f"{stage_sentence(event)}, {number_words(number)}", event.done)
        elif event.stage == "restoring":
            cards.table.stop()

    def _on_measured(self, event: TuningMeasured) -> None:
        self._cards.picture.show_at_work(None)
        self._cards.run.show_notes(*event.notes)

    def _on_contestants(self, event: TuningPlans) -> None:
        self._plan = event.plan
        self.planned.emit(event.plan)
        self._cards.table.show_contestants(event.contestants)
        self.reached.emit(PLAN)

    def _on_timed(self, event: TuningTimed) -> None:
        timed = event.timed
        self._cards.table.show_timed(timed)
        if timed.contestant.is_plan and timed.tokens_per_s and self._plan is not None and not is_busy(timed.others):
            self.planned.emit(with_timed(self._plan, timed, datetime.now(UTC).isoformat(timespec="seconds")))

    def _on_ended(self, event: TuningFinished | Failed) -> None:
        cards, run = self._cards, self._cards.run
        had_focus = run.cancel.hasFocus()
        cards.picture.show_at_work(None)
        cards.table.stop()
        self._found = {}
        of_jobs = self._room.run_ended()
        result = event.result if isinstance(event, TuningFinished) else None
        run.show_idle(again=result is not None)
        if isinstance(event, Failed):
            run.show_notes(event.message, of_jobs)
            self.stopped.emit("")
        elif event.problem or not event.finished:
            problem = event.problem or self.tr("Cancelled: nothing was saved or changed.")
            run.show_notes(problem, event.note, of_jobs)
            self.stopped.emit(event.problem)
        elif result is not None:
            run.show_notes(event.note, of_jobs)
            self._take_unsaved(event)
            self._show_result(result)
            self.reached.emit(TIMED)
        else:
            self._take_unsaved(event)
            if event.note or of_jobs:  # else keep the note on the measurements
                run.show_notes(event.note, of_jobs)
            self.reached.emit(PLAN)
        if had_focus:
            (cards.race.use if cards.race.has_offer else run.start).setFocus()
        self.ended.emit()

    # --- the result -------------------------------------------------------------------------------

    def _take_unsaved(self, event: Failed | TuningFinished) -> None:
        if isinstance(event, TuningFinished) and not event.saved and is_busy(event.others):
            self._unsaved = event
            words = self.tr(
                "Not saved: other programs used {0}% of the CPU, so these figures are too low. Close "
                "them or let them finish, then tune again."
            )
            self._cards.run.show_unsaved(words.format(number(100 * event.others, 0)))

    def _keep_anyway(self) -> None:
        unsaved = self._unsaved
        if unsaved is not None:
            self._room.before_loading(lambda: self._keep(unsaved))

    def _keep(self, unsaved: TuningFinished) -> None:
        self.forget_unsaved()
        self._tuning.keep_anyway(unsaved.result, unsaved.unsaved)

    def _show_result(self, result: TuningResult) -> None:
        if self._unsaved is not None:
            self._cards.race.show_result(result, "", saved=False)
            self._cards.run.set_primary(primary=True)
            return
        client, path = self._client, ""
        if client.model is not None:
            path = client.model.path
        elif client.config is not None and client.state in (EngineState.STARTING, EngineState.LOADING):
            path = client.config.model
        runs = bool(path) and os.path.realpath(path) == os.path.realpath(result.asked.model)
        self._cards.race.show_result(result, result.winner if runs else "")
        self._cards.run.set_primary(primary=not self._cards.race.has_offer)

    def _on_model_loaded(self, _info: object) -> None:
        result = self._cards.race.result
        if result is not None and not self.has_unsaved and not self._cards.race.in_use and not self._tuning.is_running:
            self._show_result(result)

    def _on_recalled(self, result: TuningResult | None) -> None:
        if result is not None and not self._tuning.is_running and not self.has_unsaved:
            self._cards.run.show_idle(again=True)
            self._show_result(result)

    def _use(self, name: str) -> None:
        result = self._cards.race.result
        if result is not None:
            self._room.before_loading(lambda: self._tuning.use(result, name))

    def _on_chosen(self, name: str) -> None:
        self._cards.race.show_in_use(name)
        self._cards.run.set_primary(primary=not self._cards.race.has_offer)
        self._cards.run.show_notes(self.tr("Saved. Loading the model with it."))
