"""A plan: its speed, its memory, its bottleneck and what would help."""

from __future__ import annotations

from PySide6.QtWidgets import QLabel, QWidget

from app.theme import use_tabular_figures
from app.views.tune.phrases import disk_warning, plan_summary, speed_headline, speed_range, tier_bars
from app.widgets.card import Card, muted_label
from app.widgets.plan_bars import PlanBars
from app.widgets.quantities import figures
from engine.planner.plan_parts import Plan
from engine.tuning.machine_look import MachineLook


class PlanCard(Card):
    """Shows a plan, or why there is none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Plan"))
        self.speed = QLabel(self)
        self.speed.setProperty("role", "title")
        use_tabular_figures(self.speed)
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
        """A plan for a model."""
        self._fill(plan, "", model)
        self.speed.setText(speed_headline(plan))
        self.range.setText(speed_range(plan))
        self.summary.setText(plan_summary(plan))
        self.bars.show_tiers(tier_bars(plan, look))
        warning = disk_warning(plan, look)
        self.bottleneck.setText(f"{warning}\n{plan.bottleneck}" if warning else plan.bottleneck)
        self.helps.setText(plan.what_helps)
        here = [one for one in plan.alternatives if one.runs_here][:3]
        if here:
            said = ", ".join(
                self.tr("{0} {1}: {2}").format(
                    plan.words(one.precision), one.policy, figures(one.speed.decode_tokens_per_s)
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
