"""The queue of batch jobs, and rows and jobs as tables."""

import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtTest import QAbstractItemModelTester
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.models.batch_rows import MOST_LATEST, ROW_ROLE, AnsweredRowsModel, Column
from app.services.batch_input import free_output, look_at
from app.services.batch_job import JobAnswers, JobEntry, JobState, job_of, load_jobs, save_jobs
from app.services.batch_jobs import BatchJobs
from app.services.batch_sample import BatchSample, SampleRate
from app.services.engine_client import EngineClient, EngineState
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
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, failed
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.planner.batch_prediction import Bottleneck, JobPrediction, JobRows
from engine.protocol import ChatMessage
from tests.app.scripted_batches import ScriptedBatches, row


@pytest.fixture
def engine(qapp: QApplication) -> Iterator[ScriptedBatches]:
    result = ScriptedBatches()
    yield result
    result.deleteLater()


@pytest.fixture
def jobs(engine: ScriptedBatches, switchyard_home: Path) -> Iterator[BatchJobs]:
    ticks = iter(range(1_000, 100_000))
    result = BatchJobs(engine, clock=lambda: float(next(ticks)))
    yield result
    result.close_down()
    result.deleteLater()


def a_job(folder: Path, name: str = "one") -> BatchJob:
    source = folder / f"{name}.csv"
    source.write_text("text,mark\n" + "".join(f"line {n},{n}\n" for n in range(6)), encoding="utf-8")
    return BatchJob(input=str(source), output=str(folder / f"{name}.answers.jsonl"), template="Say {{text}}")


def journal_of(job: BatchJob, *answers: Answer, finished: bool = False) -> None:
    """What an engine would have left."""
    prepared = prepare(job)
    journal = prepared.open_journal(prepared.manifest("m", "fp32"), "Model M")
    journal.record(answers)
    if finished:
        journal.finish()
    journal.close()


def state(jobs: BatchJobs, key: str) -> JobState:
    entry = jobs.entry(key)
    return entry.state


