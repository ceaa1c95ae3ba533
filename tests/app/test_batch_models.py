"""Rows and jobs as tables, without a window; and what is said of them."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtTest import QAbstractItemModelTester

from app.models.batch_rows import (
    MOST_LATEST,
    ROW_ROLE,
    AnsweredRowsModel,
    Column,
)
from app.services.batch_input import free_output, look_at
from app.services.batch_job import JobEntry, JobState
from app.services.batch_sample import SampleRate
from app.views.batch.phrases import (
    clock_text,
    limit_text,
    pace_text,
    plan_text,
    rate_figure,
    rows_text,
    sample_text,
    state_text,
    status_text,
)
from engine.batch_files.opening import InputForm
from engine.common.config import BatchJob
from engine.planner.batch_prediction import Bottleneck, JobPrediction, JobRows
from tests.app.scripted_batches import row

PLAN = JobPrediction(JobRows(300, 0, 48.0), 24, 1, "", 300.0, 150.0, 450.0, 32.0, 96.0, Bottleneck.WEIGHTS)
HEADINGS = ("Row", "Prompt", "Answer", "End", "Tokens")


def entry(state: JobState = JobState.RUNNING, **values: object) -> JobEntry:
    job = BatchJob("/data/in.csv", "/data/out.csv")
    return JobEntry("k", job, state, 100.0, **values)  # type: ignore[arg-type]


def rows_model() -> AnsweredRowsModel:
    model = AnsweredRowsModel(HEADINGS, lambda one: "failed" if one.problem else "complete")
    QAbstractItemModelTester(model, QAbstractItemModelTester.FailureReportingMode.Fatal, model)
    return model


def shown(model: AnsweredRowsModel) -> list[int]:
    return [model.index(n, 0).data(ROW_ROLE).row for n in range(model.rowCount())]


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=400), max_size=6))
def test_the_latest_rows_stand_first_and_are_bounded(batches: list[list[int]]) -> None:
    model = AnsweredRowsModel(HEADINGS, lambda _row: "")
    for batch in batches:
        model.put_latest([row(number) for number in batch])
    everything = [number for batch in batches for number in batch]
    assert shown(model) == everything[::-1][:MOST_LATEST]


def test_what_all_prompts_begin_with_is_left_out_of_the_table() -> None:
    model = rows_model()
    one = row(3)
    model.append([type(one)(3, "Summarise in one line:\nlate parcel", "yes", "stop", 1, "")])
    model.set_beginning("Summarise in one line:\n")
    assert model.index(0, Column.PROMPT).data() == "… late parcel"


# --- words ----------------------------------------------------------------------------------------


def test_a_clock_says_the_day_where_it_is_not_today() -> None:
    now = datetime(2026, 11, 20, 22, 0)
    today, tomorrow = datetime(2026, 11, 20, 22, 40), datetime(2026, 11, 21, 2, 40)
    assert "40" in clock_text(today.timestamp(), now)
    assert "tomorrow" not in clock_text(today.timestamp(), now)
    assert clock_text(tomorrow.timestamp(), now).startswith("tomorrow")
    assert clock_text(datetime(2026, 11, 23, 2, 0).timestamp(), now).startswith("Mon")
    assert clock_text(datetime(2026, 12, 20).timestamp(), now) == "20 Dec"


def test_an_end_is_a_range_of_clock_times() -> None:
    rate, end = pace_text(entry(tokens_per_s=312.4, ends_low_s=1_000.0, ends_high_s=9_000.0))
    assert rate == "312 tokens/s"
    assert end.startswith("done between")
    assert pace_text(entry(ends_low_s=1_000.0, ends_high_s=1_001.0))[1].startswith("done at about")
    assert pace_text(entry()) == ("", "")
    assert pace_text(entry(JobState.PAUSED, tokens_per_s=3.0)) == ("", "")


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_is_said(state: JobState) -> None:
    assert state_text(entry(state))
    assert status_text(entry(state)).endswith((".", "…"))


def test_what_holds_a_job_up_is_said() -> None:
    assert status_text(entry(blocked="Waiting: the disk is full.")) == "Waiting: the disk is full."
    assert status_text(entry(JobState.PAUSED, reason="The engine was killed.")).startswith("The engine was killed.")
    assert status_text(entry(JobState.FAILED, reason="The input was changed.")) == "The input was changed."
    assert rows_text(entry(done=4153, failed=4, total=10120)) == "4,153 of 10,120 rows  ·  4 failed"
    assert rows_text(entry(done=1)) == "1 row done"


def test_a_sample_says_what_it_took() -> None:
    assert sample_text(SampleRate(rows=3, tokens=60, seconds=6.0)) == "3 rows took 6.0 s, at 10 tokens/s."


def test_a_plan_in_words_says_how_sure_it_is() -> None:
    predicted = plan_text(PLAN, 0.0, alone_tokens_per_s=25.0)
    assert "24 rows share each load of a layer's weights; 150 to 450 tokens/s; done by" in predicted
    assert "even if every answer takes all 48 tokens" in predicted
    assert limit_text(PLAN.bottleneck) in predicted
    assert "25 tokens/s" in predicted
    assert "±50%" in predicted
    measured = plan_text(replace(PLAN, is_measured=True, seconds_low=3600.0, seconds_high=7200.0), 0.0)
    assert "done between" in measured
    assert "Measured" in measured
    assert plan_text(replace(PLAN, batch_rows=1, bottleneck="tomorrow's"), 0.0).startswith("Rows are answered one")
    running = status_text(entry(done=1, total=9, plan=PLAN, under_way=8))
    assert running.startswith("8 rows share each load of a layer's weights. Expected: 150 to 450 tokens/s.")


@pytest.mark.parametrize(("measured", "says"), [(2.5, "slower"), (300.0, ""), (900.0, "faster")])
def test_what_is_measured_overrules_what_was_expected(measured: float, says: str) -> None:
    running = status_text(entry(done=1, total=9, plan=PLAN, under_way=8, tokens_per_s=measured))
    assert "Expected" not in running
    for word in ("slower", "faster"):
        assert (word in running) == (word == says)
    assert (rate_figure(measured) in running) == bool(says)
    assert (limit_text(PLAN.bottleneck) in running) == (not says)


# --- the input ------------------------------------------------------------------------------------


def test_a_wrong_encoding_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_bytes("naïve\n".encode("cp1252"))
    assert "encoding" in look_at(file, InputForm()).problem
    assert look_at(file, InputForm(encoding="cp1252")).rows == (("naïve",),)


def test_a_free_name_is_found(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    assert free_output(source, ".csv").name == "in.answers.csv"
    free_output(source, ".csv").touch()
    assert free_output(source, ".csv").name == "in.answers-2.csv"
