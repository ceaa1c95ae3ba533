"""Jobs in the background: several on one loaded model, whose rows share each sweep.

Each job has a thread of its own, which reads its input and writes its result.  What needs the model is done on the
engine's thread while the job's thread waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.falls import passed_over
from engine.jobs.rows import BatchOutcome, Check
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch, RowSource
from engine.runtime.schedule.request import AnswerCallback, BatchRequest

if TYPE_CHECKING:
    from engine.runtime.schedule.scheduler import Scheduler

_Result = TypeVar("_Result")
_IDLE_S = 0.005
_CLOSED = "The engine was needed for something else: resume the job."


class Background:
    """The jobs of one loaded model, as its scheduler sees them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._runs: list[_Run] = []
        self._lanes: dict[Any, ContinuousBatch] = {}
        self._last: ContinuousBatch | None = None
        self._is_closed = False
        self.seconds = 0.0
        """Of the engine's thread that jobs have had so far."""

    # --- a job's thread ---------------------------------------------------------------------------

    def call(self, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, or raises, on the engine's thread.

        Raises:
            EngineError: also `BUSY`, if the model is about to be freed.
        """
        over, results, errors = threading.Event(), list[_Result](), list[BaseException]()

        def done() -> None:
            try:
                if self._is_closed:
                    raise EngineError(ErrorCode.BUSY, _CLOSED)
                results.append(work())
            except BaseException as error:  # raised again on the thread that waits
                errors.append(error)
            finally:
                over.set()

        with self._lock:
            self._calls.append(done)
            is_closed = self._is_closed
        if is_closed:
            self._answer_calls()
        self._scheduler.on_news()
        over.wait()
        if errors:
            raise errors[0]
        return results[0]

    # --- the engine's thread ----------------------------------------------------------------------

    @property
    def loaded(self) -> LoadedModel:
        return self._scheduler.loaded

    @property
    def is_busy(self) -> bool:
        """Whether any job wants the engine now."""
        return bool(self._calls or self._runs)

    @property
    def has_jobs(self) -> bool:
        return bool(self._lanes or self.is_busy)

    def held_bytes(self, beside: ContinuousBatch | None) -> int:
        """Bytes of what rows hold, but in the pages of this batch, which counts those itself.  From any thread."""
        lanes = list(self._lanes.values())  # a job may join or leave meanwhile
        return sum(lane.held_bytes for lane in lanes if beside is None or lane.pool is not beside.pool)

    @property
    def is_in_one_lane(self) -> bool:
        """Whether the sweeps of all jobs are the same: none has to wait for those of another."""
        return len(self._lanes) == 1

    @torch.inference_mode()  # as requests: both use the same pages
    def go_on(self, until: Check) -> None:
        """Goes on with the jobs until `until()` comes true, or none of them wants the engine now."""
        begun_s = perf_counter()
        try:
            while self.is_busy:
                self._answer_calls()
                self._settle()
                lanes = list(dict.fromkeys(run.lane for run in self._runs if not run.lane.is_resting))
                if not lanes:
                    return
                # Whose turn it is: the first after the last one.
                after = lanes.index(self._last) + 1 if self._last in lanes else 0
                lane = self._last = lanes[after % len(lanes)]
                if not self._go_on_with(lane, until) and not any(run.is_over for run in self._runs):
                    sleep(_IDLE_S)  # for room that requests still have
                    return
                self._settle()
                if until():
                    return
        finally:
            self.seconds += perf_counter() - begun_s

    def join(self, policy: BatchPolicy) -> JobRows:
        """A place for a job's rows, whose sweeps it shares with jobs that keep their context in the same way."""
        key = policy.kv_type, policy.window, policy.kept
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._scheduler.job_lane(policy)
        lane.jobs += 1

        def leave() -> None:
            lane.jobs -= 1
            if not lane.jobs and self._lanes.get(key) is lane:
                del self._lanes[key]
                lane.free()

        return JobRows(self, lane, leave)

    def begin(self, run: _Run) -> None:
        run.lane.sources.append(run.source)
        self._runs.append(run)

    def rows_of(self, run: _Run, requests: Iterator[BatchRequest]) -> Iterator[Sequence]:
        """A job's rows; what breaks while they are read breaks this job alone."""
        try:
            yield from self._scheduler.preparation.rows(requests, run.answered, run.cancelled)
        except RequestCancelled:
            run.outcome = BatchOutcome.CANCELLED
        except BaseException as error:
            run.error = error

    def close(self) -> None:
        """Ends what jobs want: the model is about to be freed."""
        self._is_closed = True
        self._answer_calls()
        self.leave()

    def leave(self) -> None:
        """Ends what jobs have begun; they may begin again once the model has been loaded elsewhere."""
        for run in list(self._runs):
            run.error = run.error or EngineError(ErrorCode.BUSY, _CLOSED)
            self._end(run)
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            with passed_over("Rows of a job could not be given up"):  # the card that they are on may be gone
                lane.free()

    def _answer_calls(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    return
                call = self._calls.popleft()
            call()

    def _go_on_with(self, lane: ContinuousBatch, until: Check) -> bool:
        """Whether there was anything to go on with."""
        turns = lane.turns

        def enough() -> bool:
            others = len(self._lanes) > 1 and lane.turns > turns + 1
            return self._look() or bool(self._calls) or others or until()

        try:
            has_more = lane.go_on(enough)
        except BaseException as error:  # of the model: it is told to all whose rows are there
            for run in self._runs:
                if run.lane is lane:
                    run.error = error
            return True
        self._look()
        return has_more or lane.turns > turns

    def _look(self) -> bool:
        """Between two layers: whether a job is to be ended now."""
        is_over = False
        for run in self._runs:
            run.look()
            is_over = is_over or run.is_over
        return is_over

    def _settle(self) -> None:
        for run in list(self._runs):
            run.look()
            if run.is_over:
                self._end(run)

    def _end(self, run: _Run) -> None:
        self._runs.remove(run)
        lane, source = run.lane, run.source
        if run.error is not None or run.outcome is BatchOutcome.CANCELLED:
            with passed_over("Rows of a job could not be given up"):
                lane.drop(source)
        elif source in lane.sources and run.outcome is BatchOutcome.FINISHED:
            lane.sources.remove(source)
        run.ended.set()


@dataclass(eq=False)
class _Run:
    """The rows of one job while its thread waits for them."""

    lane: ContinuousBatch
    source: RowSource
    on_row: AnswerCallback
    should_yield: Check
    cancelled: Check
    outcome: BatchOutcome | None = None
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Whether its thread can go on; a sweep with rows of it ends first, unless they are not wanted any more."""
        if self.error is not None or self.outcome is BatchOutcome.CANCELLED:
            return True
        return self.outcome is not None and not self.lane.works_on(self.source)

    def look(self) -> None:
        """Asks its job how to go on."""
        if self.error is not None or self.outcome is BatchOutcome.CANCELLED:
            return
        try:
            if self.cancelled():
                self.outcome = BatchOutcome.CANCELLED
            elif self.outcome is None and self.should_yield():
                self.outcome, self.source.rests = BatchOutcome.YIELDED, True
            elif self.outcome is None and self.lane.has_ended(self.source):
                self.outcome = BatchOutcome.FINISHED
        except BaseException as error:
            self.error = error

    def answered(self, answer: GenerationResult) -> None:
        """What breaks in the job breaks this job alone."""
        try:
            if self.error is None:
                self.on_row(answer)
        except BaseException as error:
            self.error = error


class JobRows:
    """The place of one job's rows among others: see `BatchExecutor`.  For the job's thread."""

    def __init__(self, background: Background, lane: ContinuousBatch, leave: Callable[[], None]) -> None:
        self._background, self._lane, self._leave = background, lane, leave
        self.note, self._source = lane.note, RowSource()
        self._is_closed = False

    @property
    def under_way(self) -> tuple[int, int]:
        return self._source.under_way

    def run(
        self, rows: Iterator[BatchRequest], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """See `BatchExecutor.run`: waits for the engine's thread, which asks all of these."""
        source = self._source
        run = _Run(self._lane, source, on_row, should_yield, cancelled)
        source.prepared, source.on_row = self._background.rows_of(run, rows), run.answered
        source.rests = source.is_dry = False
        self._background.call(lambda: self._background.begin(run))
        run.ended.wait()
        if run.error is not None:
            raise run.error
        assert run.outcome is not None
        return run.outcome

    def close(self) -> None:
        """Frees keys and values that no other job needs.  Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(EngineError):  # the model has been freed, and all this with it
                self._background.call(self._give_back)

    def _give_back(self) -> None:
        self._lane.drop(self._source)
        self._leave()
