"""`switchyard jobs` lists, shows, stops and forgets jobs, whoever runs them."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.journal import JobManifest, Journal, StopRequest, ask_to_stop, journal_path, stop_path
from engine.batch_files.rows import Answer, failed
from engine.cli import main

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
