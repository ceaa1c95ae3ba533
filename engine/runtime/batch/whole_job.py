"""From a job's settings and a loaded model to its result: called by the command line and the worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

from engine.batch_files.fingerprint import RowCount
from engine.batch_files.job_list import StopRequest, read_job
from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, StoppedError, run_in_background
from engine.batch_files.journal import journal_path
from engine.batch_files.prepared_job import PreparedJob
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.runtime.batch.feed import Asking, RowFeed
from engine.runtime.batch.job import JobRun, RowExecutor
from engine.runtime.batch.job_plan import SweepClock, plan_job, predicted_after
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.background import Background, JobRows
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchAnswer, BatchOutcome, never

_Result = TypeVar("_Result")


class JobHost(Protocol):
    """Where a job's rows are answered."""

    loaded: LoadedModel

    def call(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, on the thread that may use the model."""

    def executor(self, policy: BatchPolicy) -> ClosingExecutor:
        """Answers the rows; called on that thread."""

    def seconds(self) -> float:
        """A clock of the time that jobs have had."""


class ClosingExecutor(RowExecutor, Protocol):
    """An executor that holds memory until it is closed."""

    note: str

    def close(self) -> None: ...


class OwnHost:
    """The calling thread has the model for this job alone."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Does it."""
        return work()

    def executor(self, policy: BatchPolicy) -> BatchExecutor:
        """See `JobHost`."""
        return BatchExecutor(self.loaded, policy)

    def seconds(self) -> float:
        """See `JobHost`."""
        return monotonic()


class SharedHost:
    """The jobs of a scheduler; for the thread of one of them."""

    def __init__(self, background: Background) -> None:
        self._background, self.loaded = background, background.loaded

    def call(self, work: Callable[[], _Result]) -> _Result:
        """See `Background.call`."""
        return self._background.call(work)

    def executor(self, policy: BatchPolicy) -> JobRows:
        """See `Background.join`."""
        return self._background.join(policy)

    def seconds(self) -> float:
        """See `JobHost`."""
        return self._background.seconds


def run_whole_job(prepared: PreparedJob, host: JobHost, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    loaded = host.loaded
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
        plan = host.call(lambda: plan_job(prepared, loaded))
        if plan.prediction is not None:
            watcher.on_plan(plan.prediction)
        with closing(host.call(lambda: host.executor(plan.policy))) as executor:
            constrained = lambda: ConstrainedAnswers.of(loaded)  # noqa: E731
            family = loaded.info.family
            run = JobRun(prepared, manifest, journal, executor, constrained, watcher, family, host.seconds)
            ending = run.run()
            return replace(ending, note=" ".join(filter(None, (ending.note, executor.note))))


def run_sample(prepared: PreparedJob, loaded: LoadedModel, rows: int, watcher: JobWatcher) -> None:
    """Answers the first rows of a job without keeping anything; requests with priority wait for one layer at most.

    Args:
        watcher: receives each answer with the message it answers, in any order, and finally the predicted speed of the
            whole job, corrected by the time these rows took.  It receives no pace.
    """
    on_answer, cancelled = watcher.on_answer, watcher.cancelled
    asking = Asking(prepared.job.tries, lambda: ConstrainedAnswers.of(loaded), loaded.info.family)
    asked = islice(prepared.asked(), rows)
    feed = RowFeed(asked, lambda _row: False, asking, RowCount(None), on_answer, never)
    timed = list[BatchAnswer]()

    def answered(answer: BatchAnswer) -> None:
        timed.append(answer)
        ended = asking.ended(answer)
        if ended is not None:
            on_answer(*ended)

    executor = BatchExecutor(loaded)
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
