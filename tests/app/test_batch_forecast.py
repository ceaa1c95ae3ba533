"""Forecasts of a job are made in the background, for the last question asked."""

from dataclasses import replace

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.batch_sample import BatchForecasts
from engine.common.config import BatchJob
from engine.planner.batch_prediction import JobRows
from engine.tuning.batch_forecast import Forecast, ForecastQuestion
from tests.app.scripted_batches import PLAN
from tests.app.scripted_engine import STARTER


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
