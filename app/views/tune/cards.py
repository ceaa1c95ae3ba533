"""The cards of the Tune page, and which of them each step shows."""

from __future__ import annotations

from PySide6.QtWidgets import QGridLayout, QWidget

from app.models.plan_table import PlanTable
from app.views.tune.arrangement import arrange
from app.views.tune.machine_boxes import Found, driver_trouble, machine_boxes
from app.views.tune.numbers_card import NumbersCard
from app.views.tune.phrases import disk_warning, plan_summary, speed_headline, speed_range, tier_bars
from app.views.tune.race_card import RaceCard
from app.views.tune.run_card import RunCard
from app.views.tune.step_bar import MACHINE, MEASURE, PLAN, TIMED
from app.views.tune.what_if_card import WhatIfCard
from app.widgets.machine_picture import MachinePicture
from app.widgets.plan_bars import PlanBars
from app.widgets.quantities import rough
from app.widgets.roofline_plot import RooflinePlot
from app.widgets.scaffold import STRETCH, Card, muted_label, text_label, vbox
from engine.planner.plan_parts import Plan
from engine.tuning.machine_state import MachineLook


class PlanCard(Card):
    """Shows a plan, or why there is none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Plan"))
        self.speed = text_label(self, role="title", tabular=True)
        self.range = muted_label(self)
        self.summary = muted_label(self)
        self.bars = PlanBars(self)
        self.bottleneck = muted_label(self, role="")
        self.helps = muted_label(self)
        self.others = muted_label(self)
        self.problem = muted_label(self, role="")
        for widget in (self.speed, self.range, self.summary):
            self.body.addWidget(widget)
        self.body.addSpacing(4)
        self.body.addWidget(self.bars)
        for label in (self.bottleneck, self.helps, self.others, self.problem):
            self.body.addWidget(label)
        self.body.addStretch(1)
        self.show_busy("")

    def show_busy(self, model: str) -> None:
        """A plan is being made."""
        self._fill(None, self.tr("Planning…"), model)

    def show_problem(self, model: str, sentence: str) -> None:
        """There is no plan, and why."""
        self._fill(None, sentence, model)

    def show_plan(self, plan: Plan, model: str, look: MachineLook | None) -> None:
        self._fill(plan, "", model)
        self.speed.setText(speed_headline(plan))
        self.range.setText(speed_range(plan))
        self.summary.setText(plan_summary(plan))
        self.bars.show_tiers(tier_bars(plan, look))
        warning = disk_warning(plan, look)
        self.bottleneck.setText("\n".join(filter(None, (warning, plan.sharing_words, plan.bottleneck))))
        self.helps.setText(plan.what_helps)
        here = [one for one in plan.alternatives if one.runs_here][:3]
        if here:
            said = ", ".join(
                self.tr("{0} {1}: {2}").format(
                    plan.words(one.precision), one.policy, rough(one.speed.decode_tokens_per_s)
                )
                for one in here
            )
            self.others.setText(self.tr("Alternatives, in tokens/s: {0}.").format(said))
        self.others.setVisible(bool(here))

    def _fill(self, plan: Plan | None, problem: str, model: str) -> None:
        self.set_heading(self.tr("Plan for {0}").format(model) if model else self.tr("Plan"))
        for widget in (self.speed, self.range, self.summary, self.bars, self.bottleneck, self.helps, self.others):
            widget.setVisible(plan is not None)
        self.problem.setText(problem)
        self.problem.setVisible(bool(problem))


class TuneCards(QWidget):
    """The run card on top, the others below in the order that suits the step."""

    def __init__(self, model: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.run = RunCard(model, self)
        self.machine = Card(self.tr("Your machine"), self)
        self.machine.caption.setText(self.tr("Wider links have more bandwidth; hollow ones are assumed."))
        self.picture = MachinePicture(self)
        self.machine_note = muted_label(self, self.tr("Looking up the hardware…"))
        self.machine.body.addWidget(self.picture)
        self.machine.body.addWidget(self.machine_note)
        self.machine.body.addStretch(1)
        self.numbers = NumbersCard(self)
        self.plan = PlanCard(self)
        self.work = Card(self.tr("Where to compute"), self)
        self.roofline = RooflinePlot(self)
        self.work.body.addWidget(self.roofline, 1)
        self.what_if = WhatIfCard(self)
        self.table = PlanTable(self)
        self.race = RaceCard(self.table, self)
        self._all = (self.machine, self.numbers, self.plan, self.work, self.what_if, self.race)
        self._grid = QGridLayout()
        self._grid.setSpacing(14)
        vbox(self.run, self._grid, STRETCH, into=self, margins=(20, 16, 20, 20), gap=14)

    def show_machine(self, look: MachineLook, found: Found) -> None:
        """The machine's picture, with what a run has measured so far; below it any driver problem."""
        self.picture.show_machine(*machine_boxes(look, found))
        note = driver_trouble(look)
        self.machine_note.setText(note)
        self.machine_note.setVisible(bool(note))

    def show_step(self, step: int, *, what_if: bool, wide: bool) -> None:
        """Shows a step's cards, in two columns, or in one where those would be cramped.

        Args:
            what_if: whether to show the what-if card; it belongs to the plan step.
        """
        machine: list[tuple[QWidget, int]] = [(self.machine, 2), (self.numbers, 1)]
        plan: list[tuple[QWidget, int]] = [(self.plan, 2), (self.work, 1)]
        places: dict[int, list[tuple[QWidget, int]]] = {
            MACHINE: [*machine, *plan],
            MEASURE: [*machine, *plan],
            PLAN: [*plan, *machine],
            TIMED: [(self.race, 3), *plan],
        }
        shown = list(places[step])
        if what_if and step in (PLAN, TIMED):
            shown.insert(0, (self.what_if, 3))
        arrange(self._grid, self._all, shown, wide=wide)
