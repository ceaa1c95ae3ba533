"""The first rows of a job, answered before the whole of it is."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QObject, Signal

from app.services.batch_jobs import BatchJobs
from app.services.engine_client import EngineClient
from engine.batch_files.messages import BatchFinished, BatchPlanned, BatchRows
from engine.common.config import BatchJob
from engine.common.errors import ErrorCode
from engine.protocol import Failed

SAMPLE_ROWS = 3


@dataclass(frozen=True, slots=True)
class SampleRate:
    """What a sample measured: rows, the tokens they took, and the seconds."""

    rows: int
    tokens: int
    seconds: float


class BatchSample(QObject):
    """Asks for one sample at a time; a job that runs waits for it and then goes on.

    Signals:
        answered: `BatchRow`s as they end.
        planned: a `BatchPlanned` of the whole job, with what these rows have shown.
        ended: a `SampleRate`, or None if it was stopped.
        failed: one sentence.
    """

    answered = Signal(object)
    planned = Signal(object)
    ended = Signal(object)
    failed = Signal(str)

    def __init__(self, client: EngineClient, jobs: BatchJobs, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client, self._jobs = client, jobs
        self._request = ""
        client.batch_told.connect(self._on_told)
        client.finished.connect(self._on_finished)

    @property
    def is_running(self) -> bool:
        return bool(self._request)

    def start(self, job: BatchJob) -> None:
        """Answers the first rows of this job; without effect while a sample is under way."""
        if not self._request:
            self._jobs.hold()
            self._request = self._client.sample_batch(job, SAMPLE_ROWS)

    def stop(self) -> None:
        """Ends the sample; what was answered of it stays shown."""
        if self._request:
            self._client.cancel(self._request)

    def _on_told(self, event: object) -> None:
        if isinstance(event, BatchRows) and event.request_id == self._request:
            self.answered.emit(event.rows)
        elif isinstance(event, BatchPlanned) and event.request_id == self._request:
            self.planned.emit(event)

    def _on_finished(self, event: object) -> None:
        if not self._request or not isinstance(event, BatchFinished | Failed) or event.request_id != self._request:
            return
        self._request = ""
        if isinstance(event, BatchFinished):
            complete = event.finished and event.tokens > 0 and event.seconds > 0
            self.ended.emit(SampleRate(event.done, event.tokens, event.seconds) if complete else None)
        elif event.code is not ErrorCode.ENGINE_DIED:
            self.failed.emit(event.message)
        else:
            self.ended.emit(None)  # the banner that offers to restart the engine says why
        self._jobs.go_on()
