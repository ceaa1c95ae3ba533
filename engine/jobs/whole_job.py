"""From a job's settings and somebody who answers rows to its result, whoever that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from engine.batch_files.fingerprint import RowCount
from engine.batch_files.job_list import StopRequest, read_job
from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, StoppedError, run_in_background
from engine.batch_files.journal import journal_path
from engine.batch_files.prepared_job import PreparedJob
from engine.jobs.feed import Asking, RowFeed
from engine.jobs.job import JobRun
from engine.jobs.rows import BatchOutcome, Check, ClosingExecutor, RowAnswer, RowExecutor, never


@dataclass(frozen=True, slots=True)
class Answerer:
    """Who answers a job's rows.

    Attributes:
        name: for lists of jobs.
        digest, precision: see `JobManifest`: a job is continued only by the same.
        servers: see `PreparedJob.open_journal`.
    """

    name: str
    digest: str
    precision: str
    servers: tuple[Mapping[str, str], ...] = ()


def run_job(
    prepared: PreparedJob,
    answerer: Answerer,
    open_executor: Callable[[JobWatcher], ClosingExecutor],
    watcher: JobWatcher,
    clock: Callable[[], float] = time.monotonic,
) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Args:
        open_executor: makes who answers the rows, once the job's answers so far are open; it is closed in the end.
        clock: see `JobRun`.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    so_far = read_job(journal_path(prepared.output)) if prepared.job.start != "restart" else None
    known = Pace(0, 0, None, 0.0, None, None)
    if so_far is not None:
        known = replace(known, done=so_far.done, failed=so_far.failed, cut_off=so_far.cut_off)
    try:
        manifest = run_in_background(
            lambda between: prepared.manifest(answerer.digest, answerer.precision, between),
            watcher,
            lambda share: watcher.on_pace(known, f"Reading the input: {share:.0%}"),
        )
    except StoppedError:
        return JobEnding(False, known, 0)
    with (
        closing(prepared.open_journal(manifest, answerer.name, answerer.servers)) as journal,
        StopRequest(journal.path) as stop,
    ):
        here = watcher.cancelled
        watcher = replace(watcher, cancelled=lambda: here() or stop.is_made())
        with closing(open_executor(watcher)) as executor:
            ending = JobRun(prepared, manifest, journal, executor, watcher, clock).run()
            return replace(ending, note=" ".join(filter(None, (prepared.source.remark, ending.note, executor.note))))


def run_first_rows(
    prepared: PreparedJob,
    rows: int,
    executor: RowExecutor,
    watcher: JobWatcher,
    should_yield: Check = never,
    leave: Callable[[], None] = lambda: None,
) -> list[RowAnswer]:
    """Answers the first rows of a job without keeping anything.

    Args:
        watcher: receives each answer with the message it answers, in any order.  It receives no pace.
        should_yield: asked between two steps; `leave` is then called and returns once the rows may go on.

    Returns:
        every try of every row.
    """
    asking = Asking(prepared.job.tries)
    feed = RowFeed(islice(prepared.asked(), rows), lambda _row: False, asking, RowCount(None), watcher.on_answer, never)
    tries = list[RowAnswer]()

    def answered(answer: RowAnswer) -> None:
        tries.append(answer)
        ended = asking.ended(answer)
        if ended is not None:
            watcher.on_answer(*ended)

    outcome = BatchOutcome.YIELDED
    while outcome is BatchOutcome.YIELDED or (outcome is BatchOutcome.FINISHED and not feed.is_over):
        outcome = executor.run(feed.rows(), answered, should_yield, watcher.cancelled)
        if outcome is BatchOutcome.YIELDED:
            leave()
    return tries
