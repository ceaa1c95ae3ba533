"""The Tune page with a scripted engine: a run to its end, cancelled anywhere, and an engine that dies in the middle."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QPointF, Qt
from PySide6.QtGui import QGuiApplication, QMouseEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

import app.services.planning as planning
import app.services.tuning as tuning
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineState
from app.services.planning import PlanAnswer, PlanQuestion
from app.services.settings import Settings
from app.views.tune.cards import MACHINE, MEASURE, PLAN, TIMED
from app.views.tune.page import TunePage
from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.hardware.measured import load_measurements
from engine.protocol import (
    Failed,
    TuningFinished,
    TuningMeasured,
    TuningNumber,
    TuningPlans,
    TuningProgress,
    TuningTimed,
)
from engine.tuning.machine_state import MachineLook, look_at_machine
from engine.tuning.result import Fact, TuningResult, busy_note
from engine.tuning.saved_results import results_of, save_result
from tests.app import tuning_results as made
from tests.app.scripted_engine import STARTER, ScriptedEngine

LOOK = made.look(made.gpu())
PATIENCE_MS = 60_000
"""What runs in the background may be kept waiting by whatever else the machine does."""


class Scene:
    """A page, its engine, and the machine that it sees."""

    def __init__(self, page: TunePage, engine: ScriptedEngine, qtbot: QtBot) -> None:
        self.page, self.engine, self.qtbot = page, engine, qtbot

    def tell(self, event: object) -> None:
        self.engine.tunings[-1].deliver(event)

    def progress(self, stage: str, name: str = "", done: float = 0.5, number: TuningNumber | None = None) -> None:
        self.tell(TuningProgress(self.id, stage, name, done, number))  # type: ignore[arg-type]

    @property
    def id(self) -> str:
        return self.engine.tunings[-1].id

    def start(self) -> None:
        QTest.mouseClick(self.page.cards.run.start, Qt.MouseButton.LeftButton)

    def upto(self, stage: str) -> None:
        """Events of a run until, and with, the first of a stage."""
        plan = made.plan(LOOK)
        steps: dict[str, Callable[[], None]] = {
            "waiting": lambda: None,
            "probing": lambda: self.progress("probing"),
            "measuring": lambda: self.progress(
                "measuring", "RAM", 0.2, TuningNumber("ram", "8 threads", 58e9, "bytes/s")
            ),
            "planning": self._measured,
            "loading": lambda: (
                self.tell(TuningPlans(self.id, plan, made.CONTESTANTS)),
                self.progress("loading", made.CONTESTANTS[0].name),
            ),  # type: ignore[func-returns-value]
            "timing": lambda: self.progress(
                "timing", made.CONTESTANTS[0].name, 0.3, TuningNumber("decode", "", 21.5, "tokens/s")
            ),
            "restoring": lambda: self.progress("restoring", "starter"),
        }
        for name, do in steps.items():
            do()
            if name == stage:
                return

    def _measured(self) -> None:
        self.tell(
            TuningMeasured(self.id, "cuda:0", "quick", "2026-11-21T07:00:00+00:00", False, ("It became hot.",), ())
        )
        self.progress("planning")

    def finish(self, result: TuningResult | None = None, **other: object) -> None:
        ending = TuningFinished(self.id, result is not None, result, True, None)
        self.engine.set_state(EngineState.READY)
        self.engine.tunings[-1].end(replace(ending, **other))  # type: ignore[arg-type]

    def die(self) -> None:
        self.engine.state = EngineState.READY  # no answer was under way: what ends is told below
        self.engine.die()
        self.engine.tunings[-1].end(Failed(self.id, ErrorCode.ENGINE_DIED, "The engine was killed (signal 9)."))


@pytest.fixture
def scene(qtbot: QtBot, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(tuning, "look_at_machine", lambda *_: LOOK)
    monkeypatch.setattr(planning, "answer", _planned)
    engine = ScriptedEngine()
    service, jobs = tuning.Tuning(engine, settings), BatchJobs(engine)  # type: ignore[arg-type]
    page = TunePage(engine, settings, service, jobs)  # type: ignore[arg-type]
    qtbot.addWidget(page)
    page.resize(1072, 800)
    page.show()
    qtbot.waitUntil(
        lambda: bool(page.cards.picture.accessibleDescription()) and page._plan is not None, timeout=PATIENCE_MS
    )
    yield Scene(page, engine, qtbot)
    page.close_down()
    service.close()
    jobs.close_down()


def _planned(question: PlanQuestion) -> PlanAnswer:
    if question.config.model == "huge":
        return PlanAnswer(question, None, "huge does not fit on this machine: nearest would be 96.0 GB of RAM in all.")
    plan = made.plan(question.look)
    if question.change is not None:
        plan = replace(plan, speed=replace(plan.speed, decode_tokens_per_s=240.0))
    return PlanAnswer(question, plan)


def test_before_anything_is_run(scene: Scene) -> None:
    page = scene.page
    assert page.cards.plan.speed.text().endswith("tokens/s")
    assert page.cards.table.rowCount() == 0
    assert page.cards.machine.isVisible()
    assert page.cards.run.start.isEnabled()
    for step in (TIMED, PLAN, MEASURE, MACHINE):  # every step can be gone to
        QTest.mouseClick(page.steps._group.button(step), Qt.MouseButton.LeftButton)
        assert page.cards.race.isVisible() == (step == TIMED)
    page.copy_button.click()
    text = QGuiApplication.clipboard().text()
    assert "RTX 4060" in text
    assert "Plan for" in text
    run = page.cards.run  # where there is room its buttons stand in one line
    run.resize(1000, run.height())
    QApplication.sendPostedEvents()
    buttons = (run.quick, run.thorough, run.measure_only, run.start)
    assert len({button.mapTo(run, button.rect().center()).y() for button in buttons}) == 1
    page.resize(700, 600)  # short names
    page.activateWindow()
    for number, step in enumerate((MACHINE, MEASURE, PLAN, TIMED), 1):
        assert page.steps._group.button(step).shortcut().toString() == f"Alt+{number}"
    page.show_step(MACHINE)
    assert page.steps._group.button(PLAN).shortcut().toString() == "Alt+3"


def test_a_run_to_its_end(scene: Scene) -> None:
    page = scene.page
    scene.start()
    assert scene.engine.tunings[0].command.config.model == "starter"
    assert page.cards.run.cancel.isVisible()
    scene.upto("measuring")
    assert page.step == MEASURE
    assert "58.0 GB/s" in page.cards.run.doing.text()
    scene.upto("planning")
    assert "hot" in page.cards.run.notes.text()
    scene.upto("timing")
    assert page.step == TIMED
    assert page.cards.table.rows[0].live == 21.5
    scene.tell(TuningTimed(scene.id, made.timed(made.CONTESTANTS[0], 24.6)))
    scene.upto("restoring")
    scene.finish(made.result(LOOK))
    assert "13.9 → after 24.6" in page.cards.race.gain.text()
    assert page.cards.table.rows[-1].problem
    assert not page.cards.run.cancel.isVisible()
    assert page.cards.race.use.isVisible()  # another model is loaded than the one that was tuned
    assert not page.tuning.is_running


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("stage", ["waiting", "probing", "measuring", "planning", "loading", "timing", "restoring"])
def test_cancelled_at_any_step(scene: Scene, stage: str) -> None:
    page = scene.page
    scene.start()
    scene.upto(stage)
    QTest.mouseClick(page.cards.run.cancel, Qt.MouseButton.LeftButton)
    QTest.mouseClick(page.cards.run.cancel, Qt.MouseButton.LeftButton)
    assert scene.engine.cancelled == [scene.id]
    assert not page.cards.run.cancel.isEnabled()
    scene.progress("restoring", "starter")
    assert "Cancelling" in page.cards.run.doing.text()
    scene.finish(note="The model that was loaded is not loaded now: no memory.")
    assert "Cancelled" in page.cards.run.notes.text()
    assert "no memory" in page.cards.run.notes.text()
    assert page.cards.run.start.isVisible()
    assert all(not row.doing and not row.live for row in page.cards.table.rows)
    scene.start()
    assert len(scene.engine.tunings) == 2


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("stage", ["waiting", "measuring", "timing"])
def test_the_engine_dies_in_the_middle(scene: Scene, stage: str) -> None:
    scene.start()
    scene.upto(stage)
    scene.die()
    assert "killed" in scene.page.cards.run.notes.text()
    assert scene.page.cards.run.start.isVisible()
    scene.start()  # starts it again
    assert scene.engine.state is EngineState.BUSY


def test_the_second_click_of_a_double_click_does_not_cancel(scene: Scene) -> None:
    scene.start()
    cancel = scene.page.cards.run.cancel
    at = QPointF(cancel.rect().center())
    for kind in (QEvent.Type.MouseButtonDblClick, QEvent.Type.MouseButtonRelease):
        button = Qt.MouseButton.LeftButton
        QCoreApplication.sendEvent(cancel, QMouseEvent(kind, at, at, button, button, Qt.KeyboardModifier.NoModifier))
    assert scene.engine.cancelled == []
    QTest.mouseClick(cancel, Qt.MouseButton.LeftButton)
    first = scene.id
    assert scene.engine.cancelled == [first]
    scene.finish()
    scene.start()
    scene.upto("measuring")
    scene.page.following.cancel()  # by Escape
    assert scene.engine.cancelled == [first, scene.id]


def busy_result() -> TuningResult:
    return replace(made.result(LOOK), others=0.94, notes=(busy_note(0.94),))


def test_what_other_programs_spoiled_is_not_saved_until_somebody_says_so(scene: Scene) -> None:
    page, result = scene.page, busy_result()
    scene.engine.model = replace(STARTER, path="/models/m")
    scene.start()
    scene.progress("waiting", "94%", 0.1)
    assert "94%" in page.cards.run.doing.text()
    scene.upto("timing")
    scene.finish(result, saved=False, others=0.94, unsaved=made.measurements(LOOK.probe))
    run, race = page.cards.run, page.cards.race
    assert "94%" in run.unsaved.text()
    assert run.unsaved.isVisibleTo(run)
    assert "From now on" not in race.verdict.text()
    assert not race.use.isVisibleTo(race)
    assert not race.keep.isVisibleTo(race)
    assert not any(row.is_winner for row in page.cards.table.rows)
    assert results_of(result.model_mark) == []
    page.recall()  # coming back to the page does not take it away
    assert page.cards.race.result == result
    QTest.mouseClick(run.keep, Qt.MouseButton.LeftButton)
    scene.qtbot.waitUntil(lambda: bool(scene.engine.loads), timeout=PATIENCE_MS)
    assert results_of(result.model_mark) == [result]
    assert race.in_use == result.winner
    assert race.warning.isVisibleTo(race)  # saved or not, its figures are too low
    assert not run.unsaved.isVisibleTo(run)
    assert not run.keep.isVisibleTo(run)


def test_only_measuring_under_load_is_not_saved_either(scene: Scene) -> None:
    run = scene.page.cards.run
    QTest.mouseClick(run.measure_only, Qt.MouseButton.LeftButton)
    scene.upto("measuring")
    taken = replace(made.measurements(LOOK.probe), others=0.5)
    scene.finish(finished=True, saved=False, others=0.5, unsaved=taken)
    assert "50%" in run.unsaved.text()
    assert load_measurements(LOOK.probe, "cuda:0") is None
    QTest.mouseClick(run.keep, Qt.MouseButton.LeftButton)
    scene.qtbot.waitUntil(lambda: load_measurements(LOOK.probe, "cuda:0") == taken, timeout=PATIENCE_MS)
    assert scene.engine.loads == []


def test_another_run_forgets_what_was_not_saved(scene: Scene) -> None:
    scene.start()
    scene.finish(busy_result(), saved=False, others=0.94)
    scene.start()
    assert not scene.page.following.has_unsaved
    scene.finish(made.result(LOOK))
    assert not scene.page.cards.race.warning.isVisibleTo(scene.page)
    assert not scene.page.cards.run.unsaved.isVisibleTo(scene.page)
    race = scene.page.cards.race  # a result that was outrun says so
    race.show_result(replace(made.result(LOOK), outrun=53.1), "")
    assert "53.1" in race.warning.text()
    assert "24.6" in race.warning.text()
    race.show_result(made.result(LOOK), "")
    assert not race.warning.isVisibleTo(race)


def test_while_it_is_timed_the_plan_takes_the_timed_figure(scene: Scene) -> None:
    plan = scene.page.cards.plan
    scene.start()
    scene.upto("timing")
    assert "measured" not in plan.range.text()
    scene.tell(TuningTimed(scene.id, replace(made.timed(made.CONTESTANTS[0], 24.6), others=0.9)))
    assert "24.6" not in plan.speed.text()  # other programs have spoiled it
    scene.tell(TuningTimed(scene.id, made.timed(made.CONTESTANTS[0], 17.2)))
    assert plan.speed.text().startswith("17.2")
    assert "measured" in plan.range.text()
    assert "23.8" in plan.range.text()  # what had been predicted, and why it is another figure


def test_a_model_that_fits_nowhere(scene: Scene) -> None:
    page = scene.page
    page.cards.run.models.typed.setText("huge")
    page.cards.run.models.typed.editingFinished.emit()
    scene.qtbot.waitUntil(lambda: "nearest would be" in page.cards.plan.problem.text(), timeout=PATIENCE_MS)
    assert not page.cards.plan.speed.isVisible()
    assert not page.cards.run.start.isEnabled()  # it is not in the library: it can be planned for alone
    page.cards.run.choose("starter")
    assert page.cards.run.start.isEnabled()


def test_who_walks_on_is_not_called_back_and_a_run_may_find_no_room(scene: Scene) -> None:
    scene.start()
    QTest.mouseClick(scene.page.steps._group.button(MACHINE), Qt.MouseButton.LeftButton)
    scene.upto("timing")
    assert scene.page.step == MACHINE
    scene.finish(problem="m does not fit on this machine: the nearest that fits is int4.")
    assert "int4" in scene.page.cards.run.notes.text()


def test_only_measuring(scene: Scene) -> None:
    QTest.mouseClick(scene.page.cards.run.measure_only, Qt.MouseButton.LeftButton)
    assert scene.engine.tunings[0].command.until == "measured"
    scene.upto("measuring")
    scene.finish(finished=True)
    assert scene.page.step == PLAN


def test_a_result_of_earlier_is_in_use_once_its_model_is_loaded(scene: Scene) -> None:
    page = scene.page
    page.tuning.recalled.emit(made.result(LOOK))
    assert page.cards.race.use.isVisibleTo(page.cards.race)
    loaded = replace(STARTER, path="/models/m")
    scene.engine.end_loading(loaded)
    assert not page.cards.race.use.isVisibleTo(page.cards.race)
    assert page.cards.race.in_use == made.result(LOOK).winner


def test_keeping_the_old_way(scene: Scene) -> None:
    loaded = replace(STARTER, path="/models/m")
    scene.engine.model = loaded
    scene.start()
    scene.upto("timing")
    result = made.result(LOOK)
    scene.finish(result, loaded=loaded)
    page = scene.page
    assert not page.cards.race.use.isVisible()  # it is in use already
    QTest.mouseClick(page.cards.race.keep, Qt.MouseButton.LeftButton)
    scene.qtbot.waitUntil(lambda: bool(scene.engine.loads), timeout=PATIENCE_MS)
    assert scene.engine.loads[0].command.config.model == "/models/m"
    assert results_of(result.model_mark)[0].winner == made.CONTESTANTS[2].name
    assert page.cards.race.use.isVisible()
    assert not page.cards.race.keep.isVisible()
    QTest.mouseClick(page.cards.race.use, Qt.MouseButton.LeftButton)
    scene.qtbot.waitUntil(lambda: len(scene.engine.loads) == 2, timeout=PATIENCE_MS)
    assert results_of(result.model_mark)[0].winner == made.CONTESTANTS[0].name


def test_what_if(scene: Scene) -> None:
    page = scene.page
    page.what_if_button.click()
    card = page.cards.what_if
    assert page.step == PLAN
    for typed, meant in (("4090", "RTX 4090, 24 GB"), ("7900 xtx", "RX 7900 XTX, 24 GB")):
        card.card.typed.setText(typed)
        card.card.typed.editingFinished.emit()
        assert card.card.currentText().endswith(meant)
        scene.qtbot.waitUntil(lambda: "240" in card.result.text(), timeout=PATIENCE_MS)
    card.card.typed.setText("Voodoo 2")
    card.card.typed.editingFinished.emit()
    assert card.words.text().startswith("No graphics card called “Voodoo 2” is known")
    assert not card.result.isVisible()
    card.card.typed.setText("3080 20 gb")  # of another memory than the listed one
    card.card.typed.editingFinished.emit()
    scene.qtbot.waitUntil(lambda: "240" in card.result.text(), timeout=PATIENCE_MS)
    card.reset.click()
    assert "Change something" in card.words.text()
    card.close_button.click()
    assert not card.isVisible()


def test_what_if_for_a_model_of_the_catalogue(scene: Scene) -> None:
    page, run = scene.page, scene.page.cards.run
    scene.qtbot.waitUntil(lambda: run.models.findText("Qwen3 30B A3B Instruct 2507") > 0, timeout=PATIENCE_MS)
    run.models.typed.setText("qwen3 30b")
    run.models.typed.editingFinished.emit()
    assert run.model == "Qwen3 30B A3B Instruct 2507"
    assert not run.start.isEnabled()  # it is not here: it can be planned for, not timed
    assert run.others.isVisible()
    with scene.qtbot.waitSignal(page.page_wanted, timeout=PATIENCE_MS):
        run.others.click()
    page.what_if_button.click()
    card = page.cards.what_if
    card.card.typed.setText("4090")
    card.card.typed.editingFinished.emit()
    scene.qtbot.waitUntil(lambda: "240" in card.result.text(), timeout=PATIENCE_MS)


def test_other_hardware_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    look = replace(LOOK, changed=("The RAM was 16 GiB and is now 32 GiB.",))
    monkeypatch.setattr(tuning, "look_at_machine", lambda *_: look)
    scene.page.tuning.look()
    scene.qtbot.waitUntil(scene.page.changed.isVisible, timeout=PATIENCE_MS)
    assert "16 GiB" in scene.page.changed.text
    scene.page.changed.hide()
    with scene.qtbot.waitSignal(scene.page.tuning.looked, timeout=PATIENCE_MS):
        scene.page.tuning.look()
    assert not scene.page.changed.isVisible()  # dismissed is dismissed
    scene.start()
    scene.upto("measuring")
    scene.finish()
    scene.qtbot.waitUntil(scene.page.changed.isVisible, timeout=PATIENCE_MS)


def test_what_is_wrong_with_a_driver_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    page, card = scene.page, made.look()
    assert not page.cards.machine_note.isVisibleTo(page)
    broken = "The NVIDIA driver was updated and no longer matches the loaded one: restart the computer."
    monkeypatch.setattr(tuning, "look_at_machine", lambda *_: replace(card, probe=replace(card.probe, gpu_note=broken)))
    page.tuning.look()
    scene.qtbot.waitUntil(lambda: page.cards.machine_note.isVisibleTo(page), timeout=PATIENCE_MS)
    assert page.cards.machine_note.text() == broken
    monkeypatch.setattr(tuning, "look_at_machine", lambda *_: card)
    page.tuning.look()
    scene.qtbot.waitUntil(lambda: not page.cards.machine_note.isVisibleTo(page), timeout=PATIENCE_MS)
    assert "No NVIDIA driver was found" in page.cards.picture.accessibleDescription()


def test_plans_follow_what_other_programs_take(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    page, card = scene.page, made.gpu()
    asked: list[PlanQuestion] = []
    monkeypatch.setattr(page.planning, "ask", asked.append)
    for free_gib, plans in ((6.8, 0), (3.0, 1), (3.1, 1), (6.9, 2)):
        look = made.look(replace(card, free_bytes=round(free_gib * made.GIB)))
        monkeypatch.setattr(tuning, "look_at_machine", lambda *_, look=look: look)
        with scene.qtbot.waitSignal(page.tuning.looked, timeout=PATIENCE_MS):
            page._look_again()
        assert len(asked) == plans


def test_what_changed_since_is_found(switchyard_home: Path) -> None:
    now: MachineLook = look_at_machine()
    assert now.changed == ()
    here = made.result(now)
    other = replace(here, model_mark="f" * 16, machine=(Fact("RAM", "1 GiB"), *here.machine))
    other = replace(other, machine=tuple(fact for fact in other.machine if (fact.name, fact.value) != ("RAM", "")))
    other = replace(other, machine=tuple({fact.name: fact for fact in reversed(other.machine)}.values()))
    save_result(other)
    assert any("RAM was 1 GiB" in one for one in look_at_machine().changed)
    save_result(here)
    assert look_at_machine().changed == ()


def test_nothing_is_planned_for_a_question_that_was_overtaken(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def slow(question: PlanQuestion) -> PlanAnswer:
        asked.append(question.config.model)
        return PlanAnswer(question, None, question.config.model)

    monkeypatch.setattr(planning, "answer", slow)
    one = planning.Planning()
    told: list[SimpleNamespace] = []
    one.planned.connect(told.append)
    for name in ("a", "b", "c"):
        one.ask(PlanQuestion(LOOK, EngineConfig(name)))
    qtbot.waitUntil(lambda: bool(told), timeout=PATIENCE_MS)
    assert asked == ["c"]
    one.close()
