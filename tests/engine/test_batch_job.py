"""A job answers every row once, whatever the order, the interruptions and the faults, replaces the files that it wrote
itself and no other, and leaves the engine's thread to chats; no model is needed for that."""

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch_files import result_file
from engine.batch_files.job_watcher import Between, JobWatcher, run_in_background
from engine.batch_files.journal import Journal, known_jobs, read_answers
from engine.batch_files.openai_format import errors_path
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, Row, RowRequest
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from tests.engine.shuffled_executor import ShuffledExecutor, Watch, results_in, run_job, write_rows
from tests.refusals import refused


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.01)
    monkeypatch.setattr("engine.jobs.job._REPORT_S", 0.0)
    monkeypatch.setattr("engine.batch_files.journal._LOCK_S", 0.05)
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

    def _answer(self, request: RowRequest) -> Answer:
        wanted, most = 4 * request.row, request.sampling.max_tokens
        self.limits[request.row] = most
        tokens = min(wanted, most)
        return Answer(request.row, "x" * tokens, "length" if wanted > most else "stop", 3, tokens)


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
            with refused(ErrorCode.INVALID_REQUEST):
                prepare(job)
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


def write_requests(path: Path, count: int = 3, wrong: int = 1) -> None:
    """OpenAI requests, of which one fails."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count)
    ]
    lines[wrong]["url"] = "/v1/embeddings"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refuses(action: Callable[[], object], *files: Path) -> EngineError:
    """The refusal of what would touch these files, which are as they were."""
    before = [file.read_bytes() for file in files]
    with pytest.raises(EngineError) as refusal:
        action()
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
    assert [file.read_bytes() for file in files] == before
    return refusal.value


def run(job: BatchJob, watch: Watch | None = None) -> object:
    return run_job(job, ShuffledExecutor(), watch or Watch())


class Meanwhile(Watch):
    """Something happens while the job runs."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__(yields=1)
        self._happens = happens

    def _give_way(self) -> None:
        super()._give_way()
        self._happens()


# --- the input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["new", "resume", "restart", "retry_failed"])
def test_an_input_where_the_errors_would_go_is_refused(home: Path, start: str) -> None:
    source = home / "job.errors.jsonl"
    write_requests(source)
    job = BatchJob(str(source), str(home / "job.jsonl"), start=start)  # type: ignore[arg-type]
    refuses(lambda: run(job), source)
    assert [path.name for path in home.glob("job*")] == ["job.errors.jsonl"]


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("derived", [False, True])
def test_an_input_by_another_name_is_the_input(home: Path, link: Callable[[Path, Path], None], derived: bool) -> None:
    source, output = home / "in.jsonl", home / "out.jsonl"
    write_requests(source)
    other = errors_path(output) if derived else output
    link(source, other)
    job = BatchJob(str(source), str(output), start="restart")
    refuses(lambda: prepare(job), source)
    refuses(lambda: prepare(replace(job, input=str(other))), source) if derived else None
    folder = home / "folder"
    folder.mkdir()
    link(source, folder / "linked.jsonl")
    refuses(lambda: prepare(replace(job, input=str(folder))), source)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_an_output_within_the_input_by_another_way_is_refused(home: Path) -> None:
    folder = home / "folder"
    (folder / "deep").mkdir(parents=True)
    write_rows(folder / "in.jsonl", 2)
    (home / "other").symlink_to(folder, target_is_directory=True)
    (home / "deeper").symlink_to(folder / "deep", target_is_directory=True)
    for source, output in ((folder, "other/out.jsonl"), (home / "other", "folder/out.jsonl"), (folder, "deeper/o.csv")):
        with pytest.raises(EngineError, match="input"):
            prepare(BatchJob(str(source), str(home / output)))


# --- what is there before the job -----------------------------------------------------------------


