"""What is said of a job before it runs: the planner's word on it, for the last question asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.batch_forecast import BatchForecasts, Forecast, ForecastQuestion, forecast_of
from engine.batch_files.messages import BatchPlanned
from engine.common.config import BatchJob, SamplingParams
from tests.app.scripted_engine import STARTER

ROWS = 40
MODEL = "olmoe-1b-7b"
"""Its shape is known by name; nothing of it needs to be here."""


@pytest.fixture
def question(tmp_path: Path, switchyard_home: Path) -> ForecastQuestion:
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "".join(f"some words about row {n}\n" for n in range(ROWS)), encoding="utf-8")
    job = BatchJob(str(file), str(tmp_path / "out.csv"), sampling=SamplingParams(max_tokens=48))
    return ForecastQuestion(job, replace(STARTER, path=MODEL), None, None)


def test_rows_together_are_faster_than_alone(question: ForecastQuestion) -> None:
    found = forecast_of(question)
    assert found is not None
    plan = found.plan
    assert (plan.rows, plan.rows_together, plan.tokens_per_row) == (ROWS, ROWS, 48)
    assert 0 < plan.tokens_per_s_low < plan.tokens_per_s_high
    assert 0 < found.alone_tokens_per_s < plan.tokens_per_s_high
    assert 0 < plan.seconds_low < plan.seconds_high
    assert not plan.is_measured
    counted = forecast_of(replace(question, total=100_000))
    assert counted is not None
    assert counted.plan.rows == 100_000
    assert counted.plan.rows_together < 1000


def test_choices_are_short_answers(question: ForecastQuestion) -> None:
    found = forecast_of(replace(question, job=replace(question.job, choices=("good", "bad"))))
    assert found is not None
    assert found.plan.tokens_per_row == 2


def test_of_what_is_not_known_nothing_is_said(question: ForecastQuestion, tmp_path: Path) -> None:
    assert forecast_of(replace(question, model=replace(STARTER, path=str(tmp_path / "gone")))) is None
    assert forecast_of(replace(question, job=replace(question.job, input=str(tmp_path / "gone.csv")))) is None
    assert forecast_of(replace(question, job=replace(question.job, template="{{nobody}}"))) is None
    assert forecast_of(replace(question, model=replace(question.model, device="cuda:0"))) is None


def test_only_the_last_question_is_answered(qapp: QApplication, qtbot: QtBot, question: ForecastQuestion) -> None:
    asked: list[int | None] = []

    def forecast(one: ForecastQuestion) -> Forecast:
        asked.append(one.total)
        return Forecast(BatchPlanned("", 1, 1, "", one.total or 0, 1.0, 1.0, 2.0, 1.0, 2.0, "", is_measured=False))

    forecasts = BatchForecasts(forecast=forecast)
    told: list[Forecast] = []
    forecasts.told.connect(told.append)
    for total in range(5):
        forecasts.ask(replace(question, total=total))
    qtbot.waitUntil(lambda: bool(told))
    assert [one.plan.rows for one in told] == [4]
    assert asked == [4]
    forecasts.ask(replace(question, total=4))  # it has been answered
    forecasts.ask(replace(question, total=7))
    forecasts.forget()
    qtbot.wait(300)
    assert asked == [4]
    forecasts.close()
    forecasts.deleteLater()
