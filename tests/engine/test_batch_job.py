"""A job answers every row once, whatever the order, the interruptions and the faults; no model is needed for that."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch_files import result_file
from engine.batch_files.journal import Journal, journal_path, known_jobs, read_answers
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import RowAnswer
from tests.engine.shuffled_executor import ShuffledExecutor, Watch, results_in, run_job, write_rows
from tests.refusals import refused


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path


def test_every_row_has_its_answer_in_the_inputs_order(home: Path) -> None:
    write_rows(home / "in.jsonl", 30)
    watch = Watch(yields=4)
    ending = run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(), watch)
    assert (ending.finished, ending.written) == (True, 30)
    assert (ending.pace.done, ending.pace.failed, ending.pace.total) == (30, 2, 30)
    results = results_in(home / "out.jsonl")
    assert [row["id"] for row in results] == list(range(30))
    assert results[4]["answer"] == "ROW 4"
    assert "nothing in 'text'" in results[3]["problem"]
    assert "too long" in results[5]["problem"]
    assert watch.gave_way == 4
    assert sorted(answer.row for answer, _ in watch.answers) == list(range(30))
    assert ("ROW 4", "row 4") in [(answer.text, question) for answer, question in watch.answers]
    (job,) = known_jobs()
    assert (job.done, job.failed, job.finished_s is not None) == (30, 2, True)


@settings(max_examples=13, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    room=st.integers(1, 9),
    stops=st.lists(st.integers(0, 15), max_size=4),
    yields=st.integers(0, 5),
)
def test_stopped_and_resumed_jobs_answer_each_row_once(
    home: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, room: int, stops: list[int], yields: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    write_rows(folder / "in.jsonl", rows)
    job = BatchJob(str(folder / "in.jsonl"), str(folder / "out.csv"), start="resume")
    seen: list[int] = []
    for stop in stops:
        watch = Watch(yields, cancel_after=stop)
        ending = run_job(job, ShuffledExecutor(seed, room), watch)
        seen += [answer.row for answer, _ in watch.answers]
        assert ending.written == ending.pace.done == len(set(seen))
    watch = Watch(yields)
    ending = run_job(job, ShuffledExecutor(seed, room), watch)
    seen += [answer.row for answer, _ in watch.answers]
    assert ending.finished
    assert sorted(seen) == list(range(rows))
    assert [row["id"] for row in results_in(folder / "out.csv")] == [str(row) for row in range(rows)]


def test_failed_rows_are_asked_again_when_that_is_wanted(home: Path) -> None:
    write_rows(home / "in.jsonl", 8)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    run_job(job, ShuffledExecutor(), Watch())
    executor = ShuffledExecutor()
    ending = run_job(replace(job, start="retry_failed"), executor, Watch())
    assert [row for row, _seed in executor.asked] == [5]
    assert (ending.pace.done, ending.pace.failed) == (8, 2)
    executor = ShuffledExecutor()
    assert run_job(replace(job, start="resume"), executor, Watch()).finished
    assert executor.asked == []


class Speaker(ShuffledExecutor):
    """Answers row n with 4 n tokens, if it may."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[int, int] = {}

    def _answer(self, request: RowRequest) -> RowAnswer:
        wanted, most = 4 * request.row, request.sampling.max_tokens
        self.limits[request.row] = most
        tokens = min(wanted, most)
        return RowAnswer(request.row, "x" * tokens, "length" if wanted > most else "stop", 3, tokens)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_rows_that_were_cut_off_are_counted_and_answered_again_with_more_tokens(home: Path, suffix: str) -> None:
    write_rows(home / "in.jsonl", 10)
    output = home / f"out{suffix}"
    job = BatchJob(str(home / "in.jsonl"), str(output), template="{{id}}", sampling=SamplingParams(max_tokens=11))
    ending = run_job(job, Speaker(), Watch())
    cut = [3, 4, 5, 6, 7, 8, 9]
    assert ending.pace.cut_off == len(cut)
    (known,) = known_jobs()
    assert (known.done, known.cut_off) == (10, len(cut))
    assert [answer.row for answer in read_answers(known.journal, ended="cut_off")] == cut
    again = replace(job, start="redo_cut_off")
    speaker = Speaker()
    ending = run_job(again, speaker, Watch())
    assert speaker.limits == dict.fromkeys(cut, 22)
    assert (ending.pace.done, ending.pace.cut_off, ending.written) == (10, 4, 10)
    with refused(ErrorCode.INVALID_REQUEST, "at least 22 tokens"):
        run_job(replace(again, more_tokens=22), Speaker(), Watch())
    ending = run_job(replace(again, more_tokens=30), Speaker(), Watch(cancel_after=1))
    assert (ending.finished, ending.pace.done, ending.written) == (False, 7, 10)
    speaker = Speaker()
    assert run_job(replace(again, more_tokens=30), speaker, Watch()).pace.cut_off == 2
    assert len(speaker.limits) == 3
    assert set(speaker.limits.values()) == {30}
    run_job(again, Speaker(), Watch())
    assert [len(row["answer"] or "") for row in results_in(output)] == [4 * row for row in range(10)]
    speaker = Speaker()
    assert run_job(again, speaker, Watch()).finished
    assert speaker.limits == {}


