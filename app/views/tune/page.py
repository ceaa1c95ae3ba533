"""The Tune page: the machine, its measurements, a plan, timed tokens: four steps that can be gone through freely."""

from __future__ import annotations

import os

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeySequence, QResizeEvent, QShortcut, QShowEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app.models.plan_table import PlanTable
from app.services.background import BackgroundCall
from app.services.engine_client import EngineClient
from app.services.machine_look import MachineLook
from app.services.model_start import wanted_config
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import STARTER, Settings
from app.services.tuning import Tuning
from app.theme import ThemeController
from app.views.tune.arrangement import WIDE_PX, arrange
from app.views.tune.machine_boxes import PART_OF, machine_boxes
from app.views.tune.numbers_card import NumbersCard
from app.views.tune.phrases import number_words, stage_sentence
from app.views.tune.plan_card import PlanCard
from app.views.tune.race_card import RaceCard
from app.views.tune.report import page_report
from app.views.tune.run_card import RunCard
from app.views.tune.step_bar import MACHINE, MEASURE, PLAN, TIMED, StepBar
from app.views.tune.what_if_card import WhatIfCard
from app.widgets.banner import Banner
from app.widgets.card import Card
from app.widgets.machine_picture import MachinePicture
from app.widgets.page_header import PageHeader
from app.widgets.roofline_plot import RooflinePlot
from engine.planner.planned import Plan
from engine.protocol import Failed
from engine.tuning.messages import (
    Measured,
    TuningFinished,
    TuningMeasured,
    TuningNumber,
    TuningPlans,
    TuningProgress,
    TuningTimed,
    Until,
)
from engine.tuning.result import TuningResult


