"""Work in the background: the latest question is the one that is answered; garbage and signals on any thread."""

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main import GarbageCollection
from app.services.background import LatestTask, TaskQueue
from app.services.batch_sample import BatchForecasts
from engine.common.config import BatchJob
from engine.planner.batch_prediction import JobRows
from engine.tuning.batch_forecast import Forecast, ForecastQuestion
from tests.app.scripted_batches import PLAN
from tests.app.scripted_engine import STARTER


class Gate:
    """A function that waits until it is let through."""

    def __init__(self, result: object = None) -> None:
        self.result = result
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self) -> object:
        self.begun.set()
        self.open.wait(60)
        return self.result


@pytest.fixture
def owner(qapp: QApplication) -> Iterator[QObject]:
    result = QObject()
    yield result
    result.deleteLater()


def test_a_result_comes_back_on_the_thread_that_asked(owner: QObject, qtbot: QtBot) -> None:
    task, told = LatestTask(owner), list[tuple[int, bool]]()
    task.ask(lambda: 42, lambda result: told.append((result, threading.current_thread() is threading.main_thread())))
    assert task.is_busy
    assert told == []
    qtbot.waitUntil(lambda: told == [(42, True)])
    assert not task.is_busy


def test_an_error_is_told_or_logged_by_its_kind(owner: QObject, qtbot: QtBot, caplog: pytest.LogCaptureFixture) -> None:
    task, told = LatestTask(owner), list[Exception]()
    task.ask(lambda: {}["what was written"], failed=told.append)
    qtbot.waitUntil(lambda: bool(told))
    assert isinstance(told[0], KeyError)
    with caplog.at_level(logging.WARNING, "switchyard.background"):
        task.ask(lambda: {}["what was written"])
        qtbot.waitUntil(lambda: bool(caplog.records))
    assert "KeyError" in caplog.text
    assert "what was written" not in caplog.text


def test_only_the_latest_question_is_answered(owner: QObject, qtbot: QtBot) -> None:
    task, told, first = LatestTask(owner), list[object](), Gate("first")
    ran: list[str] = []

    def question(name: str) -> Callable[[], str]:
        def ask() -> str:
            ran.append(name)
            return name

        return ask

    task.ask(first, told.append)
    assert first.begun.wait(60)
    for name in ("second", "third"):
        task.ask(question(name), told.append)
    first.open.set()
    qtbot.waitUntil(lambda: not task.is_busy)
    assert told == ["third"]
    assert ran == ["third"]  # the second never ran


def test_what_is_forgotten_is_not_told_and_the_next_question_is(owner: QObject, qtbot: QtBot) -> None:
    task, told, gate = LatestTask(owner), list[object](), Gate("old")
    task.ask(gate, told.append)
    assert gate.begun.wait(60)
    task.forget()
    assert not task.is_busy
    task.ask(lambda: "new", told.append)
    gate.open.set()
    qtbot.waitUntil(lambda: bool(told))
    assert told == ["new"]


def test_who_types_asks_once(owner: QObject, qtbot: QtBot) -> None:
    task, told, ran = LatestTask(owner, after_ms=20), list[int](), list[int]()
    for number in range(3):
        task.ask(lambda number=number: ran.append(number), lambda _: told.append(0))  # type: ignore[misc]
    assert task.is_busy
    assert ran == []
    qtbot.waitUntil(lambda: told == [0])
    assert ran == [2]


def test_closing_waits_for_what_runs_and_begins_nothing(owner: QObject, qtbot: QtBot) -> None:
    task, told, ran = LatestTask(owner), list[object](), list[int]()
    gate = Gate()
    task.ask(gate, told.append)
    assert gate.begun.wait(60)
    task.ask(lambda: ran.append(1), told.append)
    gate.open.set()
    task.close()
    qtbot.wait(1)
    assert (told, ran) == ([], [])


