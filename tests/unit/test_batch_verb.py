"""`switchyard batch` and `switchyard jobs`, without a model."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.journal import (
    JobManifest,
    Journal,
    StopRequest,
    ask_to_stop,
    journal_path,
    read_answers,
    stop_path,
)
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer, failed
from engine.cli import main
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.verbs import batch
from tests.bad_endpoint import Asked, BadEndpoint

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


_MANIFEST = JobManifest("hash", "{{text}}", "", "model", "bf16", "{}", "", "{}")


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path / "out.csv"


def _begun(output: Path) -> Journal:
    settings = json.dumps({"model": "m", "job": {"input": "in.csv", "output": str(output)}})
    journal = Journal(journal_path(output), _MANIFEST, settings)
    journal.record([Answer(0, "a", "stop", 1, 2), failed(3, "is empty")])
    return journal


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["jobs", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_jobs_are_listed_shown_and_forgotten(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    assert "no batch jobs" in capsys.readouterr().out
    _begun(output).close()
    (job,) = _printed(capsys)
    assert (job["state"], job["done"], job["failed"], job["output"]) == ("stopped", 2, 1, str(output))
    shown = _printed(capsys, "show", str(output))
    assert shown["failures"] == [{"row": 3, "problem": "is empty"}]
    assert main(["jobs", "show", str(output)]) == 0
    assert "Row 3 is empty." in capsys.readouterr().out
    assert main(["jobs", "stop", str(output)]) == 2
    assert str(output) in capsys.readouterr().err
    assert _printed(capsys, "remove", str(output))["answers"] == 2
    assert main(["jobs", "show", str(output)]) == 2
    assert list(journal_path(output).parent.iterdir()) == []


def test_a_name_has_no_line_of_its_own(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = output.with_name("out\n2026-01-01 running \x1b[31m.csv")
    settings = json.dumps({"job": {"output": str(odd)}})
    journal = Journal(journal_path(odd), _MANIFEST, settings)
    journal.record([Answer(0, "a", "length", 1, 2), Answer(1, "a", "stop", by="node\nb"), failed(3, "has\na line")])
    journal.close()
    for words, lines in ((["list"], 1), (["show", str(odd)], 3)):
        assert main(["jobs", *words]) == 0
        said = capsys.readouterr().out
        assert said.count("\n") == lines
        assert "\x1b" not in said
    (job,) = _printed(capsys)
    assert (job["cut_off"], job["output"]) == (1, str(odd))
    assert _printed(capsys, "show", str(odd))["cut_off_rows"] == [0]


def test_a_running_job_is_stopped_from_elsewhere(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in ("_LOOK_S", "_LOCK_S"):
        monkeypatch.setattr(f"engine.batch_files.journal.{patience}", 0.0)
    ask_to_stop(_path_of(output))
    journal = _begun(output)

    def work() -> None:
        with StopRequest(journal.path) as stop:
            begun.set()
            while not stop.is_made():
                time.sleep(0.002)
        journal.close()

    begun = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    assert main(["jobs", "remove", str(output)]) == 2
    assert "Another run" in capsys.readouterr().err
    assert _printed(capsys, "stop", str(output))["state"] == "stopped"
    thread.join()
    assert not stop_path(journal.path).exists()


def _path_of(output: Path) -> Path:
    """The journal's, with a wish to stop in its folder from long ago."""
    path = journal_path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def capitals(asked: Asked) -> None:
    asked.stream(asked.body["messages"][-1]["content"].upper())


def write(folder: Path, rows: int = 6) -> Path:
    path = folder / "in.txt"
    path.write_text("".join(f"row {row}\n" for row in range(rows)))
    return path


def test_rows_are_answered_by_servers_and_each_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with BadEndpoint(answer=capitals) as one, BadEndpoint(answer=capitals) as other:
        endpoints = [part for server in (one, other) for part in ("--endpoint", f"{server.url}#some/model")]
        output = tmp_path / "out.csv"
        command = ["batch", str(write(tmp_path)), "-o", str(output), *endpoints, "--name-endpoints"]
        assert cli.main([*command, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert cli.main(["batch", str(tmp_path / "in.txt"), "--sample", "2", *endpoints]) == 0
        sampled = capsys.readouterr()
    assert (document["finished"], document["done"], document["failed"]) == (True, 6, 0)
    places = document["endpoints"]
    assert [place["host"] for place in places] == [f"127.0.0.1:{server.port}" for server in (one, other)]
    assert sum(place["rows"] for place in places) == 6
    assert {place["prompt_tokens"] for place in places if place["rows"]} <= {7 * rows for rows in range(7)}
    assert "ROW 1" in sampled.out
    assert "a row took" in sampled.err
    assert output.read_text(encoding="utf-8-sig").splitlines()[0].endswith(",endpoint")
    assert cli.main(["jobs", "list"]) == 0
    assert f"by 127.0.0.1:{one.port}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("nowhere", "no endpoint called"), ("ftp://host/v1", "endpoint"), ("http://127.0.0.1:1/v1#m", "refused")],
)
def test_what_cannot_be_used_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.verbs.batch.PATIENCE_S", 0.1)
    assert cli.main(["batch", str(write(tmp_path)), "--endpoint", endpoint, "--json"]) == 2
    captured = capsys.readouterr()
    assert why in captured.err
    assert "Traceback" not in captured.err


def test_no_model_and_no_torch_is_needed(tmp_path: Path, switchyard_home: Path) -> None:
    with BadEndpoint(answer=capitals) as server:
        script = (
            "import sys; from engine import cli; code = cli.main(sys.argv[1:]);"
            "print([m for m in ('torch', 'transformers') if m in sys.modules]); sys.exit(code)"
        )
        command = ["batch", str(write(tmp_path)), "-o", str(tmp_path / "out.jsonl"), "--endpoint", server.url]
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            env={**os.environ, "SWITCHYARD_HOME": str(switchyard_home)},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_tools_of_a_row_go_along_and_calls_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}, "strict": True}]
    body = {"messages": [{"role": "user", "content": "Paris?"}], "tools": tools, "tool_choice": "auto"}
    plain = {"messages": [{"role": "user", "content": "Hello"}]}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": each}
        for name, each in (("tool", body), ("text", plain))
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answer(asked: Asked) -> None:
        if "tools" not in asked.body:
            asked.stream("Hello")
            return
        assert (asked.body["tools"], asked.body["tool_choice"]) == (tools, "auto")
        asked.begin_stream()
        function = {"name": "weather", "arguments": '{"city":'}
        asked.chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})
        asked.chunk({"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]})
        asked.chunk({}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    with BadEndpoint(answer=answer) as server:
        command = ["batch", str(source), "-o", str(output), "--endpoint", f"{server.url}#some/model", "--json"]
        assert cli.main(command) == 0, capsys.readouterr().err
    lines = [json.loads(line)["response"]["body"]["choices"][0] for line in output.read_text("utf-8").splitlines()]
    (call,) = lines[0]["message"]["tool_calls"]
    assert call == {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert (lines[0]["message"]["content"], lines[0]["finish_reason"]) == (None, "tool_calls")
    assert (lines[1]["message"]["content"], lines[1]["finish_reason"]) == ("Hello", "stop")
    assert "tool_calls" not in lines[1]["message"]
    kept = read_answers(journal_path(output))
    assert [each.shown for each in kept] == ['weather({"city": "Paris"})', "Hello"]
