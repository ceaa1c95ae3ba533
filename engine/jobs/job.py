"""One job: rows from the input to the executor, answers to the journal and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from engine.batch_files.fingerprint import RowCount, content_hash, counted_rows, stamp
from engine.batch_files.job_watcher import (
    Between,
    ComputingClock,
    JobEnding,
    JobWatcher,
    Pace,
    PaceMeter,
    StoppedError,
    run_in_background,
)
from engine.batch_files.journal import JobManifest, Journal, SafeKeeping
from engine.batch_files.openai_format import errors_path
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.result_file import MOST_OF_A_SHEET, Written, write_result
from engine.batch_files.rows import Answer, RowRequest
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.feed import Asking, RowFeed
from engine.jobs.rows import BatchOutcome, Check, RowAnswer, RowExecutor, never

_CHECK_S = 5.0
"""How often to check whether the input has changed."""
_REPORT_S = 0.5
_RETRY_S = 1.0
"""How often to retry after the disk was full."""
_SLEEP_S = 0.02
_Result = TypeVar("_Result")


class JobRun:
    """Runs one job until it ends or is cancelled; its answers are kept either way.

    A chat never waits longer than a layer, and shares the engine's thread with the rows: long work outside a layer uses
    `run_in_background`, waiting for a full disk leaves that thread free, and a chat interrupts skipping completed rows.

    Args:
        journal: of this job and `manifest`; the caller closes it.
        clock: seconds of computing; it may stand still while others compute.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        manifest: JobManifest,
        journal: Journal,
        executor: RowExecutor,
        watcher: JobWatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepared, self._manifest, self._journal = prepared, manifest, journal
        self._executor, self._watcher = executor, watcher
        self._stamp = stamp(prepared.source)
        self._checked_s = self._reported_s = time.monotonic()
        self._looks_changed = False
        self._waits = ""
        self._waits_since_s = 0.0
        done, bad, _tokens, self._cut_off = journal.counts()
        self._clock = ComputingClock(clock)
        most = prepared.most_tokens and max(prepared.most_tokens, journal.most_tokens_again)
        self._meter = PaceMeter(done, bad, self._clock.now(), most)
        self._keeping = SafeKeeping(journal)
        self._asking = Asking(prepared.job.tries)
        self._count = RowCount(None)

    def run(self) -> JobEnding:
        """Answers every row that has no outcome yet, and writes the result.

        Raises:
            EngineError: the input changed, the journal or the result cannot be written, or the model failed.
        """
        try:
            counted = self._in_background(
                "Counting the rows", lambda between: counted_rows(self._prepared.source, between)
            )
            self._count = RowCount(counted)
            self._report()
            finished = self._answer_all()
        except StoppedError:
            finished = False
        finally:
            self._keeping.flush()
        if finished:
            self._require_all_rows()
        else:
            self._check_input(at_once=True)
            if self._looks_changed:
                self._require_same_input(never)
        return self._written(finished)

    def _answer_all(self) -> bool:
        """Whether all rows have outcomes; False if the job was cancelled."""
        feed = RowFeed(self._asked(), self._journal.has, self._asking, self._count, self._keep, self._must_pause)

        def should_yield() -> bool:
            # Called between layers: rows with long answers report progress here.
            if time.monotonic() - self._reported_s >= _REPORT_S:
                self._report()
            return feed.paused or self._must_pause()

        while True:
            outcome = self._executor.run(feed.rows(), self._answered, should_yield, self._watcher.cancelled)
            if outcome is BatchOutcome.CANCELLED or not self._can_continue():
                return False
            if outcome is BatchOutcome.FINISHED and feed.is_over:
                self._check_input(at_once=True)
                return self._can_continue()

    def _asked(self) -> Iterator[tuple[float, RowRequest | Answer]]:
        """The rows of the input; those that were cut off earlier may have more tokens."""
        for share, asked in self._prepared.asked():
            tokens = self._journal.tokens_again(asked.row)
            if tokens is not None and isinstance(asked, RowRequest):
                had = asked.sampling.max_tokens
                sampling = replace(asked.sampling, max_tokens=max(had, tokens or 2 * had))
                asked = replace(asked, sampling=sampling)
            yield share, asked

    def _must_pause(self) -> bool:
        """Whether something has to be done before the next row."""
        self._check_input()
        return bool(self._keeping.problem) or self._looks_changed or self._watcher.should_yield()

    def _can_continue(self) -> bool:
        """Does what has to be done before the next row; False if the job was cancelled meanwhile."""
        while not self._keeping.flush():
            if not self._wait_for_room(self._keeping.problem):
                return False
        self._end_waiting()
        if self._looks_changed:
            self._require_same_input()
        if self._watcher.should_yield():
            with self._clock.stopped():
                self._watcher.take_turns()
        return not self._watcher.cancelled()

    def _wait_for_room(self, problem: str) -> bool:
        """Waits briefly while others use the machine; False if the job was cancelled.

        The problem is reported once; failed retries are not.

        Raises:
            EngineError: `DISK_FULL`: there was still no room after the watcher's `patience_s`.
        """
        begun_s = time.monotonic()
        patience = self._watcher.patience_s
        if not self._waits:
            most = "" if patience is None else f" up to {patience:.0f} s"
            self._waits, self._waits_since_s = f"Waiting{most}: {problem}", begun_s
        self._report()
        if patience is not None and begun_s - self._waits_since_s >= patience:
            done = self._journal.counts()[0]
            raise EngineError(
                ErrorCode.DISK_FULL,
                f"The disk of {self._full_folder()} stayed full for {patience:.0f} s: free some space and resume the "
                f"job; its {done:,} answers are kept.",
            )
        with self._clock.stopped():
            while time.monotonic() < begun_s + _RETRY_S:
                if self._watcher.cancelled():
                    return False
                self._give_way()
                time.sleep(_SLEEP_S)
        return True

    def _full_folder(self) -> Path:
        """The folder on the full disk: that of the answers, or that of the result."""
        return self._journal.path.parent if self._keeping.problem else self._prepared.output.parent

    def _end_waiting(self) -> None:
        if self._waits:
            self._waits = ""
            self._report()

    def _give_way(self) -> None:
        if self._watcher.should_yield():
            with self._clock.stopped():
                self._watcher.give_way()

    def _answered(self, answer: RowAnswer) -> None:
        ended = self._asking.ended(answer)
        if ended is not None:
            self._keep(*ended)

    def _keep(self, answer: Answer, question: str) -> None:
        self._keeping.keep(answer)
        self._meter.ended(failed=answer.failed, generated_tokens=answer.generated_tokens)
        self._cut_off += answer.is_cut_off
        self._watcher.on_answer(answer, question)
        if time.monotonic() - self._reported_s >= _REPORT_S:
            self._report()

    def _report(self, blocked: str = "") -> None:
        self._reported_s = time.monotonic()
        self._watcher.on_pace(self._pace(), self._waits or blocked or self._executor.waits)

    def _pace(self) -> Pace:
        rows, tokens = self._executor.under_way
        pace = self._meter.pace(self._count.total, self._clock.now(), under_way=rows, under_way_tokens=tokens)
        return replace(pace, places=self._executor.places, cut_off=self._cut_off)

    def _in_background(self, doing: str, work: Callable[[Between], _Result], cancelled: Check | None = None) -> _Result:
        is_reported = False

        def on_share(share: float) -> None:
            nonlocal is_reported
            if time.monotonic() - self._reported_s >= _REPORT_S:
                is_reported = True
                self._report(f"{doing}: {share:.0%}")

        with self._clock.stopped():
            result = run_in_background(work, self._watcher, on_share, cancelled=cancelled)
        if is_reported:
            self._report()
        return result

    def _check_input(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._checked_s >= _CHECK_S:
            self._checked_s = now
            self._looks_changed = self._looks_changed or stamp(self._prepared.source) != self._stamp

    def _require_same_input(self, cancelled: Check | None = None) -> None:
        """Compares the input's hash: a touched or restored file counts as unchanged."""
        source = self._prepared.source
        signs = stamp(source)
        found = self._in_background("Reading the input", lambda between: content_hash(source, between), cancelled)
        if found != self._manifest.input_hash:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{source.path} was changed while the job ran: restore the old file and resume, or "
                "restart the job with the new one. The answers so far are kept.",
            )
        self._stamp, self._looks_changed = signs, False

    def _require_all_rows(self) -> None:
        """Checks that every row has an outcome; a violation is an internal error and no result is written."""
        done = self._journal.counts()[0]
        if self._asking.under_way or self._count.total != done:
            raise EngineError(
                ErrorCode.INTERNAL, f"{done} of {self._count.total} rows were answered: resume the job and report this."
            )

    def _written(self, finished: bool) -> JobEnding:
        """Writes the result, for a cancelled job as far as there is one, and describes the outcome."""
        source, output, begun_s = self._prepared.source, self._prepared.output, int(self._journal.begun_s)

        def write(between: Between) -> Written:
            journal, openai = self._journal, self._prepared.openai
            asked = ("reasoning", journal.has_reasoning), ("endpoint", self._prepared.job.name_endpoints)
            extras = [name for name, is_there in asked if is_there]
            return write_result(
                output,
                source,
                journal.answers(),
                rows=journal.kept,
                ledger=journal,
                openai=openai,
                created_s=begun_s,
                extras=extras,
                raw_text=self._prepared.job.raw_text,
                between=between,
            )

        while True:
            try:
                written = self._in_background("Writing the result", write, cancelled=None if finished else never)
                if finished:
                    self._journal.finish()
                self._end_waiting()
                return self._ending(finished, written)
            except StoppedError:
                return self._ending(False)
            except EngineError as error:
                if error.code != ErrorCode.DISK_FULL:
                    raise
                full = f"The disk of {output.parent} is full: the result is written once there is room."
                if not finished or not self._wait_for_room(full):
                    return self._ending(False, note=error.message)

    def _ending(self, finished: bool, written: Written | None = None, note: str = "") -> JobEnding:
        asked, pace, unkept = self._prepared.output, self._pace(), self._keeping.waiting
        if unkept:
            done, failed, _tokens, cut_off = self._journal.counts()
            pace = replace(pace, done=done, failed=failed, cut_off=cut_off)
            lost = "the last answer was" if unkept == 1 else f"the last {unkept:,} answers were"
            folder = self._journal.path.parent
            sentence = f"The disk of {folder} is full, and {lost} not kept: free some space and resume."
            note = f"{sentence} {note}".strip()
        if written is None:
            return JobEnding(finished, pace, 0, self._meter.tokens, self._clock.now(), note, unkept=unkept)
        is_csv = written.asked != asked  # too many rows for a sheet
        elsewhere = [
            f"{there.name} is not a file of this job or was changed: {what} in {here}."
            for there, here, what in (
                (written.output if is_csv else asked, written.output, "the result is"),
                (errors_path(asked), written.errors, "failed rows are"),
            )
            if here is not None and here != there
        ]
        if is_csv:
            elsewhere.append(f"{MOST_OF_A_SHEET}, and this job has more: the result is in {written.output}.")
        return JobEnding(
            finished,
            pace,
            written.rows,
            self._meter.tokens,
            self._clock.now(),
            " ".join([*elsewhere, note]).strip(),
            written.output,
            written.errors,
            unkept,
        )