def test_jobs_that_wait_change_places(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    keys = [jobs.add(a_job(tmp_path, name)) for name in ("one", "two", "three", "four")]

    def turns() -> list[int]:
        return [entry.turn for key in keys if (entry := jobs.entry(key)) is not None]

    assert turns() == [0, 1, 2, 3]
    jobs.move(keys[3], -1)
    assert turns() == [0, 1, 3, 2]
    jobs.move(keys[1], 5)
    assert turns() == [0, 3, 2, 1]
    jobs.move(keys[0], 1)  # it runs
    jobs.pause(keys[2])
    assert turns() == [0, 2, 0, 1]
    engine.end(6)
    assert (state(jobs, keys[3]), turns()) == (JobState.RUNNING, [0, 1, 0, 0])


def test_a_job_that_runs_beside_a_chat_shares_the_engine_with_it(
    jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path
) -> None:
    key = jobs.add(a_job(tmp_path, "one"), 6)
    engine.plan()
    engine.generate((), SamplingParams())
    entry = jobs.entry(key)
    assert entry.beside_chat
    assert entry.plan is not None
    engine.finish()
    entry = jobs.entry(key)
    assert not entry.beside_chat


def test_jobs_run_one_after_the_other(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    first = jobs.add(a_job(tmp_path, "one"), 6)
    second = jobs.add(a_job(tmp_path, "two"))
    assert (state(jobs, first), state(jobs, second)) == (JobState.RUNNING, JobState.QUEUED)
    engine.tell(3, 6, failed=1, rate=30.0, left=10.0)
    entry = jobs.entry(first)
    assert (entry.done, entry.failed, entry.total, entry.tokens_per_s) == (3, 1, 6, 30.0)
    assert entry.ends_low_s is not None
    assert entry.ends_high_s == entry.ends_low_s + 10.0
    assert entry.share == 0.5
    engine.end(6, 1)
    assert (state(jobs, first), state(jobs, second)) == (JobState.FINISHED, JobState.RUNNING)
    assert [run.command.job.input for run in engine.jobs] == [str(tmp_path / "one.csv"), str(tmp_path / "two.csv")]


def test_several_jobs_run_at_once_and_each_has_its_own_progress(
    engine: ScriptedBatches, switchyard_home: Path, tmp_path: Path
) -> None:
    most = 2
    jobs = BatchJobs(engine, at_once=lambda: most)
    keys = [jobs.add(a_job(tmp_path, name), 6) for name in ("one", "two", "three")]

    def states() -> list[JobState]:
        return [state(jobs, key) for key in keys]

    assert states() == [JobState.RUNNING, JobState.RUNNING, JobState.QUEUED]
    assert [entry.key for entry in jobs.running] == keys[:2]
    assert [entry.beside_jobs for entry in jobs.running] == [1, 1]
    engine.tell(3, 6, of=0)
    engine.tell(1, 6, failed=1, of=1)
    assert [(entry.done, entry.failed) for entry in jobs.running] == [(3, 0), (1, 1)]
    jobs.pause(keys[0])
    assert states() == [JobState.STOPPING, JobState.RUNNING, JobState.QUEUED]
    engine.end(3, finished=False, of=0)
    assert states() == [JobState.PAUSED, JobState.RUNNING, JobState.RUNNING]
    most = 3
    jobs.resume(keys[0])
    assert states() == [JobState.RUNNING] * 3
    jobs.hold()
    assert len(engine.cancelled) == 4
    for number in (1, 2, 3):
        engine.end(1, finished=False, of=number)
    assert states() == [JobState.QUEUED] * 3
    began = [keys[1], keys[2], keys[0]]
    assert [entry.turn for key in began if (entry := jobs.entry(key)) is not None] == [1, 2, 3]
    jobs.release()
    assert states() == [JobState.RUNNING] * 3
    assert [entry.beside_jobs for entry in jobs.running] == [2, 2, 2]
    jobs.close_down()
    jobs.deleteLater()


def test_a_job_waits_for_a_model(engine: ScriptedBatches, switchyard_home: Path, tmp_path: Path) -> None:
    waiting = ScriptedBatches(loaded=False)
    jobs = BatchJobs(waiting)
    wanted: list[bool] = []
    jobs.model_wanted.connect(lambda: wanted.append(True))
    key = jobs.add(a_job(tmp_path))
    assert state(jobs, key) is JobState.QUEUED
    assert wanted
    waiting.end_loading()
    assert state(jobs, key) is JobState.RUNNING
    wanted.clear()
    jobs.add(replace(a_job(tmp_path, "there"), endpoints=("Rack",)))
    assert not wanted
    jobs.close_down()


def test_pause_and_resume_and_retry(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    key = jobs.add(a_job(tmp_path), 6)
    engine.tell(2, 6)
    jobs.pause(key)
    assert state(jobs, key) is JobState.STOPPING
    assert engine.cancelled == ["b0"]
    engine.end(2, finished=False)
    entry = jobs.entry(key)
    assert (entry.state, entry.reason, entry.done) == (JobState.PAUSED, "", 2)
    jobs.resume(key)
    assert [run.command.job.start for run in engine.jobs] == ["new", "resume"]
    engine.end(6, 2)
    jobs.resume(key, "retry_failed")
    entry = jobs.entry(key)
    assert (entry.done, entry.failed) == (4, 0)
    assert engine.jobs[-1].command.job.start == "retry_failed"
    engine.end(6)
    jobs.resume(key, "restart")
    assert engine.jobs[-1].command.job.start == "restart"


def test_stop_keeps_what_is_answered(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    key = jobs.add(a_job(tmp_path), 6)
    engine.tell(2, 6)
    jobs.stop(key)
    engine.end(3, finished=False)
    entry = jobs.entry(key)
    assert (entry.state, entry.done) == (JobState.STOPPED, 3)


def test_a_dead_engine_pauses_the_job_and_says_why(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    key = jobs.add(a_job(tmp_path), 6)
    engine.tell(2, 6)
    engine.set_state(EngineState.DIED)
    engine.fail_job(ErrorCode.ENGINE_DIED, "The engine was killed (signal 9).")
    entry = jobs.entry(key)
    assert (entry.state, entry.done) == (JobState.PAUSED, 2)
    assert "signal 9" in entry.reason
    engine.set_state(EngineState.READY)
    assert state(jobs, key) is JobState.PAUSED  # what may have killed it is not begun again by itself
    jobs.resume(key)
    assert engine.jobs[-1].command.job.start == "resume"


def test_a_refused_job_says_why_and_the_next_one_runs(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    first, second = jobs.add(a_job(tmp_path, "one")), jobs.add(a_job(tmp_path, "two"))
    engine.fail_job(ErrorCode.INVALID_REQUEST, "The input was changed.")
    entry = jobs.entry(first)
    assert (entry.state, entry.reason) == (JobState.FAILED, "The input was changed.")
    assert state(jobs, second) is JobState.RUNNING


def test_another_model_pauses_the_job(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    key = jobs.add(a_job(tmp_path))
    engine.end(2, finished=False)  # nobody here asked for that
    entry = jobs.entry(key)
    assert entry.state is JobState.PAUSED
    assert "another model" in entry.reason


def test_a_sample_goes_before_the_job_that_runs(jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path) -> None:
    key = jobs.add(a_job(tmp_path, "one"))
    sample = BatchSample(engine, jobs)
    seen: list[object] = []
    sample.answered.connect(lambda rows: seen.extend(rows))
    sample.ended.connect(seen.append)
    sample.start(a_job(tmp_path, "two"))
    assert engine.cancelled == ["b0"]
    engine.end(1, finished=False)
    assert state(jobs, key) is JobState.QUEUED
    engine.answer(row(0), sample=True)
    engine.end_sample()
    assert seen == [row(0), SampleRate(3, 30, 2.0)]
    assert state(jobs, key) is JobState.RUNNING
    assert engine.jobs[-1].command.job.start == "resume"
    sample.deleteLater()


def test_a_removed_job_can_be_brought_back_and_its_result_stays(
    jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path, qtbot: QtBot
) -> None:
    job = a_job(tmp_path)
    journal_of(job, Answer(0, "yes", "stop", 3, 4))
    Path(job.output).write_text("{}", encoding="utf-8")
    with qtbot.waitSignal(jobs.listed):
        jobs.list_again()
    (entry,) = jobs.entries
    jobs.remove(entry.key)
    assert jobs.entries == []
    jobs.restore(entry.key)
    assert jobs.entries == [entry]
    jobs.remove(entry.key)
    jobs.close_down()
    assert not entry.journal.exists()
    assert Path(job.output).exists()


# --- the next start -------------------------------------------------------------------------------


def test_jobs_are_listed_again_from_their_journals(switchyard_home: Path, tmp_path: Path) -> None:
    done, begun = a_job(tmp_path, "done"), a_job(tmp_path, "begun")
    journal_of(done, *(Answer(n, "yes", "stop", 1, 2) for n in range(6)), finished=True)
    journal_of(begun, Answer(0, "yes", "stop", 1, 2), failed(1, "is empty"))
    found = {Path(entry.job.input).stem: entry for entry in load_jobs()}
    assert (found["done"].state, found["done"].total, found["done"].model) == (JobState.FINISHED, 6, "Model M")
    entry = found["begun"]
    assert (entry.state, entry.done, entry.failed, entry.total) == (JobState.PAUSED, 2, 1, None)
    assert entry.job.start == "resume"
    assert entry.job.template == "Say {{text}}"


def test_a_killed_window_finds_its_jobs_paused(
    jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path, qtbot: QtBot
) -> None:
    running, waiting = a_job(tmp_path, "one"), a_job(tmp_path, "two")
    jobs.add(running)
    engine.tell(1, 6)
    jobs.add(waiting, 6)
    journal_of(running, Answer(0, "yes", "stop", 1, 2))
    qtbot.waitUntil(lambda: len(load_jobs()) == 2)
    next_start = BatchJobs(ScriptedBatches())  # the first was never closed
    with qtbot.waitSignal(next_start.listed):
        next_start.list_again()
    found = {Path(entry.job.input).stem: entry for entry in next_start.entries}
    assert {entry.state for entry in found.values()} == {JobState.PAUSED}
    assert (found["one"].done, found["one"].total) == (1, 6)
    assert "was closed" in found["one"].reason
    assert found["two"].job.start == "new"
    next_start.close_down()


def test_jobs_that_were_never_listed_are_not_written_over(jobs: BatchJobs, tmp_path: Path, qtbot: QtBot) -> None:
    jobs.add(a_job(tmp_path, "one"), 6)
    qtbot.waitUntil(lambda: len(load_jobs()) == 1)
    BatchJobs(ScriptedBatches()).close_down()  # another page needed the queue, and nobody looked at its jobs
    assert len(load_jobs()) == 1


def test_a_disk_that_takes_long_stops_nobody_and_the_last_state_is_written(
    jobs: BatchJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, threads = threading.Event(), set[int]()

    def slow(entries: Iterable[JobEntry]) -> None:
        threads.add(threading.get_ident())
        disk.wait(60)
        save_jobs(entries)

    monkeypatch.setattr("app.services.batch_jobs.save_jobs", slow)
    keys = [jobs.add(a_job(tmp_path, name)) for name in ("one", "two")]  # would wait for the disk
    jobs.pause(keys[1])
    assert threading.get_ident() not in threads
    disk.set()
    jobs.close_down()
    assert {entry.key for entry in load_jobs()} == set(keys)


def test_a_list_of_jobs_that_cannot_be_written_is_told(
    jobs: BatchJobs, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_entries: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("app.services.batch_jobs.save_jobs", full)
        with qtbot.waitSignal(jobs.trouble) as told:
            jobs.add(a_job(tmp_path))
    assert "No space left on device" in told.args[0]


@pytest.mark.parametrize("content", ["", "[]", '{"jobs": 3}', '{"jobs": [3, {"job": {}}, {"job": {"input": 1}}]}'])
def test_a_damaged_list_is_no_list(switchyard_home: Path, content: str) -> None:
    from engine.common.paths import jobs_dir

    jobs_dir().mkdir(parents=True)
    (jobs_dir() / "window.json").write_text(content, encoding="utf-8")
    assert load_jobs() == []


def test_a_job_of_another_version_is_no_job() -> None:
    assert job_of({"input": "a", "output": "b", "unheard_of": 1}) is None
    assert job_of({"input": "a", "output": "b", "sampling": {"max_tokens": 0}}) is None


# --- reading answers ------------------------------------------------------------------------------


def test_answers_come_in_pages_with_their_prompts(
    jobs: BatchJobs, engine: ScriptedBatches, tmp_path: Path, qtbot: QtBot
) -> None:
    job = a_job(tmp_path)
    answers = [Answer(n, f"{n}" * 900, "stop", 1, 2) for n in (0, 2, 5)]
    journal_of(job, *answers, failed(3, "is empty"))
    with qtbot.waitSignal(jobs.listed):
        jobs.list_again()
    reader = JobAnswers(jobs.entries[0])
    first = reader.page(-1, limit=2)
    assert [(one.row, one.prompt) for one in first] == [(0, "Say line 0"), (2, "Say line 2")]
    assert len(first[0].answer) < 900
    assert [one.row for one in reader.page(2)] == [3, 5]
    assert [(one.row, one.problem) for one in reader.page(-1, ended="failed")] == [(3, "is empty")]
    whole = reader.whole(2)
    assert (whole.answer, whole.prompt) == ("2" * 900, "Say line 2")
    assert reader.whole(4) is None
    Path(job.input).unlink()
    assert [one.prompt for one in JobAnswers(jobs.entries[0]).page(-1)] == ["", "", "", ""]


def test_a_job_does_not_make_chats_wait(qtbot: QtBot, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("scripted_worker.py")
    client = EngineClient(command=[sys.executable, str(worker)])
    client.start()
    client.load(EngineConfig("any"))
    qtbot.waitUntil(lambda: client.state is EngineState.READY, timeout=60_000)
    client.start_batch(a_job(tmp_path))
    assert client.state is EngineState.READY  # what sends chats asks for this
    client.generate([ChatMessage("user", "count 1")], SamplingParams())
    assert client.state is EngineState.BUSY
    client.close_now()
    client.deleteLater()


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