def test_a_queue_runs_everything_in_order_and_closing_waits_for_all_of_it(owner: QObject, qtbot: QtBot) -> None:
    queue, told, ran = TaskQueue(owner), list[object](), list[int]()
    gate = Gate(0)
    queue.add(gate, told.append)
    for number in (1, 2, 3):
        queue.add(lambda number=number: ran.append(number) or number, told.append)  # type: ignore[misc]
    gate.open.set()
    queue.close()
    assert ran == [1, 2, 3]
    qtbot.waitUntil(lambda: told == [0, 1, 2, 3])
    assert not queue.is_busy


def test_one_failure_in_a_queue_stops_nothing(owner: QObject, qtbot: QtBot) -> None:
    queue, told = TaskQueue(owner), list[object]()
    queue.add(lambda: 1 // 0, told.append, lambda error: told.append(type(error)))
    queue.add(lambda: "next", told.append)
    qtbot.waitUntil(lambda: told == [ZeroDivisionError, "next"])


def test_nobody_is_told_once_the_owner_is_gone(qapp: QApplication, qtbot: QtBot) -> None:
    owner, told, gate = QObject(), list[object](), Gate()
    task = LatestTask(owner)
    task.ask(gate, told.append)
    assert gate.begun.wait(60)
    thread = task._thread
    with qtbot.waitSignal(owner.destroyed):
        owner.deleteLater()
    gate.open.set()
    thread.join()
    qtbot.wait(1)
    assert told == []


def test_a_thread_that_allocates_collects_nothing(qapp: QApplication, qtbot: QtBot) -> None:
    destroyed_on: list[threading.Thread] = []

    class Service(QObject):
        """In a cycle with itself, its timer running: destroyed on another thread, it would leave the timer behind."""

        def __init__(self) -> None:
            super().__init__()
            self._me = self
            self._ticking = QTimer(self, interval=1)
            self._ticking.start()

        def __del__(self) -> None:
            destroyed_on.append(threading.current_thread())

    gc.enable()
    owner = QObject()
    GarbageCollection(owner)
    Service()
    kept: list[list[int]] = []
    allocating = threading.Thread(target=lambda: kept.extend([n] for n in range(20 * gc.get_threshold()[0])))
    allocating.start()
    allocating.join()
    assert destroyed_on == []
    qtbot.waitUntil(lambda: bool(destroyed_on))
    assert destroyed_on == [threading.main_thread()]
    owner.deleteLater()


CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_hundred_thousand_emits_do_not_abort_the_interpreter() -> None:
    script = (
        "import app\n"
        "from PySide6.QtCore import QObject, Signal\n"
        "class Source(QObject):\n"
        "    said = Signal(object)\n"
        "source = Source()\n"
        "for n in range(100_000):\n"
        "    source.said.emit(n)\n"
        "    source.setObjectName('x')\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr


@pytest.fixture
def question() -> ForecastQuestion:
    return ForecastQuestion(BatchJob("in.csv", "out.csv"), STARTER, None, None)


def test_only_the_last_question_is_answered(qapp: QApplication, qtbot: QtBot, question: ForecastQuestion) -> None:
    asked: list[int | None] = []

    def forecast(one: ForecastQuestion) -> Forecast:
        asked.append(one.total)
        return Forecast(replace(PLAN, job=JobRows(one.total or 0, 0, 1.0)))

    forecasts = BatchForecasts(forecast=forecast)
    told: list[Forecast] = []
    forecasts.answered.connect(told.append)
    for total in range(5):
        forecasts.ask(replace(question, total=total))
    qtbot.waitUntil(lambda: bool(told))
    assert [one.plan.job.rows for one in told] == [4]
    assert asked == [4]
    forecasts.ask(replace(question, total=4))  # it has been answered
    forecasts.ask(replace(question, total=7))
    forecasts.forget()
    qtbot.wait(300)
    assert asked == [4]
    forecasts.close()
    forecasts.deleteLater()
