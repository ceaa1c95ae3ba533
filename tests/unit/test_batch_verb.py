"""`switchyard batch` before and around a run: what it refuses, what it goes on with, what it says; without a model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.verbs import batch

_PACE = Pace(2, 0, 3, 0.0, None, None)


class Engine:
    """Ends as it is told."""

    def __init__(self, ending: JobEnding | EngineError) -> None:
        self._ending = ending
        self.watcher: JobWatcher | None = None
        self.prepared: PreparedJob | None = None
        self.precision = ""

    def load(self, args: Any) -> "tuple[Engine, None]":
        self.precision = args.precision
        return self, None

    def run_batch(self, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        self.prepared, self.watcher = prepared, watcher
        for blocked in ("", "Waiting: The disk of x is full.", "Waiting: The disk of x is full.", ""):
            watcher.on_pace(_PACE, blocked)
        if isinstance(self._ending, EngineError):
            raise self._ending
        return self._ending

    def unload(self) -> None:
        pass


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, rows: Path, *options: str, ending: JobEnding | EngineError | None = None
) -> tuple[int, Engine]:
    engine = Engine(ending or JobEnding(True, _PACE, 3, tokens=30, computing_s=2.0))
    monkeypatch.setattr(batch, "load_engine", engine.load)
    return cli.main(["batch", str(rows), "-o", str(rows.with_name("out.csv")), *options]), engine


def begun(rows: Path, precision: str, answers: int) -> None:
    """A job of which so many rows are answered."""
    prepared = prepare(BatchJob(str(rows), str(rows.with_name("out.csv"))))
    journal = prepared.open_journal(prepared.manifest("model", precision), "/models/m")
    journal.record([Answer(row, "x", "stop") for row in range(answers)])
    journal.close()


def test_a_job_from_before_there_was_dry_is_still_the_same_job(rows: Path) -> None:
    def sampling(**settings: Any) -> dict[str, Any]:
        job = BatchJob(str(rows), str(rows.with_name("out.csv")), sampling=SamplingParams(**settings))
        said: dict[str, Any] = json.loads(prepare(job).manifest("model", "bf16").sampling)
        return said

    before = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "max_tokens", "beams"]
    assert list(sampling()) == before
    assert sampling(dry_multiplier=0.8).keys() - set(before) == {"dry_multiplier"}


@pytest.mark.parametrize(
    ("answers", "options", "loaded"),
    [
        (1, ("--resume",), "bf16"),
        (1, ("--retry-failed",), "bf16"),
        (1, ("--restart",), "auto"),
        (1, ("--resume", "--precision", "int8"), "int8"),
        (0, ("--resume",), "auto"),
    ],
)
def test_a_job_goes_on_with_the_weights_that_it_was_begun_with(
    monkeypatch: pytest.MonkeyPatch, rows: Path, answers: int, options: tuple[str, ...], loaded: str
) -> None:
    begun(rows, "bf16", answers)
    code, engine = run(monkeypatch, rows, *options)
    assert (code, engine.precision) == (0, loaded)


@pytest.mark.parametrize(("options", "more"), [((), 0), (("--max-tokens", "2000"), 2000)])
def test_rows_that_were_cut_off_are_redone_with_more_tokens_than_the_job_was_begun_with(
    monkeypatch: pytest.MonkeyPatch, rows: Path, options: tuple[str, ...], more: int
) -> None:
    job = BatchJob(str(rows), str(rows.with_name("out.csv")), sampling=SamplingParams(max_tokens=7))
    prepared = prepare(job)
    manifest = prepared.manifest("model", "bf16")
    journal = prepared.open_journal(manifest, "/models/m")
    journal.record([Answer(0, "x", "length", 3, 7), Answer(1, "y", "stop", 3, 2)])
    journal.close()
    code, engine = run(monkeypatch, rows, "--redo", "cut-off", *options)
    assert code == 0
    assert engine.prepared is not None
    assert (engine.prepared.job.start, engine.prepared.job.more_tokens) == ("redo_cut_off", more)
    assert engine.prepared.manifest("model", "bf16") == manifest


def test_what_was_cut_off_is_counted_and_what_to_do_is_said(
    monkeypatch: pytest.MonkeyPatch, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = JobEnding(True, replace(_PACE, cut_off=2), 3)
    assert run(monkeypatch, rows, "--json", ending=ending)[0] == 0
    assert json.loads(capsys.readouterr().out)["cut_off"] == 2
    assert run(monkeypatch, rows, ending=ending)[0] == 0
    assert "2 cut off at the limit (--redo cut-off" in capsys.readouterr().out


def test_a_result_in_the_way_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(rows, "bf16", 1)
    rows.with_name("out.csv").write_text("mine")
    code, engine = run(monkeypatch, rows, "--resume", "--json")
    assert (code, engine.watcher) == (2, None)
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_request"


def test_a_full_disk_is_told_once_and_ends_in_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = EngineError(ErrorCode.DISK_FULL, "The disk of x stayed full for 120 s.")
    code, engine = run(monkeypatch, rows, "--json", ending=full)
    said = capsys.readouterr()
    assert code == 2
    assert engine.watcher is not None
    assert engine.watcher.patience_s == batch.PATIENCE_S
    assert said.err.count("Waiting") == 1
    document = json.loads(said.out)
    assert document["error"]["code"] == "disk_full"
    assert "--resume" in document["error"]["message"]


@pytest.mark.parametrize("unkept", [0, 2])
def test_a_stopped_job_says_whether_all_answers_are_kept(
    monkeypatch: pytest.MonkeyPatch, rows: Path, capsys: pytest.CaptureFixture[str], unkept: int
) -> None:
    ending = JobEnding(False, _PACE, 1, unkept=unkept)
    assert run(monkeypatch, rows, "--json", ending=ending)[0] not in (0, 2)
    said = capsys.readouterr()
    assert ("all answers kept" in said.err) == (unkept == 0)
    assert json.loads(said.out)["unkept"] == unkept


def test_rates_are_of_computing_and_the_document_says_where_the_result_is(
    monkeypatch: pytest.MonkeyPatch, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = rows.with_name("out-2.csv")
    ending = JobEnding(True, _PACE, 3, tokens=30, computing_s=2.0, note="It is beside it.", output=there)
    assert run(monkeypatch, rows, "--json", ending=ending)[0] == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["tokens_per_s"], document["output"]) == (15.0, str(there))
    assert run(monkeypatch, rows, ending=replace(ending, output=None))[0] == 0
    assert "It is beside it." in capsys.readouterr().out