def test_a_stopped_redo_is_resumed_with_its_limit_and_loses_no_answer(home: Path) -> None:
    write_rows(home / "in.jsonl", 10)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), sampling=SamplingParams(max_tokens=15))
    run_job(replace(job, template="{{id}}"), Speaker(), Watch())
    job = replace(job, template="{{id}}", start="redo_cut_off")
    ending = run_job(job, Speaker(), Watch(cancel_after=2))
    assert (ending.finished, ending.written, ending.pace.done) == (False, 10, 6)
    (known,) = known_jobs()
    assert (known.done, known.kept) == (6, 10)
    assert all(len(row["answer"]) >= min(15, 4 * row["id"]) for row in results_in(home / "out.jsonl"))
    speaker = Speaker()
    assert run_job(replace(job, start="resume"), speaker, Watch()).finished
    assert set(speaker.limits.values()) == {30}


def test_openai_requests_that_were_cut_off_have_more_than_each_asked_for(home: Path) -> None:
    line = {"custom_id": "", "method": "POST", "url": "/v1/chat/completions"}
    bodies = [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": most} for most in (9, 2, 9, 5)]
    lines = [{**line, "custom_id": str(number), "body": body} for number, body in enumerate(bodies)]
    (home / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    assert run_job(job, Speaker(), Watch()).pace.cut_off == 2
    speaker = Speaker()
    assert run_job(replace(job, start="redo_cut_off"), speaker, Watch()).pace.cut_off == 1
    assert speaker.limits == {1: 4, 3: 10}


def test_a_new_job_discards_nothing(home: Path) -> None:
    write_rows(home / "in.jsonl", 2)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    run_job(job, ShuffledExecutor(), Watch())
    with pytest.raises(EngineError, match="--resume"):
        prepare(job)
    with pytest.raises(EngineError, match="another template"):
        run_job(replace(job, start="resume", template="again {{text}}"), ShuffledExecutor(), Watch())
    executor = ShuffledExecutor()
    run_job(replace(job, start="restart", template="again {{text}}"), executor, Watch())
    assert len(executor.asked) == 2
    assert results_in(home / "out.jsonl")[0]["answer"] == "AGAIN ROW 0"
    (home / "else.jsonl").write_text("mine")
    with pytest.raises(EngineError, match="already exists"):
        prepare(BatchJob(str(home / "in.jsonl"), str(home / "else.jsonl")))


def test_a_cut_answer_is_tried_again_with_another_seed_and_then_given_up(home: Path) -> None:
    write_rows(home / "in.jsonl", 3)
    sampled = SamplingParams(temperature=1.0, seed=10)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), choices=("yes", "no"), tries=3, sampling=sampled)
    executor = ShuffledExecutor(cut={0: 2, 1: 99})
    ending = run_job(job, executor, Watch())
    assert ending.finished
    assert sorted(executor.asked) == [(0, 10), (0, 11), (0, 13), (1, 10), (1, 11), (1, 13), (2, 10)]
    results = results_in(home / "out.jsonl")
    assert [row["answer"] for row in results] == ["yes", "ROW 1", "yes"]
    assert "was cut after" in results[1]["problem"]


def test_a_greedy_answer_that_was_cut_is_not_asked_twice(home: Path) -> None:
    write_rows(home / "in.jsonl", 1)
    executor = ShuffledExecutor(cut={0: 99})
    run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), choices=("yes",)), executor, Watch())
    assert len(executor.asked) == 1


def test_an_input_that_changes_ends_the_job_and_keeps_its_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.jobs.job._CHECK_S", 0.0)
    path = home / "in.jsonl"
    write_rows(path, 40)
    job = BatchJob(str(path), str(home / "out.jsonl"))
    watch = Watch(yields=1)

    def touch_then_change() -> None:
        watch.gave_way += 1
        os.utime(path, ns=(1, 1))
        with open(path, "a") as file:
            file.write('{"text": "one more"}\n')

    watch._give_way = touch_then_change  # type: ignore[method-assign]
    with refused(ErrorCode.INVALID_REQUEST, "changed"):
        run_job(job, ShuffledExecutor(room=10), watch)
    write_rows(path, 40)
    assert run_job(replace(job, start="resume"), ShuffledExecutor(), Watch()).finished


