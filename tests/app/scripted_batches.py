"""A scripted engine that takes batch jobs, too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pytestqt.qtbot import QtBot

from app.services.batch_jobs import BatchJobs
from app.services.batch_sample import BatchSample
from app.services.engine_request import BatchRun
from app.views.batch.page import BatchPage
from engine.batch_files.job_watcher import Pace, PlacePace
from engine.common.config import BatchJob
from engine.common.errors import ErrorCode
from engine.planner.batch_prediction import Bottleneck, JobPrediction, JobRows
from engine.protocol import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRow,
    BatchRows,
    Failed,
    SampleBatch,
    StartBatch,
)
from tests.app.scripted_engine import STARTER, ScriptedEngine

PLAN = JobPrediction(JobRows(300, 0, 48.0), 24, 1, "", 300.0, 200.0, 400.0, 60.0, 120.0, Bottleneck.WEIGHTS)


class ScriptedBatches(ScriptedEngine):
    """`jobs` and `samples` hold what was asked for."""

    def __init__(self, *, loaded: bool = True) -> None:
        super().__init__(STARTER if loaded else None)
        self.jobs: list[BatchRun] = []
        self.samples: list[BatchRun] = []

    # --- what the page calls ---

    def start_batch(self, job: BatchJob) -> BatchRun:
        self.jobs.append(BatchRun(StartBatch(f"b{len(self.jobs)}", job), self._cancel, self))
        self.batch_began.emit(self.jobs[-1])
        return self.jobs[-1]

    def sample_batch(self, job: BatchJob, rows: int) -> BatchRun:
        assert rows == 3
        self.samples.append(BatchRun(SampleBatch(f"s{len(self.samples)}", job, rows), self._cancel, self))
        self.batch_began.emit(self.samples[-1])
        return self.samples[-1]

    # --- what the test makes it do ---

    def tell(
        self,
        done: int,
        total: int = -1,
        *,
        failed: int = 0,
        cut_off: int = 0,
        rate: float = 0.0,
        left: float = -1.0,
        blocked: str = "",
        of: int = -1,
        places: tuple[PlacePace, ...] = (),
    ) -> None:
        """Progress of a job, the latest one if not told; `left` are seconds, of which the upper end is twice as far."""
        low, high = (left, left * 2) if left >= 0 else (None, None)
        rows = total if total >= 0 else None
        pace = Pace(done, failed, rows, rate, low, high, places=places, cut_off=cut_off)
        self.jobs[of].deliver(BatchProgress(self.jobs[of].id, pace, blocked))

    def answer(self, *rows: BatchRow, sample: bool = False) -> None:
        run = (self.samples if sample else self.jobs)[-1]
        run.deliver(BatchRows(run.id, rows))

    def plan(self, *, sample: bool = False, measured: bool = False) -> None:
        """How the latest job, or sample, says that all rows will be run."""
        run = (self.samples if sample else self.jobs)[-1]
        run.deliver(BatchPlanned(run.id, replace(PLAN, job=JobRows(6, 0, 40.0), is_measured=measured)))

    def end(self, done: int, failed: int = 0, *, finished: bool = True, of: int = -1, cut_off: int = 0) -> None:
        """A job ends, finished or stopped: the latest one if not told."""
        ended = BatchFinished(self.jobs[of].id, finished, done, failed, done, 10 * done, 2.0, "")
        self.jobs[of].end(replace(ended, cut_off=cut_off))

    def end_sample(self, done: int = 3, *, finished: bool = True) -> None:
        self.samples[-1].end(BatchFinished(self.samples[-1].id, finished, done, 0, 0, 10 * done, 2.0, ""))

    def fail_job(self, code: ErrorCode, message: str) -> None:
        self.jobs[-1].end(Failed(self.jobs[-1].id, code, message))


def row(number: int, *, problem: str = "") -> BatchRow:
    """A row that has ended."""
    return replace(
        BatchRow(number, f"question {number}", f"answer {number}", "stop", 5, ""),
        **({"problem": problem, "answer": "", "finish_reason": "failed"} if problem else {}),
    )


@contextmanager
def shown_page(engine: ScriptedBatches, qtbot: QtBot) -> Iterator[BatchPage]:
    """The Batch page over this engine, once it has listed the jobs of before."""
    jobs = BatchJobs(engine)
    page = BatchPage(engine, jobs, BatchSample(engine, jobs))
    qtbot.addWidget(page)
    page.resize(1072, 760)
    page.show()
    qtbot.waitSignal(jobs.listed).wait()
    yield page
    page.close_down()
    jobs.close_down()
    jobs.deleteLater()
