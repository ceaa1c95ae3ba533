"""Plans timed on the real engine, and the result: before and after, and which plan is in use."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.models.plan_table import PlanTable
from app.views.tune.race_view import RaceView
from app.widgets.quantities import figures, number
from app.widgets.scaffold import STRETCH, Card, hbox, muted_label, push_button, set_message, text_label, warning_label
from engine.tuning.report import verdict
from engine.tuning.result import TuningResult
from engine.tuning.saved_results import day


class RaceCard(Card):
    """Signals: `use_wanted(str)`, the name of the plan to use for the model."""

    use_wanted = Signal(str)

    def __init__(self, table: PlanTable, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Timed on the real engine"))
        self._table = table
        self._result: TuningResult | None = None
        self._in_use = ""
        self._is_saved = True
        self.empty = muted_label(
            self, self.tr("Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.")
        )
        self.view = RaceView(table, self)
        self.gain = text_label(self, role="title", tabular=True)
        self.verdict = muted_label(self, role="")
        self.warning = warning_label(self)
        self.use = push_button(self, self.tr("Use winner now"), self._use, kind="primary")
        self.keep = push_button(self, self.tr("Keep as before"), self._keep)
        buttons = hbox(self.use, self.keep, STRETCH)
        self.legend = muted_label(
            self,
            self.tr("Bars: measured, which is what counts. Brackets: the predicted range."),
            role="caption",
        )
        self.body.addWidget(self.empty)
        self.body.addWidget(self.view)
        self.body.addWidget(self.legend)
        self.body.addWidget(self.gain)
        self.body.addWidget(self.warning)
        self.body.addWidget(self.verdict)
        self.body.addLayout(buttons)
        self.body.addStretch(1)
        table.modelReset.connect(self._show_table)
        self.show_none()

    @property
    def result(self) -> TuningResult | None:
        return self._result

    @property
    def in_use(self) -> str:
        """Name of the plan in use by the loaded model; empty if it is not loaded."""
        return self._in_use

    @property
    def has_offer(self) -> bool:
        """Whether the winning plan is not in use yet: its button is then the page's primary one."""
        return self.use.isVisibleTo(self)

    def show_none(self) -> None:
        """Nothing was timed, or timing is in progress: there is nothing to choose."""
        self._result = None
        self.caption.setText("")
        for widget in (self.gain, self.verdict, self.warning, self.use, self.keep):
            widget.hide()
        self._show_table()

    def show_result(self, result: TuningResult, in_use: str, *, saved: bool = True) -> None:
        """A complete result.

        Args:
            in_use: name of the plan in use by the loaded model; empty if it is not loaded.
            saved: whether it is saved; otherwise no plan can be chosen from it.
        """
        self._result, self._in_use, self._is_saved = result, in_use, saved
        self._table.show_result(result)
        if not saved:
            self._table.show_winner("")
        self.caption.setText(self.tr("{0}, {1}").format(result.model, day(result.taken_at)))
        before, won = result.before, result.won
        gained = won is not None and not won.contestant.is_before and saved and result.is_trusted
        if gained and won is not None and before is not None and before.tokens_per_s:
            words = self.tr("Before {0} → after {1} tokens/s")
            self.gain.setText(words.format(figures(before.tokens_per_s), figures(won.tokens_per_s)))
        elif won is not None:
            self.gain.setText(self.tr("{0} tokens/s").format(figures(won.tokens_per_s)))
        self.gain.setVisible(won is not None and saved)
        set_message(
            self.warning, self._doubt(result) if saved else ""
        )  # else it is shown beside the button that saves it
        notes = () if result.was_busy else result.notes  # the warning covers all of them
        self.verdict.setText("\n".join((verdict(result, saved=saved), *notes)))
        self.verdict.show()
        self._show_buttons()

    def show_in_use(self, name: str) -> None:
        """The user has chosen a plan."""
        self._in_use, self._is_saved = name, True
        if self._result is not None:
            set_message(self.warning, self._doubt(self._result))
        self._table.show_winner(name)
        self._show_buttons()
        chosen = next((one for one in self._table.rows if one.contestant.name == name), None)
        if chosen is not None:
            words = self.tr("This model now runs with it: {0}, {1} tokens/s.")
            self.verdict.setText(words.format(name, figures(chosen.tokens_per_s)))

    # --- inside -----------------------------------------------------------------------------------

    def _show_table(self) -> None:
        is_empty = self._table.rowCount() == 0
        self.empty.setVisible(is_empty)
        self.view.setVisible(not is_empty)
        self.legend.setVisible(not is_empty)

    def _show_buttons(self) -> None:
        best = self._best()
        before = self._result.before if self._result is not None else None
        self.use.setVisible(best is not None and self._in_use != best)
        able = self._is_saved and before is not None and not before.problem and before.contestant.name != best
        self.keep.setVisible(able and before is not None and self._in_use != before.contestant.name)

    def _doubt(self, result: TuningResult) -> str:
        """Why the figures are unreliable, and what to do; empty if they are fine."""
        if result.outrun and result.won is not None:
            return self.tr(
                "This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was "
                "busy then. Plans no longer use these figures. Tune again."
            ).format(figures(result.outrun), figures(result.won.tokens_per_s))
        if result.was_busy:
            return self.tr(
                "Other programs used {0}% of the CPU while this was timed: every figure is too low, and the "
                "wrong plan may have won. Plans do not use these figures. Tune again when those programs have "
                "finished."
            ).format(number(100 * result.others, 0))
        return ""

    def _best(self) -> str | None:
        """The winning plan, whatever was chosen since; None if the result is not saved."""
        return self._result.winner or None if self._result is not None and self._is_saved else None

    def _use(self) -> None:
        best = self._best()
        if best is not None:
            self.use_wanted.emit(best)

    def _keep(self) -> None:
        before = self._result.before if self._result is not None else None
        if before is not None:
            self.use_wanted.emit(before.contestant.name)