def test_an_input_that_is_only_touched_is_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.jobs.job._CHECK_S", 0.0)
    path = home / "in.jsonl"
    write_rows(path, 20)
    watch = Watch(yields=1)

    def touch() -> None:
        watch.gave_way += 1
        os.utime(path, ns=(1, 1))

    watch._give_way = touch  # type: ignore[method-assign]
    assert run_job(BatchJob(str(path), str(home / "out.jsonl")), ShuffledExecutor(), watch).finished


def test_what_no_sheet_holds_is_refused_before_the_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(home / "in.jsonl", 8)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.xlsx"))
    for limit, least in (("_MOST_SHEET_ROWS", 9), ("_MOST_SHEET_COLUMNS", 7)):  # the header, id and text, five more
        with monkeypatch.context() as patch:
            patch.setattr(result_file, limit, least)
            prepare(job)
            patch.setattr(result_file, limit, least - 1)
            with pytest.raises(EngineError) as refusal:
                prepare(job)
            assert refusal.value.code is ErrorCode.INVALID_REQUEST
            prepare(replace(job, output=str(home / "out.csv")))


@pytest.mark.parametrize("limit", ["_MOST_SHEET_ROWS", "_MOST_SHEET_COLUMNS"])
def test_what_no_sheet_holds_after_all_is_written_as_csv(
    home: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    write_rows(home / "in.jsonl", 8)
    (home / "out.csv").write_text("mine")
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.xlsx"), start="resume")
    assert run_job(job, ShuffledExecutor(), Watch(cancel_after=3)).written < 8
    monkeypatch.setattr(result_file, limit, 5)
    ending = run_job(job, ShuffledExecutor(), Watch())
    assert (ending.finished, ending.written, ending.output) == (True, 8, home / "out-2.csv")
    assert "out-2.csv" in ending.note
    assert "somebody else" not in ending.note
    assert [row["id"] for row in results_in(home / "out-2.csv")] == [str(row) for row in range(8)]
    assert (home / "out.csv").read_text() == "mine"


def test_answers_that_a_full_disk_had_no_room_for_are_not_said_to_be_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 9)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start="resume")
    kept = run_job(job, ShuffledExecutor(), Watch(cancel_after=2))
    assert kept.unkept == 0

    def full(_journal: Journal, answers: list[Answer]) -> None:
        if answers:
            raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")

    watch = Watch(cancel_after=3)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "record", full)
        ending = run_job(job, ShuffledExecutor(), watch)
    assert ending.unkept == len(watch.answers) > 0
    assert ending.pace.done == kept.pace.done
    assert str(ending.unkept) in ending.note or ending.unkept == 1
    assert run_job(job, ShuffledExecutor(), Watch()).written == 9


def test_openai_requests_are_answered_in_their_own_format(home: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    lines[1]["url"] = "/v1/embeddings"
    (home / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(), Watch())
    answers = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in answers] == ["c0", "c2"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "HI"
    errors = [json.loads(line) for line in (home / "out.errors.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in errors] == ["c1"]
    for wrong in (
        BatchJob(str(home / "in.jsonl"), str(home / "o.csv")),
        BatchJob(str(home / "in.jsonl"), str(home / "o.jsonl"), template="{{custom_id}}"),
    ):
        with pytest.raises(EngineError):
            prepare(wrong)


def test_two_runs_of_one_job_at_once_are_refused(home: Path) -> None:
    write_rows(home / "in.jsonl", 2)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start="restart")
    prepared = prepare(job)
    manifest = prepared.manifest("model", "bf16")
    journal = prepared.open_journal(manifest, "tiny")
    with pytest.raises(EngineError) as refusal:
        prepared.open_journal(manifest, "tiny")
    assert refusal.value.code == ErrorCode.BUSY
    assert journal_path(home / "out.jsonl").exists()
    journal.close()


@pytest.mark.parametrize("schema", ['{"type": "objekt"}', '{"$ref": "http://localhost/x.json"}', '{"not": {}}'])
def test_a_schema_that_cannot_be_followed_is_refused_before_the_run(home: Path, schema: str) -> None:
    write_rows(home / "in.jsonl", 2)
    with pytest.raises(EngineError, match="The schema"):
        prepare(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), schema=schema))


def test_what_a_kill_left_half_written_goes_and_what_is_of_no_job_stays(home: Path) -> None:
    write_rows(home / "in.jsonl", 2)
    (home / ".out.csv.0123456789ab.part").write_text("half")
    (home / ".out.csv.mine.part").write_text("of somebody else")
    assert run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.csv")), ShuffledExecutor(), Watch()).finished
    assert sorted(path.name for path in home.glob(".*")) == [".out.csv.mine.part"]
    (home / "mine.csv").write_text("precious")
    with refused(ErrorCode.INVALID_REQUEST, "not written"):
        run_job(BatchJob(str(home / "in.jsonl"), str(home / "mine.csv"), start="resume"), ShuffledExecutor(), Watch())
    assert (home / "mine.csv").read_text() == "precious"