@pytest.mark.parametrize("start", ["new", "resume", "restart"])
def test_an_errors_file_of_somebody_else_is_refused(home: Path, start: str) -> None:
    write_requests(home / "in.jsonl")
    errors = home / "out.errors.jsonl"
    errors.write_text("mine")
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start=start)  # type: ignore[arg-type]
    assert "out.errors.jsonl" in refuses(lambda: run(job), errors).message
    errors.unlink()
    errors.mkdir()
    with pytest.raises(EngineError):
        run(job)


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_that_leads_nowhere_is_somebodys(home: Path) -> None:
    write_rows(home / "in.jsonl", 2)
    (home / "out.jsonl").symlink_to(home / "gone.jsonl")
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    for start in ("new", "resume"):
        with pytest.raises(EngineError):
            run(replace(job, start=start))  # type: ignore[arg-type]
    run(replace(job, start="restart"))
    assert not (home / "gone.jsonl").exists()
    assert len(results_in(home / "out.jsonl")) == 2


def test_names_that_cannot_be_are_refused_and_long_ones_can_be(home: Path) -> None:
    write_requests(home / "in.jsonl")
    long = "x" * 249 + ".jsonl"
    with pytest.raises(EngineError, match=r"errors\.jsonl"):
        prepare(BatchJob(str(home / "in.jsonl"), str(home / long)))
    with pytest.raises(EngineError):
        prepare(BatchJob(str(home / "in.jsonl"), str(home / ("x" * 400 + ".jsonl"))))
    write_rows(home / "rows.jsonl", 2)
    run(BatchJob(str(home / "rows.jsonl"), str(home / long)))
    assert len(results_in(home / long)) == 2


# --- what appears or changes meanwhile ------------------------------------------------------------


@pytest.mark.parametrize("start", ["new", "restart"])
def test_a_file_that_appears_during_the_job_stays_and_the_result_is_beside_it(home: Path, start: str) -> None:
    write_requests(home / "in.jsonl")
    output, errors = home / "out.jsonl", home / "out.errors.jsonl"
    if start == "restart":
        output.write_text("to be replaced")

    def appear() -> None:
        output.write_text("precious")
        errors.write_text("precious, too")

    job = BatchJob(str(home / "in.jsonl"), str(output), start=start)  # type: ignore[arg-type]
    ending = run_job(job, ShuffledExecutor(), Meanwhile(appear))
    assert (output.read_text(), errors.read_text()) == ("precious", "precious, too")
    assert (ending.output, ending.errors) == (home / "out-2.jsonl", home / "out.errors-2.jsonl")
    assert "out-2.jsonl" in ending.note
    assert "out.errors-2.jsonl" in ending.note
    assert ending.finished
    assert len((home / "out-2.jsonl").read_text().splitlines()) == 2
    (known,) = known_jobs()
    assert (known.output, known.errors) == (str(home / "out-2.jsonl"), str(home / "out.errors-2.jsonl"))
    refuses(lambda: run(replace(job, start="resume")), output, errors)
    output.unlink()
    errors.unlink()
    ending = run_job(replace(job, start="resume"), ShuffledExecutor(), Watch())
    assert (ending.output, ending.errors, ending.note) == (output, errors, "")


def test_a_result_that_was_edited_is_not_replaced(home: Path) -> None:
    write_rows(home / "in.jsonl", 4)
    output = home / "out.csv"
    job = BatchJob(str(home / "in.jsonl"), str(output))
    run(job)
    output.write_text(output.read_text() + "a remark\n")
    for start in ("resume", "retry_failed"):
        refuses(lambda: run(replace(job, start=start)), output)  # type: ignore[arg-type]  # noqa: B023
        with pytest.raises(EngineError):
            prepare(replace(job, start=start)).require_own_files()  # type: ignore[arg-type]
    (known,) = known_jobs()
    assert known.finished_s is not None
    assert known.done == 4
    run(replace(job, start="restart"))
    assert "a remark" not in output.read_text()


