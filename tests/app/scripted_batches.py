"""A scripted engine that takes batch jobs, too."""

from __future__ import annotations

from dataclasses import replace

from engine.batch_files.messages import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRow,
    BatchRows,
)
from engine.common.config import BatchJob
from engine.common.errors import ErrorCode
from engine.protocol import Failed
from tests.app.scripted_engine import STARTER, ScriptedEngine


class ScriptedBatches(ScriptedEngine):
    """`jobs` and `samples` hold what was asked: request id and job."""

    def __init__(self, *, loaded: bool = True) -> None:
        super().__init__(STARTER if loaded else None)
        self.jobs: list[tuple[str, BatchJob]] = []
        self.samples: list[tuple[str, BatchJob]] = []

    # --- what the page calls ---

    def start_batch(self, job: BatchJob) -> str:
        self.jobs.append((f"b{len(self.jobs)}", job))
        return self.jobs[-1][0]

    def sample_batch(self, job: BatchJob, rows: int) -> str:
        assert rows == 3
        self.samples.append((f"s{len(self.samples)}", job))
        return self.samples[-1][0]

    # --- what the test makes it do ---

    def tell(
        self, done: int, total: int = -1, *, failed: int = 0, rate: float = 0.0, left: float = -1.0, blocked: str = ""
    ) -> None:
        """Progress of the latest job; `left` are seconds, of which the upper end is twice as far."""
        high = left * 2 if left >= 0 else -1.0
        self.batch_told.emit(BatchProgress(self.jobs[-1][0], done, failed, total, rate, left, high, blocked))

    def answer(self, *rows: BatchRow, sample: bool = False) -> None:
        request_id = (self.samples if sample else self.jobs)[-1][0]
        self.batch_told.emit(BatchRows(request_id, rows))

    def plan(self, *, sample: bool = False, measured: bool = False) -> None:
        """How the latest job, or sample, says that all rows will be run."""
        request_id = (self.samples if sample else self.jobs)[-1][0]
        self.batch_told.emit(
            BatchPlanned(request_id, 24, 1, "", 6, 40.0, 200.0, 400.0, 60.0, 120.0, "weights", is_measured=measured)
        )

    def end(self, done: int, failed: int = 0, *, finished: bool = True) -> None:
        """The latest job ends, finished or stopped."""
        self.finished.emit(BatchFinished(self.jobs[-1][0], finished, done, failed, done, 10 * done, 2.0, ""))

    def end_sample(self, done: int = 3, *, finished: bool = True) -> None:
        self.finished.emit(BatchFinished(self.samples[-1][0], finished, done, 0, 0, 10 * done, 2.0, ""))

    def fail_job(self, code: ErrorCode, message: str) -> None:
        self.finished.emit(Failed(self.jobs[-1][0], code, message))


def row(number: int, *, problem: str = "") -> BatchRow:
    """A row that has ended."""
    return replace(
        BatchRow(number, f"question {number}", f"answer {number}", "stop", 5, ""),
        **({"problem": problem, "answer": "", "finish_reason": "failed"} if problem else {}),
    )
