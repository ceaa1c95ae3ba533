"""From a job's settings and a loaded model to its result: called by the command line and the worker."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from engine.batch_files.fingerprint import RowCount
from engine.batch_files.job_list import StopRequest, read_job
from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, StoppedError, run_in_background
from engine.batch_files.journal import journal_path
from engine.batch_files.prepared_job import PreparedJob
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.runtime.batch.feed import Asking, RowFeed
from engine.runtime.batch.job import JobRun
from engine.runtime.batch.job_plan import SweepClock, plan_job, predicted_after
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchAnswer, BatchOutcome, never


def run_whole_job(prepared: PreparedJob, loaded: LoadedModel, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    directory = Path(loaded.info.path)
    digest = str(fingerprint(directory, read_tensors(directory).values())["headers"])
    so_far = read_job(journal_path(prepared.output)) if prepared.job.start != "restart" else None
    known = Pace(so_far.done if so_far else 0, so_far.failed if so_far else 0, None, 0.0, None, None)
    try:
        manifest = run_in_background(
            lambda between: prepared.manifest(digest, loaded.info.precision, between),
            watcher,
            lambda share: watcher.on_pace(known, f"Reading the input: {share:.0%}"),
        )
    except StoppedError:
        return JobEnding(False, known, 0)
    with closing(prepared.open_journal(manifest, loaded.info.path)) as journal, StopRequest(journal.path) as stop:
        here = watcher.cancelled
        watcher = replace(watcher, cancelled=lambda: here() or stop.is_made())
        plan = plan_job(prepared, loaded)
        if plan.prediction is not None:
            watcher.on_plan(plan.prediction)
        with closing(BatchExecutor(loaded, plan.policy)) as executor:
            watcher = _watching(watcher, executor)
            ending = JobRun(prepared, manifest, journal, executor, lambda: ConstrainedAnswers.of(loaded), watcher).run()
            return replace(ending, note=" ".join(filter(None, (ending.note, executor.note))))


def run_sample(prepared: PreparedJob, loaded: LoadedModel, rows: int, watcher: JobWatcher) -> None:
    """Answers the first rows of a job without keeping anything; requests with priority wait for one layer at most.

    Args:
        watcher: receives each answer with the message it answers, in any order, and finally the predicted speed of the
            whole job, corrected by the time these rows took.  It receives no pace.
    """
    on_answer, cancelled = watcher.on_answer, watcher.cancelled
    asking = Asking(prepared.job.tries, lambda: ConstrainedAnswers.of(loaded))
    asked = islice(prepared.asked(), rows)
    feed = RowFeed(asked, lambda _row: False, asking, RowCount(None), on_answer, never)
    timed = list[BatchAnswer]()

    def answered(answer: BatchAnswer) -> None:
        timed.append(answer)
        ended = asking.ended(answer)
        if ended is not None:
            on_answer(*ended)

    executor = BatchExecutor(loaded)
    watcher = _watching(watcher, executor)
    clock = SweepClock(lambda: executor.under_way)

    def should_yield() -> bool:
        clock.look()
        return watcher.should_yield()

    try:
        outcome = BatchOutcome.YIELDED
        while outcome is BatchOutcome.YIELDED or (outcome is BatchOutcome.FINISHED and not feed.is_over):
            outcome = executor.run(feed.rows(), answered, should_yield, cancelled)
            if outcome is BatchOutcome.YIELDED:
                clock.leave(watcher.take_turns)
        taken = clock.time()
    finally:
        executor.close()
    if not cancelled():
        prediction = predicted_after(prepared, loaded, timed, taken)
        if prediction is not None:
            watcher.on_plan(prediction)


def _watching(watcher: JobWatcher, executor: BatchExecutor) -> JobWatcher:
    """Rows that are answered one by one would begin again after each token of a chat, so they wait for its end."""
    return replace(watcher, share=None) if executor.note else watcher