def test_what_a_job_wrote_it_writes_again(home: Path) -> None:
    write_requests(home / "in.jsonl")
    output, errors = home / "out.jsonl", home / "out.errors.jsonl"
    job = BatchJob(str(home / "in.jsonl"), str(output), start="resume")
    run_job(job, ShuffledExecutor(), Watch(cancel_after=1))
    run_job(job, ShuffledExecutor(), Watch())
    for file in (output, errors):  # away and back again: the same, though its time is another
        shutil.copyfile(file, home / "away")
        file.unlink()
        shutil.copyfile(home / "away", file)
        os.utime(file, ns=(1, 1))
    ending = run_job(replace(job, start="retry_failed"), ShuffledExecutor(), Watch())
    assert (ending.output, ending.errors) == (output, errors)
    ending = run_job(replace(job, start="restart"), ShuffledExecutor(), Watch())
    assert (ending.output, ending.errors) == (output, errors)
    assert sorted(path.name for path in home.glob("*out*")) == ["out.errors.jsonl", "out.jsonl"]


def test_errors_that_are_none_any_more_go_if_they_are_the_jobs(home: Path) -> None:
    write_requests(home / "in.jsonl")
    output, errors = home / "out.jsonl", home / "out.errors.jsonl"
    job = BatchJob(str(home / "in.jsonl"), str(output))
    run(job)
    text = (home / "in.jsonl").read_text().replace("/v1/embeddings", "/v1/chat/completions")
    (home / "in.jsonl").write_text(text)
    keep = Meanwhile(lambda: errors.write_text("precious"))
    run_job(replace(job, start="restart"), ShuffledExecutor(), keep)
    assert errors.read_text() == "precious"
    errors.unlink()
    assert run_job(replace(job, start="restart"), ShuffledExecutor(), Watch()).errors is None
    assert not errors.exists()


def test_whoever_is_killed_between_writing_and_remembering_knows_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 4)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.csv"), start="resume")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("engine.batch_files.journal.Journal.keep_only", killed)
        with pytest.raises(KeyboardInterrupt):
            run(job)
    assert (home / "out.csv").exists()
    ending = run_job(job, ShuffledExecutor(), Watch())
    assert ending.output == home / "out.csv"


def test_a_result_that_a_program_holds_open_is_written_beside_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Excel does on Windows."""
    write_rows(home / "in.jsonl", 4)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.csv"), start="resume")
    run(job)
    real = Path.replace

    def held(self: Path, target: Path) -> Path:
        if target.name == "out.csv":
            raise PermissionError(13, "held open")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", held)
    assert run_job(job, ShuffledExecutor(), Watch()).output == home / "out-2.csv"


def _chat(asks: Callable[[], bool], answers: Callable[[], None], stops: Callable[[], bool]) -> JobWatcher:
    return JobWatcher(lambda _pace, _blocked: None, lambda _answer, _question: None, asks, answers, stops)


def test_background_work_pauses_for_requests_with_priority() -> None:
    begun, asked = threading.Event(), threading.Event()
    steps: list[int] = []
    seen: list[tuple[int, int]] = []

    def work(between: Between) -> str:
        begun.set()
        assert asked.wait(10)
        for step in range(200):
            steps.append(step)
            between(step / 200)
        return "done"

    def answer() -> None:
        asked.set()
        while not steps:  # it comes as far as its next step, and no further
            pass
        before = len(steps)
        threading.Event().wait(0.05)
        seen.append((before, len(steps)))

    watcher = _chat(lambda: begun.is_set() and not asked.is_set(), answer, lambda: False)
    assert run_in_background(work, watcher, lambda _share: None) == "done"
    assert seen == [(1, 1)]
    assert len(steps) == 200


class Full:
    """A disk without room for the first so many writes of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
        self.refusals = refusals
        real = Journal.record

        def record(journal: Journal, answers: list[Answer]) -> None:
            if answers:
                self.refuse()
            real(journal, answers)

        monkeypatch.setattr(Journal, "record", record)

    def refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")


def test_a_full_disk_pauses_the_job_and_chats_are_answered_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    write_rows(home / "in.jsonl", 30)
    full = Full(monkeypatch, 8)
    watch = Watch()
    chats: list[int] = []

    def blocked() -> bool:
        return bool(watch.paces) and watch.paces[-1][1].startswith("Waiting: The disk") and len(chats) < 3

    watcher = replace(watch.watcher(), should_yield=blocked, give_way=lambda: chats.append(full.refusals))
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    ending = run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(room=9), watch)
    assert ending.finished
    assert len(chats) == 3
    assert chats[0] > 0, "the first was answered while the disk was full"
    assert sorted(row["id"] for row in results_in(home / "out.jsonl")) == list(range(30))
    assert watch.paces[-1][1] == ""


