"""From a job's settings and a loaded model to its result: called by the command line and the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
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
from engine.runtime.batch.job_plan import JobPlan, PlanWatch, SweepClock, plan_asked, plan_job, predicted_after
from engine.runtime.batch.model_rows import Elsewhere, ModelRows, nowhere
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.pictures import Blind
from engine.runtime.schedule.background import Background, JobRows
from engine.runtime.schedule.executor import BatchExecutor

_Result = TypeVar("_Result")
Moved = Callable[[Exception, LoadedModel], LoadedModel | None]
"""See `Scheduler.moved`."""


class OwnHost:
    """The calling thread has the model for this job alone."""

    def __init__(self, loaded: LoadedModel, moved: Moved) -> None:
        self.loaded, self._moved = loaded, moved

    def moved(self, error: Exception, loaded: LoadedModel) -> bool:
        """See `Scheduler.moved`: whether rows can go on with what `loaded` is now."""
        found = self._moved(error, loaded)
        self.loaded = found or self.loaded
        return found is not None

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

    def __init__(self, background: Background, moved: Moved) -> None:
        self._background, self._moved = background, moved

    @property
    def loaded(self) -> LoadedModel:
        """The model, where it is now."""
        return self._background.loaded

    def moved(self, error: Exception, loaded: LoadedModel) -> bool:
        """As of `OwnHost`."""
        return self._background.call(lambda: self._moved(error, loaded)) is not None

    def call(self, work: Callable[[], _Result]) -> _Result:
        return self._background.call(work)

    def executor(self, policy: BatchPolicy) -> JobRows:
        return self._background.join(policy)

    def seconds(self) -> float:
        """As of `OwnHost`."""
        return self._background.seconds


class HostedModel:
    """A loaded model that answers a job's rows, all of them or some."""

    def __init__(self, host: OwnHost | SharedHost) -> None:
        self._host = host

    @cached_property
    def answerer(self) -> Answerer:
        """The model, as the job's journal knows it."""
        info = self._host.loaded.info
        return Answerer(info.path, content_digest(Path(info.path)), info.precision)

    def open(self, prepared: PreparedJob, watcher: JobWatcher) -> tuple[ModelRows, int]:
        """Plans for the job; who answers its rows, and how many at once at most.

        Where the model loses its card, or another plan is better by what the run finds, the rows are planned again, and
        those under way begin again.

        Raises:
            EngineError: `PICTURES_NOT_READ`: all rows have pictures, and nobody else answers.
        """
        host, loaded = self._host, self._host.loaded
        if not prepared.job.is_remote:
            _require_sight(prepared, loaded)

        def elsewhere(error: Exception) -> ModelRows | None:
            return self.open(prepared, watcher)[0] if host.moved(error, loaded) else None

        plan = host.call(lambda: plan_job(prepared, loaded))
        if plan.prediction is not None and not prepared.job.is_remote:
            watcher.on_plan(plan.prediction)
        policy = plan.policy
        if plan.batch is not None:
            policy = replace(policy, outdated=PlanWatch(plan.batch, plan.rows, loaded))
        rows = rows_of(host.call(lambda: host.executor(policy)), loaded, elsewhere)
        return rows, plan.policy.rows


def run_whole_job(prepared: PreparedJob, host: OwnHost | SharedHost, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    model = HostedModel(host)
    return run_job(prepared, model.answerer, lambda watcher: model.open(prepared, watcher)[0], watcher, host.seconds)


def _require_sight(prepared: PreparedJob, loaded: LoadedModel) -> None:
    if prepared.job.image_column and loaded.sight is None:
        raise (loaded.blind or Blind(loaded.info.name, "it was made for text")).refuse()


def open_rows(
    job: BatchJob, asked: Iterable[tuple[float, RowRequest | Answer]], loaded: LoadedModel
) -> tuple[JobPlan, ModelRows]:
    """How a loaded model should answer a job that others read and keep, and what answers it; see `plan_asked`."""
    plan = plan_asked(job, asked, loaded)
    return plan, rows_of(BatchExecutor(loaded, plan.policy), loaded)


def rows_of(executor: BatchExecutor | JobRows, loaded: LoadedModel, elsewhere: Elsewhere = nowhere) -> ModelRows:
    """A job's rows as a loaded model answers them."""
    return ModelRows(executor, lambda: ConstrainedAnswers.of(loaded), elsewhere)


def run_sample(prepared: PreparedJob, loaded: LoadedModel, rows: int, watcher: JobWatcher) -> None:
    """Answers the first rows of a job without keeping anything; requests with priority wait for one layer at most.

    Args:
        watcher: receives each answer with the message it answers, in any order, and finally the predicted speed of the
            whole job, corrected by the time these rows took.  It receives no pace.
    """
    _require_sight(prepared, loaded)
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
