"""A batch job by hand: engine and window are killed in its middle, and every row is answered exactly once."""

import csv
import os
import signal
from pathlib import Path

import psutil
import pytest

from engine.batch_files.journal import KnownJob, known_jobs, read_answers
from engine.batch_files.result_file import harmless
from tests.e2e.batch_form import choose_file, limit_answers, write_questions
from tests.e2e.screen import Screen
from tests.e2e.waiting import PATIENCE_S, eventually
from tests.e2e.window_process import real_window

ROWS = 80
JOB_PATIENCE_S = 10 * PATIENCE_S


def job_after(rows: int) -> KnownJob:
    """The only job, once so many of its rows are in the journal."""

    def look() -> KnownJob | None:
        jobs = known_jobs()
        return jobs[0] if jobs and jobs[0].done >= rows else None

    return eventually(look, f"{rows} rows were answered", JOB_PATIENCE_S)


def answers_of(job: KnownJob) -> dict[int, str]:
    return {answer.row: answer.text for answer in read_answers(job.journal, limit=ROWS + 1)}


@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
def test_a_job_survives_its_engine_and_its_window(
    screen: Screen, starter: Path, switchyard_home: Path, tmp_path: Path
) -> None:
    source = tmp_path / "questions.csv"
    write_questions(source, ROWS, "Write two sentences")

    with real_window(screen, switchyard_home, starter) as window:
        window.click("Batch")
        choose_file(window, source)
        limit_answers(window, 40)
        window.click("Start")
        begun = job_after(2)
        assert begun.finished_s is None, "the job was over before it could be interrupted"

        # The engine is killed: the job is paused; a restart and a click go on with it.
        (worker,) = window.workers()
        os.kill(worker.pid, signal.SIGKILL)
        window.widget("Resume")
        kept = answers_of(job_after(2))
        window.click("Restart engine")
        window.click("Resume")
        job_after(len(kept) + 1)
        (worker,) = window.workers()

        # The window is killed, and its engine with it.
        window.process.kill()
        gone, _ = psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert gone
    later = known_jobs()[0]
    assert later.finished_s is None, "the job was over before the window could be killed"
    kept_later = answers_of(later)
    assert kept.items() <= kept_later.items()

    # The next window lists the job, and goes on with it to its end.
    with real_window(screen, switchyard_home, starter) as window:
        window.click("Batch")
        window.click("Resume")
        eventually(lambda: known_jobs()[0].finished_s is not None, "the job was done", JOB_PATIENCE_S)
        eventually(lambda: window.shows("Open result"), "the page said so")
        assert window.close() == 0

    answered = answers_of(known_jobs()[0])
    assert kept_later.items() <= answered.items()
    with source.with_name("questions.answers.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == [str(number) for number in range(ROWS)]
    assert [row["answer"] for row in rows] == [harmless(answered[number]) for number in range(ROWS)]
    assert all(row["answer"] for row in rows)