def test_no_rows_are_asked_while_there_is_no_room_and_the_wait_can_be_cancelled(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    write_rows(home / "in.jsonl", 40)
    full = Full(monkeypatch, 10**9)
    watch, executor = Watch(), ShuffledExecutor(room=4)
    waits = 0

    def cancelled() -> bool:
        return sum(blocked.startswith("Waiting") for _pace, blocked in watch.paces) > 3

    watcher = replace(watch.watcher(), cancelled=cancelled)
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    ending = run_job(job, executor, watch)
    assert not ending.finished
    assert len(executor.asked) <= 5, "rows went on being asked though no answer could be kept"
    full.refusals = waits
    again = ShuffledExecutor()
    assert run_job(replace(job, start="resume"), again, Watch()).finished
    assert [row["id"] for row in results_in(home / "out.jsonl")] == list(range(40))


def test_a_result_that_does_not_fit_the_disk_is_written_when_there_is_room(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 5)
    left = [3]

    def put_on_disk(_new: object) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.common.files.NewFile.finish", put_on_disk)
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.05)
    watch = Watch()
    ending = run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.csv")), ShuffledExecutor(), watch)
    assert (ending.finished, ending.written, left) == (True, 5, [0])
    told = [blocked for _pace, blocked in watch.paces if not blocked.endswith("%")]
    news = [text for before, text in itertools.pairwise(["", *told]) if text != before]
    assert [bool(text) for text in news] == [True, False], "a wait is said once, and that it is over"
    assert "disk" in news[0]
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("what", ["answers", "result"])
def test_a_disk_that_stays_full_ends_a_job_that_nobody_watches(
    home: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.01)
    write_rows(home / "in.jsonl", 20)
    watch = Watch()
    watcher = replace(watch.watcher(), patience_s=0.03)
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.csv"))

    def full(_new: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "answers":
            Full(patch, 10**9)
        else:
            patch.setattr("engine.common.files.NewFile.finish", full)
        with pytest.raises(EngineError) as refusal:
            run_job(job, ShuffledExecutor(), watch)
    assert refusal.value.code is ErrorCode.DISK_FULL
    assert str(home) in refusal.value.message
    assert [path.name for path in home.glob("*out*")] == []
    assert run_job(replace(job, start="resume"), ShuffledExecutor(), Watch()).written == 20


def test_rows_that_are_answered_already_are_left_when_a_chat_comes(home: Path) -> None:
    write_rows(home / "in.jsonl", 400)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start="resume")
    assert run_job(job, ShuffledExecutor(), Watch()).finished
    watch = Watch(yields=25)
    executor = ShuffledExecutor()
    assert run_job(job, executor, watch).finished
    assert executor.asked == []
    assert watch.gave_way == 25


def test_counting_and_reading_say_how_far_they_are_and_can_be_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 300)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    may_go_on = threading.Event()
    from engine.batch_files.rows import JsonLines

    real = JsonLines.rows

    def slow(self: JsonLines) -> Iterator[Row]:
        for row in real(self):
            if row.index == 199 and threading.current_thread().name == "batch-files":
                assert may_go_on.wait(10)
            yield row

    watch = Watch()
    watcher = replace(
        watch.watcher(),
        cancelled=lambda: bool(watch.paces) and watch.paces[-1][1].startswith("Counting") and not may_go_on.set(),
    )
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    monkeypatch.setattr(JsonLines, "rows", slow)
    executor = ShuffledExecutor()
    ending = run_job(job, executor, watch)
    assert (ending.finished, executor.asked) == (False, [])
    assert watch.paces[0][1].startswith("Counting the rows: ")
    assert json.loads((home / "in.jsonl").read_text().splitlines()[0])["id"] == 0
