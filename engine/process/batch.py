"""Batch jobs in the engine process: several at once, each with its own events, beside chats."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from engine.batch_files.job_watcher import ComputingClock, JobEnding, JobWatcher, Pace, StoppedError, run_in_background
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer
from engine.jobs.rows import never
from engine.planner.batch_prediction import JobPrediction
from engine.process.chats import ChatService
from engine.process.requests import RequestQueue, RequestThreads
from engine.protocol import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRow,
    BatchRows,
    Event,
    LoadModel,
    SampleBatch,
    StartBatch,
    StartTuning,
    UnloadModel,
)
from engine.telemetry.recorder import RequestLog

if TYPE_CHECKING:
    from engine.runtime.engine import Engine

_SETTLING_S = 0.01
_ROWS_S = 0.25
_MOST_ROWS = 24
_MOST_CHARACTERS = 400


JobRunner = Callable[[PreparedJob, JobWatcher], JobEnding]


class BatchService:
    """Runs jobs, each on a thread of its own beside the engine's, and samples on the engine's."""

    def __init__(self, requests: RequestQueue, send: Callable[[Event], object], chats: ChatService) -> None:
        self._requests, self._send = requests, send
        self._chats = chats
        self.threads = RequestThreads(requests)
        self._is_settling = False

    def start(self, engine: Engine, request: StartBatch) -> None:
        if request.job.endpoints:  # with this machine as one of them
            from engine.process.remote import runner_at

            runner = runner_at(request, engine.hosted_model(beside_others=True))
        else:
            runner = engine.job_runner()
        answer = partial(answered_job, request, runner, self._send, lambda: self._must_stop(request))
        self.threads.begin(request, "batch-job", "answering", answer)

    @property
    def are_running(self) -> bool:
        return bool(self.threads.running)

    def settle(self, meanwhile: Callable[[], None]) -> None:
        """Stops all jobs, which can be resumed later; `meanwhile` does what they want of the engine's thread."""
        self._is_settling = True
        try:
            while self.are_running:
                meanwhile()
                for thread in self.threads.running[:1]:
                    thread.join(_SETTLING_S)
        finally:
            self._is_settling = False

    def _must_stop(self, request: StartBatch) -> bool:
        if self._is_settling or self._requests.is_cancelled(request.request_id):
            return True
        # The job can be resumed later, so let these go first.
        return self._requests.waits(LoadModel, UnloadModel, StartTuning, SampleBatch)

    def sample(self, engine: Engine, request: SampleBatch) -> BatchFinished:
        """Answers the first rows of a job; shares the engine with chats like a job."""
        clock, chats = ComputingClock(), self._chats
        events = JobEvents(request.request_id, self._send)

        def cancelled() -> bool:
            return self._requests.is_cancelled(request.request_id)

        def untimed(answer: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with clock.stopped():
                    answer()

            return run

        watcher = JobWatcher(
            events.pace,
            events.answer_now,
            chats.are_due,
            untimed(lambda: chats.answer(never)),
            cancelled,
            events.plan,
            share=untimed(chats.take_turns),
        )
        with contextlib.suppress(StoppedError):
            with clock.stopped():
                prepared = run_in_background(lambda _between: prepare(request.job), watcher, lambda _share: None)
            engine.sample_batch(prepared, request.rows, watcher)
        return events.finished(not cancelled(), clock.now())


def answered_job(
    request: StartBatch, runner: JobRunner, send: Callable[[Event], object], cancelled: Callable[[], bool]
) -> BatchFinished:
    events = JobEvents(request.request_id, send)
    # Chats are answered between the layers of jobs, by whoever has the engine's thread.
    watcher = JobWatcher(events.pace, events.answer, lambda: False, lambda: None, cancelled, events.plan)
    try:
        # Opening a huge pdf or ten thousand files takes long.
        prepared = run_in_background(lambda _between: prepare(request.job), watcher, lambda _share: None)
        ending = runner(prepared, watcher)
        if ending.pace.places:
            events.pace(ending.pace, "")  # the last rows of each
    except StoppedError:
        return BatchFinished(request.request_id)
    finally:
        events.ends()
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
        cut_off=pace.cut_off,
    )


class JobEvents:
    """Sends one job's events to the window, no more often than it can show them."""

    def __init__(self, request_id: str, send: Callable[[Event], object]) -> None:
        self._request_id, self._send = request_id, send
        self._log = RequestLog()
        self._done = self._failed = self._tokens = 0
        self._rows: list[BatchRow] = []
        self._rows_s = time.monotonic()

    def pace(self, pace: Pace, blocked: str) -> None:
        self._log.has_answered(self._tokens)
        self._send(BatchProgress(self._request_id, pace, blocked))

    def plan(self, prediction: JobPrediction) -> None:
        self._send(BatchPlanned(self._request_id, prediction))

    def finished(self, finished: bool, seconds: float) -> BatchFinished:
        """The end of what writes no file."""
        return BatchFinished(self._request_id, finished, self._done, self._failed, tokens=self._tokens, seconds=seconds)

    def answer_now(self, answer: Answer, question: str) -> None:
        """For the few rows of a sample, each shown as soon as it comes."""
        self.answer(answer, question)
        self.rows_now()

    def answer(self, answer: Answer, question: str) -> None:
        self._done += 1
        self._failed += answer.failed
        self._tokens += answer.generated_tokens
        self._log.has_answered(self._tokens)
        asked, text, thought = (each[:_MOST_CHARACTERS] for each in (question, answer.shown, answer.reasoning))
        ended = answer.finish_reason, answer.generated_tokens, answer.problem
        row = BatchRow(answer.row, asked, text, *ended, thought)
        self._rows = [*self._rows, row][-_MOST_ROWS:]
        if time.monotonic() - self._rows_s >= _ROWS_S:
            self.rows_now()

    def ends(self) -> None:
        self.rows_now()
        self._log.ends()

    def rows_now(self) -> None:
        if self._rows:
            self._send(BatchRows(self._request_id, tuple(self._rows)))
            self._rows, self._rows_s = [], time.monotonic()
