"""What is predicted of a job before it runs, without the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.common.config import BatchJob, SamplingParams
from engine.common.model_info import ModelInfo
from engine.tuning.batch_forecast import ForecastQuestion, forecast_of

ROWS = 40
MODEL = "olmoe-1b-7b"
"""Its shape is known by name; nothing of it needs to be here."""


LOADED = ModelInfo("OLMoE", MODEL, "olmoe", "cpu", "bf16", 2, 1, 1, 1, 1, 8192, 1, 1, 1)


@pytest.fixture
def question(tmp_path: Path, switchyard_home: Path) -> ForecastQuestion:
    file = tmp_path / "in.csv"
    file.write_text("text\n" + "".join(f"some words about row {n}\n" for n in range(ROWS)), encoding="utf-8")
    job = BatchJob(str(file), str(tmp_path / "out.csv"), sampling=SamplingParams(max_tokens=48))
    return ForecastQuestion(job, LOADED, None, None)


def test_rows_together_are_faster_than_alone(question: ForecastQuestion) -> None:
    found = forecast_of(question)
    assert found is not None
    plan = found.plan
    assert (plan.job.rows, plan.batch_rows, plan.job.generated_tokens) == (ROWS, ROWS, 48)
    assert 0 < plan.low < plan.high
    assert 0 < found.alone_tokens_per_s < plan.high
    assert 0 < plan.seconds_low < plan.seconds_high
    assert not plan.is_measured
    counted = forecast_of(replace(question, total=100_000))
    assert counted is not None
    assert counted.plan.job.rows == 100_000
    assert counted.plan.batch_rows < 1000


def test_choices_are_short_answers(question: ForecastQuestion) -> None:
    found = forecast_of(replace(question, job=replace(question.job, choices=("good", "bad"))))
    assert found is not None
    assert found.plan.job.generated_tokens == 2


def test_of_what_is_not_known_nothing_is_said(question: ForecastQuestion, tmp_path: Path) -> None:
    assert forecast_of(replace(question, model=replace(LOADED, path=str(tmp_path / "gone")))) is None
    assert forecast_of(replace(question, job=replace(question.job, input=str(tmp_path / "gone.csv")))) is None
    assert forecast_of(replace(question, job=replace(question.job, template="{{nobody}}"))) is None
    assert forecast_of(replace(question, model=replace(question.model, device="cuda:0"))) is None
