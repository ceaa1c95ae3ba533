"""From a job's settings and a loaded model to its result: called by the command line and the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TypeVar

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import Answer, RowRequest
from engine.checkpoint.shards import content_digest
from engine.common.config import BatchJob
from engine.jobs.job import Answerer, run_first_rows, run_job
from engine.runtime.batch.job_plan import JobPlan, SweepClock, plan_asked, plan_job, predicted_after
from engine.runtime.batch.model_rows import ModelRows
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.background import Background, JobRows
from engine.runtime.schedule.executor import BatchExecutor

_Result = TypeVar("_Result")


class OwnHost:
    """The calling thread has the model for this job alone."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    def call(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns."""
        return work()

    def executor(self, policy: BatchPolicy) -> BatchExecutor:
        """Answers a job's rows; called where the model may be used."""
        return BatchExecutor(self.loaded, policy)

    def seconds(self) -> float:
        """A clock of the time that jobs have had."""
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
        """As of `OwnHost`."""
        return self._background.seconds


class HostedModel:
    """A loaded model that answers a job's rows, all of them or some."""

    def __init__(self, host: OwnHost | SharedHost) -> None:
        self._host, self.loaded = host, host.loaded

    @cached_property
    def answerer(self) -> Answerer:
        """The model, as the job's journal knows it."""
        return Answerer(self.loaded.info.path, content_digest(Path(self.loaded.info.path)), self.loaded.info.precision)

    def open(self, prepared: PreparedJob, watcher: JobWatcher) -> tuple[ModelRows, int]:
        """Plans for the job; who answers its rows, and how many at once at most."""
        plan = self._host.call(lambda: plan_job(prepared, self.loaded))
        if plan.prediction is not None and not prepared.job.is_remote:
            watcher.on_plan(plan.prediction)
        rows = rows_of(self._host.call(lambda: self._host.executor(plan.policy)), self.loaded)
        return rows, plan.policy.rows


def run_whole_job(prepared: PreparedJob, host: OwnHost | SharedHost, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    model = HostedModel(host)
    return run_job(prepared, model.answerer, lambda watcher: model.open(prepared, watcher)[0], watcher, host.seconds)


def open_rows(
    job: BatchJob, asked: Iterable[tuple[float, RowRequest | Answer]], loaded: LoadedModel
) -> tuple[JobPlan, ModelRows]:
    """How a loaded model should answer a job that others read and keep, and what answers it; see `plan_asked`."""
    plan = plan_asked(job, asked, loaded)
    return plan, rows_of(BatchExecutor(loaded, plan.policy), loaded)


def rows_of(executor: BatchExecutor | JobRows, loaded: LoadedModel) -> ModelRows:
    """A job's rows as a loaded model answers them."""
    return ModelRows(executor, lambda: ConstrainedAnswers.of(loaded), loaded.info.family)


def run_sample(prepared: PreparedJob, loaded: LoadedModel, rows: int, watcher: JobWatcher) -> None:
    """Answers the first rows of a job without keeping anything; requests with priority wait for one layer at most.

    Args:
        watcher: receives each answer with the message it answers, in any order, and finally the predicted speed of the
            whole job, corrected by the time these rows took.  It receives no pace.
    """
    with closing(rows_of(BatchExecutor(loaded), loaded)) as executor:
        clock = SweepClock(lambda: executor.under_way)

        def should_yield() -> bool:
            clock.look()
            return watcher.should_yield()

        tries = run_first_rows(prepared, rows, executor, watcher, should_yield, lambda: clock.leave(watcher.take_turns))
        taken = clock.time()
    if not watcher.cancelled():
        prediction = predicted_after(prepared, loaded, tries, taken)
        if prediction is not None:
            watcher.on_plan(prediction)
