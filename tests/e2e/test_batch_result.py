"""A batch job by hand from the file to the opened result: a plan, three rows tried, progress, and the end."""

import csv
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from engine.batch_files.journal import known_jobs
from tests.e2e.batch_form import choose_file, limit_answers, press_by_keys, write_questions
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import real_window

ROWS = 24
JOB_PATIENCE_S = 10 * PATIENCE_S


@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
def test_a_file_becomes_a_result_that_is_opened(
    screen: Screen, starter: Path, switchyard_home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "questions.csv"
    write_questions(source, ROWS, "Write a sentence")
    opened = tmp_path / "opened.txt"
    programs = tmp_path / "bin"
    programs.mkdir()
    opener = programs / "xdg-open"  # what the desktop opens files with
    opener.write_text(f"#!/bin/sh\nprintf '%s' \"$1\" > '{opened}'\n", encoding="utf-8")
    opener.chmod(0o755)

    variables = {"PATH": f"{programs}:{screen.variables.get('PATH', '')}"}
    with real_window(screen, switchyard_home, starter, variables) as window:
        window.click("Batch")
        choose_file(window, source)
        limit_answers(window, 12)

        # Before anything runs: the plan in words, and three rows answered.
        eventually(lambda: "rows share each load of a layer's weights" in window.transcript(), "the plan showed")
        eventually(lambda: "Predicted" in window.transcript(), "it said how sure it is")
        press_by_keys(window, "Answer three rows")
        eventually(lambda: "Measured on the trial rows" in window.transcript(), "the rows told more", JOB_PATIENCE_S)
        assert "3 rows took" in window.transcript()
        assert not known_jobs(), "a sample keeps nothing"

        window.click("Start")
        eventually(lambda: "100%" in window.transcript(), "the job was done", JOB_PATIENCE_S)
        assert f"{ROWS} of {ROWS} rows" in window.transcript()
        window.click("Open result")
        url = eventually(lambda: opened.exists() and opened.read_text(encoding="utf-8"), "the result was opened")
        assert window.close() == 0

    result = Path(unquote(urlsplit(str(url)).path))
    assert result == source.with_name("questions.answers.csv")
    with result.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == [str(number) for number in range(ROWS)]
    assert all(row["answer"] for row in rows)
    assert known_jobs()[0].finished_s is not None