class TunePage(QWidget):
    """Follows a run from step to step until the user goes to one."""

    tuned = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        theme: ThemeController,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._settings = client, settings
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setAccessibleName(self.tr("Tune"))
        self.tuning = Tuning(client, settings, self)
        self.planning = Planning(self)
        self.table = PlanTable(self)
        self._listing: BackgroundCall | None = None
        self._found: dict[Measured, TuningNumber] = {}
        self._plan: Plan | None = None
        self._follows = False
        self._step = MACHINE
        self._columns = 0
        self._was_shown = False
        self._make_widgets(theme)
        self._lay_out()
        self._connect()
        self.show_step(MACHINE)

    def show_step(self, step: int) -> None:
        """Goes to a step."""
        self._step = step
        self.steps.show_step(step)
        self._arrange()
        self.scrolling.verticalScrollBar().setValue(0)

    def close_down(self) -> None:
        """Waits for what runs in the background."""
        self.tuning.close()
        self.planning.close()
        self.what_if.planning.close()
        if self._listing is not None:
            self._listing.wait()

    # --- building ---------------------------------------------------------------------------------

    def _make_widgets(self, theme: ThemeController) -> None:
        self.steps = StepBar(self)
        self.what_if_button = QPushButton(self.tr("What if…"), self)
        self.what_if_button.setCheckable(True)
        self.copy_button = QPushButton(self.tr("Copy report"), self)
        self.changed = Banner("info", theme, self)
        self.changed.add_action(self.tr("Dismiss"), self.changed.hide, kind="quiet")
        self.run_card = RunCard(self._settings.default_model, self)
        self.machine_card = Card(self.tr("Your machine"), self)
        self.machine_card.aside.setText(self.tr("Links grow wider with bandwidth; hollow ones are assumed."))
        self.picture = MachinePicture(theme, self)
        self.machine_card.body.addWidget(self.picture)
        self.machine_card.body.addStretch(1)
        self.numbers = NumbersCard(self)
        self.plan_card = PlanCard(theme, self)
        self.roofline_card = Card(self.tr("Where work belongs"), self)
        self.roofline = RooflinePlot(theme, self)
        self.roofline_card.body.addWidget(self.roofline, 1)
        self.what_if = WhatIfCard(theme, self)
        self.race = RaceCard(self.table, theme, self)
        self._cards = (
            self.machine_card,
            self.numbers,
            self.plan_card,
            self.roofline_card,
            self.what_if,
            self.race,
        )

    def _lay_out(self) -> None:
        self.header = header = PageHeader(self.tr("Tune"), self)
        header.row.setStretch(0, 0)
        header.row.addWidget(self.steps, 0, Qt.AlignmentFlag.AlignVCenter)
        header.row.addStretch(1)
        for button in (self.what_if_button, self.copy_button):
            header.row.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        self.grid = QGridLayout()
        self.grid.setSpacing(14)
        body = QWidget(self)
        for card in self._cards:
            card.setParent(body)
        column = QVBoxLayout(body)
        column.setContentsMargins(20, 16, 20, 20)
        column.setSpacing(14)
        column.addWidget(self.run_card)
        column.addLayout(self.grid)
        column.addStretch(1)
        self.scrolling = QScrollArea(self)
        self.scrolling.setWidgetResizable(True)
        self.scrolling.setFrameShape(QFrame.Shape.NoFrame)
        self.scrolling.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.scrolling.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.scrolling.setWidget(body)
        whole = QVBoxLayout(self)
        whole.setContentsMargins(0, 0, 0, 0)
        whole.setSpacing(0)
        whole.addWidget(header)
        whole.addWidget(self.changed)
        whole.addWidget(self.scrolling, 1)

    def _arrange(self) -> None:
        """Cards of the step in two columns, or in one where two would be cramped."""
        wide = self.width() >= WIDE_PX
        machine: list[tuple[QWidget, int]] = [(self.machine_card, 2), (self.numbers, 1)]
        plan: list[tuple[QWidget, int]] = [(self.plan_card, 2), (self.roofline_card, 1)]
        places: dict[int, list[tuple[QWidget, int]]] = {
            MACHINE: [*machine, *plan],
            MEASURE: [*machine, *plan],
            PLAN: [*plan, *machine],
            TIMED: [(self.race, 3), *plan],
        }
        shown = list(places[self._step])
        if self.what_if_button.isChecked() and self._step in (PLAN, TIMED):
            shown.insert(0, (self.what_if, 3))
        arrange(self.grid, self._cards, shown, wide=wide)

    def _connect(self) -> None:
        self.steps.chosen.connect(self._on_step)
        self.what_if_button.toggled.connect(self._on_what_if)
        self.what_if.close_wanted.connect(lambda: self.what_if_button.setChecked(False))
        self.copy_button.clicked.connect(self._copy)
        self.run_card.model_chosen.connect(lambda _model: self._on_model())
        self.run_card.run_wanted.connect(lambda: self._run(only_measure=False))
        self.run_card.measuring_wanted.connect(lambda: self._run(only_measure=True))
        self.run_card.cancel_wanted.connect(self._cancel)
        self.race.use_wanted.connect(self._use)
        tuning = self.tuning
        tuning.looked.connect(self._on_looked)
        tuning.progressed.connect(self._on_progress)
        tuning.measured.connect(self._on_measured)
        tuning.planned.connect(self._on_contestants)
        tuning.timed.connect(self._on_timed)
        tuning.ended.connect(self._on_ended)
        tuning.recalled.connect(self._on_recalled)
        tuning.chosen.connect(self._on_chosen)
        tuning.problem.connect(lambda sentence: self.run_card.show_notes(sentence))
        self.planning.planned.connect(self._on_planned)
        QShortcut(
            QKeySequence(Qt.Key.Key_Escape), self, self._cancel, context=Qt.ShortcutContext.WidgetWithChildrenShortcut
        )

    # --- looking ----------------------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._arrange()
        if self.tuning.is_running:
            return
        self.tuning.look()
        self._list_models()
        if not self._was_shown:
            self._was_shown = True
            self.tuning.recall(self.run_card.model)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        others = (self.header.title, self.what_if_button, self.copy_button)
        room = event.size().width() - sum(widget.sizeHint().width() for widget in others) - 100
        self.steps.show_short(short=self.steps.full_width() > room)
        if (event.size().width() >= WIDE_PX) != (event.oldSize().width() >= WIDE_PX):
            self._arrange()

    def _list_models(self) -> None:
        if self._listing is None:
            self._listing = BackgroundCall(_library, self)
            self._listing.done.connect(self._on_listed)
            self._listing.failed.connect(lambda _error: self._on_listed([]))
            self._listing.start()

    def _on_listed(self, names: list[str]) -> None:
        self._listing = None
        self.run_card.show_models([STARTER, *names])

    def _on_looked(self, look: MachineLook) -> None:
        self._draw_machine()
        if not self.tuning.is_running:
            self.numbers.show_kept(look)
            self._ask_for_plan()
        if look.changed and not self.tuning.is_running:
            said = " ".join(look.changed)
            self.changed.tell(
                self.tr("The hardware is not what it was when it was last tuned. {0} Tune again.").format(said)
            )
        else:
            self.changed.hide()

    def _draw_machine(self) -> None:
        if self.tuning.machine is not None:
            self.picture.show_machine(*machine_boxes(self.tuning.machine, self._found))

    # --- planning ---------------------------------------------------------------------------------

    def _on_model(self) -> None:
        self._plan = None
        self.table.clear()
        self.race.show_none()
        self.run_card.show_notes()
        self.run_card.set_primary(primary=True)
        self.tuning.recall(self.run_card.model)
        self.plan_card.show_busy(self._model_name())
        self._ask_for_plan()
        if self._step == TIMED:
            self.show_step(PLAN)

    def _ask_for_plan(self) -> None:
        if self.tuning.machine is not None:
            config = wanted_config(self._settings, self.run_card.model)
            self.planning.ask(PlanQuestion(self.tuning.machine, config))

    def _on_planned(self, answer: PlanAnswer) -> None:
        if answer.question.config.model != self.run_card.model or self.tuning.is_running:
            return
        if answer.plan is not None:
            self._show_plan(answer.plan)
        else:
            self._plan = None
            self.plan_card.show_problem(self._model_name(), answer.problem)
            self.roofline.show_picture(None)
        self.what_if.show_base(answer.question.look, answer.question.config, answer.plan)

    def _show_plan(self, plan: Plan) -> None:
        self._plan = plan
        self.plan_card.show_plan(plan, self._model_name(), self.tuning.machine)
        self.roofline.show_picture(plan.roofline)

    def _model_name(self) -> str:
        return (
            self.tr("Starter") if self.run_card.model == STARTER else self.run_card.model.rstrip("/").rpartition("/")[2]
        )

    def _on_what_if(self, on: bool) -> None:
        if on and self._step not in (PLAN, TIMED):
            self._follows = False
            self.show_step(PLAN)
        self._arrange()
        if on and self.tuning.machine is not None:
            config = wanted_config(self._settings, self.run_card.model)
            self.what_if.show_base(self.tuning.machine, config, self._plan)
            self.what_if.card.setFocus()

    # --- a run ------------------------------------------------------------------------------------

    def _run(self, *, only_measure: bool) -> None:
        if self.tuning.is_running:
            return
        self._follows = True
        self._found = {}
        self.changed.hide()
        self.run_card.show_waiting(self.tr("Waiting for the engine"))
        self.numbers.show_found({})
        if not only_measure:
            self.table.clear()
            self.race.show_none()
        self.show_step(MEASURE)
        # Somebody who only measures wants new numbers; whoever tunes takes those that are still true.
        until: Until = "measured" if only_measure else "timed"
        self.tuning.start(
            self.run_card.model, self.run_card.kind, until, measure_again=only_measure or self._has_numbers()
        )
        self.run_card.cancel.setFocus()

    def _has_numbers(self) -> bool:
        """Whether numbers are there already: then pressing the button again means to take them again."""
        return self.tuning.machine is not None and self.tuning.machine.measurements is not None

    def _cancel(self) -> None:
        if self.tuning.is_running and not self.tuning.is_cancelling:
            self.run_card.show_cancelling()
            self.tuning.cancel()

    def _on_step(self, step: int) -> None:
        self._follows = False
        self.show_step(step)

    def _follow(self, step: int) -> None:
        if self._follows and self._step != step:
            self.show_step(step)

    def _on_progress(self, event: TuningProgress) -> None:
        self.run_card.show_progress(stage_sentence(event), event.done)
        number = event.number
        if event.stage in ("loading", "timing"):
            self._follow(TIMED)
            live = number.value if number is not None and event.stage == "timing" else 0.0
            doing = self.tr("is being timed") if event.stage == "timing" else self.tr("is being loaded")
            self.table.show_doing(event.name, doing, live)
        elif event.stage == "measuring" and number is not None:
            known = self._found.get(number.what)
            if known is None or number.value > known.value:
                self._found[number.what] = number
            self.picture.show_at_work(PART_OF.get(number.what))
            self._draw_machine()
            self.numbers.show_found(self._found)
            self.run_card.show_progress(f"{stage_sentence(event)}, {number_words(number)}", event.done)
        elif event.stage == "restoring":
            self.table.stop()

    def _on_measured(self, event: TuningMeasured) -> None:
        self.picture.show_at_work(None)
        self.run_card.show_notes(*event.notes)

    def _on_contestants(self, event: TuningPlans) -> None:
        self._show_plan(event.plan)
        self.table.show_contestants(event.contestants)
        self._follow(PLAN)

    def _on_timed(self, event: TuningTimed) -> None:
        self.table.show_timed(event.timed)

    def _on_ended(self, event: TuningFinished | Failed) -> None:
        had_focus = self.run_card.cancel.hasFocus()
        self.picture.show_at_work(None)
        self.table.stop()
        self._found = {}
        result = event.result if isinstance(event, TuningFinished) else None
        self.run_card.show_idle(again=result is not None)
        if isinstance(event, Failed):
            self.run_card.show_notes(event.message)
        elif event.problem or not event.finished:
            problem = event.problem or self.tr("Cancelled: no result was kept, and everything runs as before.")
            self.run_card.show_notes(problem, event.note)
            if event.problem:
                self.plan_card.show_problem(self._model_name(), event.problem)
        elif result is not None:
            self.run_card.show_notes(event.note)
            self._show_result(result)
            self._follow(TIMED)
            self.tuned.emit()
        else:
            self._follow(PLAN)
        if had_focus:
            (self.race.use if self.race.has_offer else self.run_card.start).setFocus()
        self.tuning.look()

    # --- the result -------------------------------------------------------------------------------

    def _show_result(self, result: TuningResult) -> None:
        loaded = self._client.model
        runs = loaded is not None and os.path.realpath(loaded.path) == os.path.realpath(result.asked.model)
        self.race.show_result(result, result.winner if runs else "")
        self.run_card.set_primary(primary=not self.race.has_offer)

    def _on_recalled(self, result: TuningResult | None) -> None:
        if result is not None and not self.tuning.is_running:
            self.run_card.show_idle(again=True)
            self._show_result(result)

    def _use(self, name: str) -> None:
        if self.race.result is not None:
            self.tuning.use(self.race.result, name)

    def _on_chosen(self, name: str) -> None:
        self.race.show_in_use(name)
        self.run_card.set_primary(primary=not self.race.has_offer)
        self.run_card.show_notes(self.tr("Saved. The model is being loaded with it."))

    def _copy(self) -> None:
        text = page_report(self.tuning.machine, self._plan, self.race.result)
        QGuiApplication.clipboard().setText(text)
        self.copy_button.setText(self.tr("Copied"))


def _library() -> list[str]:
    from engine.checkpoint.library import list_models  # not before it is needed

    return [entry.name for entry in list_models() if not entry.problem]
