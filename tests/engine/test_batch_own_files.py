"""A job replaces the files that it wrote itself, and no other, whatever it is called and whenever it appears."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.batch_files.journal import WrittenFile, known_jobs
from engine.batch_files.openai_format import errors_path
from engine.batch_files.prepared_job import prepare
from engine.common.config import BatchJob
from engine.common.errors import EngineError, ErrorCode
from tests.engine.shuffled_executor import ShuffledExecutor, Watch, results_in, run_job, write_rows


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path


def write_requests(path: Path, count: int = 3, wrong: int = 1) -> None:
    """OpenAI requests, of which one fails."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(count)
    ]
    lines[wrong]["url"] = "/v1/embeddings"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(action: Callable[[], object], *files: Path) -> EngineError:
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
    refused(lambda: run(job), source)
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
    refused(lambda: prepare(job), source)
    refused(lambda: prepare(replace(job, input=str(other))), source) if derived else None
    folder = home / "folder"
    folder.mkdir()
    link(source, folder / "linked.jsonl")
    refused(lambda: prepare(replace(job, input=str(folder))), source)


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
    assert "out.errors.jsonl" in refused(lambda: run(job), errors).message
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
    refused(lambda: run(replace(job, start="resume")), output, errors)
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
        refused(lambda: run(replace(job, start=start)), output)  # type: ignore[arg-type]  # noqa: B023
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


def test_a_file_is_told_from_another_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    file = WrittenFile.as_it_is(path)
    assert file.is_at(path)
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert not file.is_at(path)
    assert not file.is_at(tmp_path / "b")
