"""A tuning run wants the engine to itself; a model that outruns its tuning is noticed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication, QMessageBox, QWidget
from pytestqt.qtbot import QtBot

from app.services.batch_job import JobState
from app.services.batch_jobs import BatchJobs
from app.services.tuning_outrun import TuningOutrun
from app.views.tune.page import MakingRoom
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.protocol import Finished
from engine.tuning.result import TuningResult
from tests.app import tuning_results as made
from tests.app.scripted_batches import ScriptedBatches
from tests.app.scripted_engine import STARTER, ScriptedEngine


class Scene:
    """A job or an answer under way, and what was run."""

    def __init__(self, page: QWidget, folder: Path) -> None:
        self.engine = ScriptedBatches()
        self.jobs = BatchJobs(self.engine, page)  # type: ignore[arg-type]
        self.page, self.folder = page, folder
        self.room = MakingRoom(self.engine, self.jobs, page)  # type: ignore[arg-type]
        self.runs = 0

    def run(self) -> None:
        self.runs += 1

    def start_job(self, name: str = "one") -> str:
        source = self.folder / f"{name}.txt"
        source.write_text("a\nb\n", encoding="utf-8")
        key = self.jobs.add(BatchJob(str(source), str(self.folder / f"{name}.jsonl")), 2)
        self.engine.tell(1, 2)
        return key

    def state(self, key: str) -> JobState:
        entry = self.jobs.entry(key)
        return entry.state

    def question(self) -> QMessageBox | None:
        boxes = [box for box in self.page.findChildren(QMessageBox) if box.isVisible()]
        return boxes[0] if boxes else None

    def answer(self, label: str) -> None:
        box = self.question()
        assert box is not None
        next(button for button in box.buttons() if button.text() == label).click()


@pytest.fixture
def scene(qtbot: QtBot, qapp: QApplication, switchyard_home: Path, tmp_path: Path) -> Iterator[Scene]:
    page = QWidget()
    qtbot.addWidget(page)
    page.show()
    scene = Scene(page, tmp_path)
    yield scene
    scene.jobs.close_down()


def test_nothing_is_asked_of_an_idle_engine(scene: Scene) -> None:
    scene.room.before_run(scene.run)
    assert (scene.runs, scene.question()) == (1, None)
    assert scene.room.run_ended() == ""


def test_a_job_is_paused_only_if_the_user_agrees(scene: Scene) -> None:
    key = scene.start_job()
    scene.room.before_run(scene.run)
    box = scene.question()
    assert "No answered row is lost" in box.informativeText()
    assert box.defaultButton().text() == "Cancel"
    scene.answer("Cancel")
    assert (scene.runs, scene.state(key), scene.engine.cancelled) == (0, JobState.RUNNING, [])


def test_a_paused_job_goes_on_by_itself(scene: Scene) -> None:
    key = scene.start_job()
    scene.room.before_run(scene.run)
    scene.answer("Pause it and tune")
    assert scene.runs == 1
    assert scene.engine.cancelled == ["b0"]
    scene.engine.end(1, finished=False)
    assert scene.state(key) is JobState.QUEUED
    assert len(scene.engine.jobs) == 1  # it is held, though the engine could
    assert scene.room.run_ended() == ""
    assert scene.state(key) is JobState.RUNNING
    assert scene.engine.jobs[-1].command.job.start == "resume"


def test_a_job_does_not_go_on_in_another_precision(scene: Scene) -> None:
    key, later = scene.start_job(), scene.start_job("later")
    scene.room.before_run(scene.run)
    scene.answer("Pause it and tune")
    scene.engine.end(1, finished=False)
    scene.engine.model = replace(STARTER, precision="int4")
    said = scene.room.run_ended()
    assert "one.jsonl" in said
    assert "began in bf16" in said
    assert "now runs in int4" in said
    assert scene.state(key) is JobState.PAUSED
    assert scene.state(later) is JobState.RUNNING  # it had not begun: nothing of it is in another precision


def test_a_job_that_is_added_meanwhile_waits(scene: Scene) -> None:
    scene.start_job()
    scene.engine.end(2)
    scene.room.before_run(scene.run)
    later = scene.jobs.add(BatchJob(str(scene.folder / "one.txt"), str(scene.folder / "later.jsonl")))
    assert scene.state(later) is JobState.QUEUED
    scene.room.run_ended()
    assert scene.state(later) is JobState.RUNNING


def test_an_answer_is_waited_for_or_stopped(scene: Scene) -> None:
    scene.engine.answering = (scene.engine.generate([], SamplingParams()),)
    scene.room.before_run(scene.run)
    scene.answer("Cancel")
    assert (scene.runs, scene.engine.cancelled) == (0, [])
    scene.room.before_run(scene.run)
    scene.answer("Tune after the answer")
    assert (scene.runs, scene.engine.cancelled) == (1, [])
    scene.room.before_run(scene.run)
    scene.answer("Stop the answer")
    assert (scene.runs, scene.engine.cancelled) == (2, ["r0"])


def test_other_settings_pause_a_job_only_if_the_user_agrees(scene: Scene) -> None:
    scene.room.before_loading(scene.run)
    assert scene.runs == 1
    key = scene.start_job()
    scene.room.before_loading(scene.run)
    scene.answer("Cancel")
    assert (scene.runs, scene.state(key)) == (1, JobState.RUNNING)
    scene.room.before_loading(scene.run)
    scene.answer("Pause the job")
    assert (scene.runs, scene.state(key)) == (2, JobState.STOPPING)


TUNED = replace(STARTER, device_note="Tuned on 21 Nov 2026: 2.5 tokens/s.")


def answer(rate: float, tokens: int = 100) -> Finished:
    return Finished("r", "stop", 10, 0, tokens, 0.1, rate)


class Checks:
    """What was compared, and what came of it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.result: TuningResult | None = None

    def __call__(self, _path: str, _config: EngineConfig, rate: float) -> TuningResult | None:
        self.rates.append(rate)
        return self.result


@pytest.fixture
def checks() -> Checks:
    return Checks()


@pytest.fixture
def watched(qtbot: QtBot, checks: Checks) -> Iterator[tuple[TuningOutrun, ScriptedEngine]]:
    engine = ScriptedEngine()
    engine.model, engine.config = TUNED, EngineConfig("starter")
    outrun = TuningOutrun(engine, check=checks)  # type: ignore[arg-type]
    yield outrun, engine
    outrun.close()


def test_a_much_faster_answer_is_noticed(
    qtbot: QtBot, watched: tuple[TuningOutrun, ScriptedEngine], checks: Checks
) -> None:
    outrun, engine = watched
    checks.result = replace(made.result(), outrun=53.1)
    with qtbot.waitSignal(outrun.noticed, timeout=60_000) as told:
        engine.answered.emit(answer(53.1))
    assert told.args == [checks.result]


def test_only_what_is_news_is_compared(
    qtbot: QtBot, watched: tuple[TuningOutrun, ScriptedEngine], checks: Checks
) -> None:
    outrun, engine = watched
    engine.answered.emit(answer(99.0, tokens=3))  # too short to say anything
    engine.model = STARTER
    engine.answered.emit(answer(99.0))  # was never tuned
    assert checks.rates == []
    engine.model = TUNED
    for rate in (20.0, 19.0, 21.0):
        engine.answered.emit(answer(rate))
        qtbot.waitUntil(lambda: not outrun._checking.is_busy, timeout=60_000)
    assert checks.rates == [20.0, 21.0]
