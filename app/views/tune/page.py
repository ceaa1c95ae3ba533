"""The Tune page in four steps that can be visited freely: machine, measurements, plan, timed tokens.

`RunFollowing` shows a run there: its progress, its measurements and its result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QGuiApplication, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask, timer
from app.services.batch_job import JobState
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient, EngineState
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import Settings
from app.services.tuning import Tuning
from app.views.tune.cards import MACHINE, MEASURE, PLAN, TIMED, WIDE_PX, StepBar, TuneCards
from app.views.tune.machine_boxes import PART_OF, machine_boxes
from app.views.tune.phrases import number_words, plan_summary, speed_headline, speed_range, stage_sentence
from app.widgets.asking import ask, before_loading
from app.widgets.banner import Banner
from app.widgets.page import MODELS, Page, add_shortcut
from app.widgets.quantities import memory, number
from app.widgets.scaffold import PageBody, PageHeader, push_button
from app.widgets.starter_offer import StarterOffer
from engine.common.settings import STARTER
from engine.hardware.probe import is_busy
from engine.planner.plan_parts import Plan, TierBytes, total_held
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
from engine.tuning.machine_state import MachineLook
from engine.tuning.result import TuningResult, report_text

LOOK_AGAIN_MS = 10_000


def page_report(look: MachineLook | None, plan: Plan | None, result: TuningResult | None) -> str:
    parts = []
    if look is not None:
        boxes, links = machine_boxes(look, {})
        lines = ["Machine", *(f"  {box.spoken}" for box in boxes), *(f"  {link.spoken}" for link in links)]
        if look.measurements is not None:
            lines.append(f"  Measurements: {look.measurements.kind}, {look.measurements.taken_at}")
            lines += [f"  {note}" for note in look.measurements.notes]
        parts.append("\n".join(lines))
    if plan is not None:
        lines = [f"Plan for {plan.model}", f"  {plan_summary(plan)}", f"  {speed_headline(plan)}, {speed_range(plan)}"]
        if plan.card is not None:
            lines.append(_tier("VRAM", plan.card))
        lines.append(_tier("RAM", plan.ram))
        if plan.disk_bytes:
            lines.append(f"  Disk: {memory(plan.disk_bytes)} of experts, read on demand")
        if plan.streamed_bytes:
            lines.append(f"  Disk: {memory(plan.streamed_bytes)} of layers, read for each token")
        said = filter(None, (plan.sharing_words, plan.bottleneck, plan.what_helps))
        parts.append("\n".join([*lines, *(f"  {each}" for each in said)]))
    if result is not None:
        parts.append(report_text(result))
    return "\n\n".join(parts) + "\n" if parts else ""


def _tier(name: str, tier: TierBytes) -> str:
    held = ", ".join(f"{purpose.replace('_', ' ')} {memory(nbytes)}" for purpose, nbytes in total_held(tier).items())
    return f"  {name} {memory(tier.total)}: {held}, free {memory(tier.free)}"


class TunePage(Page):
    """Follows a run from step to step until the user picks one.

    Args:
        jobs: the window's batch jobs, which a run has to pause.
    """

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        tuning: Tuning,
        jobs: BatchJobs,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._settings = settings
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setAccessibleName(self.tr("Tune"))
        self.tuning = tuning
        self.planning = Planning(self)
        self.cards = TuneCards(settings.default_model)
        self.following = RunFollowing(client, self.tuning, MakingRoom(client, jobs, self), self.cards, self)
        self._listing = LatestTask(self)
        self._plan: Plan | None = None
        self._follows = False
        self._step = MACHINE
        self._planned_with: MachineLook | None = None
        self._shown_changes: tuple[str, ...] = ()
        self._again = timer(self, self._look_again, LOOK_AGAIN_MS)
        self._lay_out()
        self._connect()
        self.show_step(MACHINE)

    @property
    def step(self) -> int:
        return self._step

    def show_step(self, step: int) -> None:
        self._step = step
        self.steps.show_step(step)
        self._arrange()
        self.scrolling.verticalScrollBar().setValue(0)

    def on_outrun(self) -> None:
        if self.isVisible():
            self.recall()

    def recall(self) -> None:
        if not self.tuning.is_running and not self.following.has_unsaved and self.cards.run.is_on_this_pc:
            self.tuning.recall(self.cards.run.model)

    def add_starter(self, offer: StarterOffer) -> None:
        self.cards.run.add_starter(offer)
        offer.ready.connect(self._on_starter)

    def _on_starter(self) -> None:
        self._list_models()
        self._ask_for_plan()

    @property
    def is_in_use(self) -> bool:
        return self.tuning.is_running or self.following.has_unsaved

    def take_over(self, before: Page) -> None:
        if isinstance(before, TunePage):
            super().take_over(before)
            self.show_step(before.step)

    def close_down(self) -> None:
        self.planning.close()
        self.cards.what_if.planning.close()
        self._listing.close()

    # --- building ---------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        self.steps = StepBar(self)
        self.what_if_button = push_button(self, self.tr("What if…"), checkable=True)
        self.copy_button = push_button(self, self.tr("Copy report"))
        self.changed = Banner("info", self)
        self.changed.add_action(self.tr("Dismiss"), self.changed.hide, kind="quiet")
        self.header = header = PageHeader(self.tr("Tune"), self)
        header.set_middle(self.steps)
        header.add_buttons(self.what_if_button, self.copy_button)
        self.scrolling = PageBody(self, self.cards)
        self.lay_out(header, self.changed, body=self.scrolling)

    def _arrange(self) -> None:
        self.cards.show_step(self._step, what_if=self.what_if_button.isChecked(), wide=self.width() >= WIDE_PX)

    def _connect(self) -> None:
        self.steps.chosen.connect(self._on_step)
        self.what_if_button.toggled.connect(self._on_what_if)
        self.cards.what_if.close_wanted.connect(lambda: self.what_if_button.setChecked(False))
        self.copy_button.clicked.connect(self._copy)
        self.cards.run.models_wanted.connect(lambda: self.page_wanted.emit(MODELS))
        self.cards.run.model_chosen.connect(lambda _model: self._on_model())
        following = self.following
        following.began.connect(self._on_began)
        following.reached.connect(self._follow)
        following.planned.connect(self._show_plan)
        following.stopped.connect(self._on_stopped)
        following.ended.connect(self._look)
        self.tuning.looked.connect(self._on_looked)
        self.planning.planned.connect(self._on_planned)
        context = Qt.ShortcutContext.WidgetWithChildrenShortcut
        add_shortcut(self, "Esc", self.tr("Cancel tuning"), following.cancel, context=context)

    # --- the machine ------------------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._arrange()
        self._again.start()
        if self.tuning.is_running:
            return
        self._look()
        self._list_models()
        self.recall()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._again.stop()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        others = (self.header.title, self.what_if_button, self.copy_button)
        room = event.size().width() - sum(widget.sizeHint().width() for widget in others) - 100
        self.steps.show_short(short=self.steps.full_width() > room)
        if (event.size().width() >= WIDE_PX) != (event.oldSize().width() >= WIDE_PX):
            self._arrange()

    def _look(self) -> None:
        self._planned_with = None
        self.tuning.look()

    def _look_again(self) -> None:
        """Other programs allocate and free memory while the page is open."""
        if not self.tuning.is_running and not self.tuning.is_looking:
            self.tuning.look()

    def _list_models(self) -> None:
        self._listing.ask(_models, self._on_listed, lambda _error: self._on_listed(([], [])))

    def _on_listed(self, names: tuple[list[str], list[str]]) -> None:
        self.cards.run.show_models(*names)

    def _on_looked(self, look: MachineLook) -> None:
        self.following.draw_machine()
        if not self.tuning.is_running:
            self.cards.numbers.show_kept(look)
            if self._planned_with is None or look.is_another_situation(self._planned_with):
                self._ask_for_plan()
        if self.tuning.is_running or not look.changed:
            self.changed.hide()
        elif look.changed != self._shown_changes:  # shown once: not again after it was dismissed
            self._shown_changes = look.changed
            said = " ".join(look.changed)
            self.changed.show_text(
                self.tr("Your hardware has changed since the last tuning. {0} Tune again.").format(said)
            )

    # --- planning ---------------------------------------------------------------------------------

    def _on_model(self) -> None:
        self._plan = None
        cards = self.cards
        cards.table.clear()
        cards.race.show_none()
        cards.run.show_notes()
        cards.run.set_primary(primary=True)
        self.following.forget_unsaved()
        if cards.run.is_on_this_pc:
            self.tuning.recall(cards.run.model)
        cards.plan.show_busy(self._model_name())
        self._ask_for_plan()
        if self._step == TIMED:
            self.show_step(PLAN)

    def _ask_for_plan(self) -> None:
        if self.tuning.machine is not None:
            self._planned_with = self.tuning.machine
            config = self._settings.engine(self.cards.run.model)
            self.planning.ask(PlanQuestion(self.tuning.machine, config))

    def _on_planned(self, answer: PlanAnswer) -> None:
        if answer.question.config.model != self.cards.run.model or self.tuning.is_running:
            return
        if answer.plan is not None:
            self._show_plan(answer.plan)
        else:
            self._show_problem(answer.problem)
        self.cards.what_if.show_base(answer.question.look, answer.question.config, answer.plan)

    def _show_plan(self, plan: Plan) -> None:
        self._plan = plan
        self.cards.plan.show_plan(plan, self._model_name(), self.tuning.machine)
        self.cards.roofline.show_picture(plan.roofline)

    def _show_problem(self, problem: str) -> None:
        self._plan = None
        self.cards.plan.show_problem(self._model_name(), problem)
        self.cards.roofline.show_picture(None)

    def _model_name(self) -> str:
        model = self.cards.run.model
        return self.tr("Starter") if model == STARTER else model.rstrip("/").rpartition("/")[2]

    def _on_what_if(self, on: bool) -> None:
        if on and self._step not in (PLAN, TIMED):
            self._follows = False
            self.show_step(PLAN)
        self._arrange()
        if on and self.tuning.machine is not None:
            config = self._settings.engine(self.cards.run.model)
            self.cards.what_if.show_base(self.tuning.machine, config, self._plan)
            self.cards.what_if.card.setFocus()

    # --- a run ------------------------------------------------------------------------------------

    def _on_began(self) -> None:
        self._follows = True
        self._shown_changes = ()
        self.changed.hide()

    def _on_stopped(self, problem: str) -> None:
        if problem:
            self._show_problem(problem)

    def _on_step(self, step: int) -> None:
        self._follows = False
        self.show_step(step)

    def _follow(self, step: int) -> None:
        if self._follows and self._step != step:
            self.show_step(step)

    def _copy(self) -> None:
        text = page_report(self.tuning.machine, self._plan, self.cards.race.result)
        QGuiApplication.clipboard().setText(text)
        self.copy_button.setText(self.tr("Copied"))


def _models() -> tuple[list[str], list[str]]:
    from engine.checkpoint.catalogue import read_catalogue  # imported late: they are slow to load
    from engine.checkpoint.library import list_models

    here = [entry.name for entry in list_models() if entry.can_chat]
    return here, [entry.name for entry in read_catalogue().entries]


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
