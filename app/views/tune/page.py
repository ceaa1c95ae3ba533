"""The Tune page in four steps that can be visited freely: machine, measurements, plan, timed tokens."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask, timer
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient
from app.services.planning import PlanAnswer, Planning, PlanQuestion
from app.services.settings import Settings
from app.services.tuning import Tuning
from app.views.tune.cards import MACHINE, PLAN, TIMED, WIDE_PX, StepBar, TuneCards
from app.views.tune.machine_boxes import machine_boxes
from app.views.tune.phrases import plan_summary, speed_headline, speed_range
from app.views.tune.run_following import MakingRoom, RunFollowing
from app.widgets.banner import Banner
from app.widgets.page import MODELS, Page, add_shortcut
from app.widgets.quantities import memory
from app.widgets.scaffold import PageBody, PageHeader, push_button
from app.widgets.starter_offer import StarterOffer
from engine.common.settings import STARTER
from engine.planner.plan_parts import Plan, TierBytes, total_held
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
