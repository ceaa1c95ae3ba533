"""Batch jobs in the engine process: their events, and how they share the engine with chats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from engine.batch_files.job_watcher import ComputingClock, JobEnding, JobWatcher, Pace, StoppedError, run_in_background
from engine.batch_files.messages import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRow,
    BatchRows,
    SampleBatch,
    StartBatch,
)
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer
from engine.planner.batch_prediction import JobPrediction
from engine.process.requests import AnswerOthers, RequestQueue
from engine.protocol import Event, Generate

_ROWS_S = 0.25
_MOST_ROWS = 24
_MOST_CHARACTERS = 400


class BatchEngine(Protocol):
    """What batches need of an engine."""

    def run_batch(self, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding: ...

    def sample_batch(self, prepared: PreparedJob, rows: int, watcher: JobWatcher) -> None: ...


class Chats(Protocol):
    """The chats beside a job."""

    def are_due(self) -> bool:
        """Whether one is to have its turn."""

    def take_turns(self) -> None:
        """Answers them for as long as the job has computed since."""

    def give_way(self) -> None:
        """Answers them until none is left."""


class BatchService:
    """Runs jobs on the engine thread."""

    def __init__(self, requests: RequestQueue, send: Callable[[Event], None], chats: Chats) -> None:
        self._requests, self._send = requests, send
        self._chats = chats

    def run(self, engine: BatchEngine, request: StartBatch) -> BatchFinished:
        """Runs one job until it is done or stopped.

        Raises:
            EngineError: see `Engine.run_batch`.
        """
        events = _JobEvents(request.request_id, self._send)

        def cancelled() -> bool:
            # A request to load or unload a model: the job can be resumed later, so let the request go first.
            waiting = self._requests.waiting()
            return self._requests.is_cancelled(request.request_id) or not (
                waiting is None or isinstance(waiting, Generate | StartBatch | AnswerOthers)
            )

        watcher = self._watcher(events, events.answer, self._chats.give_way, self._chats.take_turns, cancelled)
        try:
            # Opening a huge pdf or ten thousand files takes long: do not keep a chat waiting for it.
            prepared = run_in_background(lambda _between: prepare(request.job), watcher, lambda _share: None)
            ending = engine.run_batch(prepared, watcher)
        except StoppedError:
            return BatchFinished(request.request_id, False, 0, 0, 0, 0, 0.0, "")
        finally:
            events.rows_now()
        pace = ending.pace
        return BatchFinished(
            request_id=request.request_id,
            finished=ending.finished,
            done=pace.done,
            failed=pace.failed,
            written=ending.written,
            tokens=ending.tokens,
            seconds=ending.computing_s,
            note=ending.note,
            output=str(ending.output or ""),
            errors=str(ending.errors or ""),
        )

    def sample(self, engine: BatchEngine, request: SampleBatch) -> BatchFinished:
        """Answers the first rows of a job; shares the engine with chats like a job.

        Raises:
            EngineError: see `Engine.sample_batch`.
        """
        clock = ComputingClock()
        events = _JobEvents(request.request_id, self._send)
        counts = [0, 0, 0]

        def answered(answer: Answer, question: str) -> None:
            counts[0] += 1
            counts[1] += answer.failed
            counts[2] += answer.generated_tokens
            events.answer(answer, question)
            events.rows_now()

        def cancelled() -> bool:
            return self._requests.is_cancelled(request.request_id)

        def untimed(answer: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with clock.stopped():
                    answer()

            return run

        chats = self._chats
        watcher = self._watcher(events, answered, untimed(chats.give_way), untimed(chats.take_turns), cancelled)
        with contextlib.suppress(StoppedError):
            with clock.stopped():
                prepared = run_in_background(lambda _between: prepare(request.job), watcher, lambda _share: None)
            engine.sample_batch(prepared, request.rows, watcher)
        done, failed, tokens = counts
        finished = not cancelled()
        return BatchFinished(request.request_id, finished, done, failed, 0, tokens, clock.now(), "")

    def _watcher(
        self,
        events: _JobEvents,
        on_answer: Callable[[Answer, str], None],
        give_way: Callable[[], None],
        share: Callable[[], None],
        cancelled: Callable[[], bool],
    ) -> JobWatcher:
        due = self._chats.are_due
        return JobWatcher(events.pace, on_answer, due, give_way, cancelled, events.plan, share=share)


class _JobEvents:
    """Sends one job's events to the window, no more often than it can show them."""

    def __init__(self, request_id: str, send: Callable[[Event], None]) -> None:
        self._request_id, self._send = request_id, send
        self._rows: list[BatchRow] = []
        self._rows_s = time.monotonic()

    def pace(self, pace: Pace, blocked: str) -> None:
        self._send(
            BatchProgress(
                request_id=self._request_id,
                done=pace.done,
                failed=pace.failed,
                total=-1 if pace.total is None else pace.total,
                tokens_per_s=pace.tokens_per_s,
                remaining_low_s=-1.0 if pace.remaining_low_s is None else pace.remaining_low_s,
                remaining_high_s=-1.0 if pace.remaining_high_s is None else pace.remaining_high_s,
                blocked=blocked,
                under_way=pace.under_way,
            )
        )

    def plan(self, prediction: JobPrediction) -> None:
        self._send(BatchPlanned.of(self._request_id, prediction))

    def answer(self, answer: Answer, question: str) -> None:
        shown = (question[:_MOST_CHARACTERS], answer.text[:_MOST_CHARACTERS])
        row = BatchRow(answer.row, *shown, answer.finish_reason, answer.generated_tokens, answer.problem)
        self._rows = [*self._rows, row][-_MOST_ROWS:]
        if time.monotonic() - self._rows_s >= _ROWS_S:
            self.rows_now()

    def rows_now(self) -> None:
        if self._rows:
            self._send(BatchRows(self._request_id, tuple(self._rows)))
            self._rows, self._rows_s = [], time.monotonic()
