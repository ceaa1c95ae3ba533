"""One job with one loaded model: rows from the input to the executor, answers from it to the journal and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.batch_files.answer import Answer
from engine.batch_files.fingerprint import content_hash, stamp
from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.journal import Journal
from engine.batch_files.manifest import Manifest
from engine.batch_files.pace import Pace, PaceMeter
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.result_file import write_result
from engine.batch_files.row_count import RowCount
from engine.batch_files.safe_keeping import SafeKeeping
from engine.errors import EngineError, ErrorCode
from engine.runtime.batch.asking import Asking, question_of
from engine.runtime.batch.request import AnswerCallback, BatchAnswer, BatchRequest, Check, Outcome
from engine.runtime.constrained import ConstrainedAnswers

_WATCH_S = 5.0
"""How often the input is asked whether it has changed."""
_TELL_S = 0.5


class RowExecutor(Protocol):
    """Answers rows in any order, many at once; `BatchExecutor` is the real one."""

    def run(
        self, rows: Iterator[BatchRequest], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> Outcome:
        """See `BatchExecutor.run`."""

    @property
    def under_way(self) -> tuple[int, int]:
        """See `BatchExecutor.under_way`."""


class JobRun:
    """Runs one job to its end or to its cancellation; what it has answered is kept either way.

    Args:
        journal: of this job and `manifest`; the caller closes it.
        make_constrained: see `Asking`.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        manifest: Manifest,
        journal: Journal,
        executor: RowExecutor,
        make_constrained: Callable[[], ConstrainedAnswers],
        watcher: JobWatcher,
    ) -> None:
        self._prepared, self._manifest, self._journal = prepared, manifest, journal
        self._executor, self._watcher = executor, watcher
        self._stamp = stamp(prepared.source)
        self._watched_s = self._told_s = time.monotonic()
        done, bad, _tokens = journal.counts()
        self._meter = PaceMeter(done, bad, self._watched_s, prepared.most_tokens)
        self._keeping = SafeKeeping(journal, on_blocked=self._blocked, cancelled=watcher.cancelled)
        self._asking = Asking(prepared.job.tries, make_constrained)
        self._count = RowCount(prepared.source, watcher.cancelled)

    def run(self) -> JobEnding:
        """Answers every row that has no ending yet, and writes the result.

        Raises:
            EngineError: the input changed, the journal or the result cannot be written, or the model gave up.
        """
        self._tell()
        try:
            finished = self._answer_all()
        finally:
            self._keeping.flush()
        self._require_same_input()
        source, output = self._prepared.source, self._prepared.output
        if finished:
            self._require_all_rows()
        written = write_result(output, source, self._journal.answers(), openai=self._prepared.openai)
        if finished:
            self._journal.finish()
        return JobEnding(finished, self._pace(), written, self._meter.tokens)

    def _answer_all(self) -> bool:
        rows = self._requests()
        while True:
            outcome = self._executor.run(rows, self._answered, self._should_yield, self._watcher.cancelled)
            if outcome is Outcome.CANCELLED:
                return False
            if outcome is Outcome.YIELDED:
                self._keeping.flush()
                self._watcher.give_way()
            elif self._asking.waiting:  # rows that are asked once more, after the last one had been handed out
                rows = self._asked_again()
            else:
                return not self._watcher.cancelled()

    def _should_yield(self) -> bool:
        """Asked between layers: a good moment to tell how far rows are that have long answers."""
        if time.monotonic() - self._told_s >= _TELL_S:
            self._tell()
        return self._watcher.should_yield()

    def _requests(self) -> Iterator[BatchRequest]:
        """Every row without an ending, read from the input as the executor has room for it."""
        count = 0
        for share, asked in self._prepared.asked():
            yield from self._asked_again()
            count += 1
            self._count.read(count, share)
            if self._watcher.cancelled():
                return
            self._watch_input()
            if self._journal.has(asked.row):
                continue
            if isinstance(asked, Answer):
                self._keep(asked, "")
            else:
                yield from self._runnable(self._asking.ask(asked), question_of(asked))
        self._count.ended(count)

    def _asked_again(self) -> Iterator[BatchRequest]:
        for request in self._asking.again():
            yield from self._runnable(request, "")

    def _runnable(self, request: BatchRequest | Answer, question: str) -> Iterator[BatchRequest]:
        if isinstance(request, Answer):
            self._keep(request, question)
        else:
            yield request

    def _answered(self, answer: BatchAnswer) -> None:
        ended = self._asking.ended(answer)
        if ended is not None:
            self._keep(*ended)

    def _keep(self, answer: Answer, question: str) -> None:
        self._keeping.keep(answer)
        self._meter.ended(failed=answer.failed, generated_tokens=answer.generated_tokens)
        self._watcher.on_answer(answer, question)
        if time.monotonic() - self._told_s >= _TELL_S:
            self._tell()

    def _tell(self, blocked: str = "") -> None:
        self._told_s = time.monotonic()
        self._watcher.on_pace(self._pace(), blocked)

    def _blocked(self, reason: str) -> None:
        self._tell(f"Waiting: {reason}" if reason else "")

    def _pace(self) -> Pace:
        rows, tokens = self._executor.under_way
        return self._meter.pace(self._count.total, time.monotonic(), under_way=rows, under_way_tokens=tokens)

    def _watch_input(self) -> None:
        now = time.monotonic()
        if now - self._watched_s >= _WATCH_S:
            self._watched_s = now
            self._require_same_input()

    def _require_same_input(self) -> None:
        signs = stamp(self._prepared.source)
        if signs == self._stamp:
            return
        # Touched, or copied back: what counts is what is in it.
        if content_hash(self._prepared.source) != self._manifest.input_hash:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._prepared.source.path} was changed while the job ran: put the old file back and resume, or "
                f"restart the job with the new one; the answers so far are kept.",
            )
        self._stamp = signs

    def _require_all_rows(self) -> None:
        """Every row has had its ending: what says otherwise is a fault of ours, and better said than written."""
        done = self._journal.counts()[0]
        if self._asking.under_way or self._count.total != done:
            raise EngineError(
                ErrorCode.INTERNAL, f"Of {self._count.total} rows {done} were answered: resume the job and report this."
            )
