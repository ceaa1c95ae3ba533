"""Before a whole job: forecasts for its form, and a sample, its first rows answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient
from app.services.engine_request import BatchRun
from engine.common.config import BatchJob
from engine.common.errors import ErrorCode
from engine.protocol import BatchFinished, BatchRows, Failed
from engine.tuning.batch_forecast import Forecast, ForecastQuestion, forecast_of

_DEBOUNCE_MS = 250


class BatchForecasts(QObject):
    """Answers the latest question; superseded ones are dropped.

    Signals:
        answered: a `Forecast`, or None if none is possible.
    """

    answered = Signal(object)

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        forecast: Callable[[ForecastQuestion], Forecast | None] | None = None,
    ) -> None:
        super().__init__(parent)
        self._forecast = forecast or forecast_of
        self._asked: ForecastQuestion | None = None
        self._task = LatestTask(self, after_ms=_DEBOUNCE_MS)

    def ask(self, question: ForecastQuestion) -> None:
        if question != self._asked:
            self._asked = question
            answered = self.answered.emit
            self._task.ask(lambda: self._forecast(question), answered, lambda _error: answered(None))

    def forget(self) -> None:
        self._asked = None
        self._task.forget()

    def close(self) -> None:
        self._asked = None
        self._task.close()


SAMPLE_ROWS = 3


@dataclass(frozen=True, slots=True)
class SampleRate:
    rows: int
    tokens: int
    seconds: float


class BatchSample(QObject):
    """Runs one sample at a time; a running job waits for it and then continues.

    Signals:
        answered: `BatchRow`s as they finish.
        planned: a `BatchPlanned` for the whole job, based on these rows.
        sampled: a `BatchSampled`: what they took at endpoints.
        ended: a `SampleRate`, or None if it was stopped.
        failed: one sentence.
    """

    answered = Signal(object)
    planned = Signal(object)
    sampled = Signal(object)
    ended = Signal(object)
    failed = Signal(str)

    def __init__(self, client: EngineClient, jobs: BatchJobs, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client, self._jobs = client, jobs
        self._run: BatchRun | None = None

    @property
    def is_running(self) -> bool:
        return self._run is not None

    def start(self, job: BatchJob) -> None:
        if self._run is None:
            if not job.is_remote:  # which takes nothing from jobs on this PC
                self._jobs.hold()
            self._run = run = self._client.sample_batch(job, SAMPLE_ROWS)
            run.answered.connect(self._on_answered)
            run.planned.connect(self.planned)
            run.sampled.connect(self.sampled)
            run.finished.connect(self._on_finished)

    def stop(self) -> None:
        if self._run is not None:
            self._run.cancel()

    def _on_answered(self, event: BatchRows) -> None:
        self.answered.emit(event.rows)

    def _on_finished(self, event: BatchFinished | Failed) -> None:
        self._run = None
        if isinstance(event, BatchFinished):
            complete = event.finished and event.tokens > 0 and event.seconds > 0
            self.ended.emit(SampleRate(event.done, event.tokens, event.seconds) if complete else None)
        elif event.code is not ErrorCode.ENGINE_DIED:
            self.failed.emit(event.message)
        else:
            self.ended.emit(None)  # the engine banner explains why
        self._jobs.release()
