"""One job: rows from the input to the executor, answers to the journal and the result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

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
from engine.batch_files.journal import JobManifest, Journal, SafeKeeping, StopRequest, journal_path, read_job
from engine.batch_files.openai_format import errors_path
from engine.batch_files.opening import RowCount, content_hash, counted_rows, stamp
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.result_file import MOST_OF_A_SHEET, Written, write_result
from engine.batch_files.rows import Answer, RowRequest
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import BatchOutcome, Check, ClosingExecutor, RowExecutor, never


@dataclass(frozen=True, slots=True)
class _UnderWay:
    asked: RowRequest
    tries: int


class Asking:
    """The rows in progress.

    Args:
        tries: how often to try a row whose sampled answer is cut before it satisfies its constraint.
    """

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._under_way: dict[int, _UnderWay] = {}
        self._again: deque[_UnderWay] = deque()

    @property
    def waiting(self) -> bool:
        """Whether rows are waiting for another try."""
        return bool(self._again)

    @property
    def under_way(self) -> int:
        """Rows that were requested and have no outcome yet."""
        return len(self._under_way) + len(self._again)

    def ask(self, asked: RowRequest) -> RowRequest:
        self._under_way[asked.row] = _UnderWay(asked, tries=1)
        return asked

    def again(self) -> Iterator[RowRequest]:
        """The rows that need another try."""
        while self._again:
            last = self._again.popleft()
            sampling = last.asked.sampling
            # With the same seed the same tokens would be sampled again.
            seed = None if sampling.seed is None else sampling.seed + last.tries
            again = replace(last.asked, sampling=replace(sampling, seed=seed))
            self._under_way[again.row] = _UnderWay(again, last.tries + 1)
            yield again

    def ended(self, answer: Answer) -> tuple[Answer, str] | None:
        """A row's outcome and the message it answers; None if the row is tried again, or was cancelled."""
        if answer.finish_reason == "cancelled":
            return None
        row = self._under_way.pop(answer.row)
        problem = ""
        if answer.problem:
            problem = f"could not be answered: {answer.problem}"
        elif not answer.is_complete:
            # This machine gives the same greedy answer every time; others need not.
            if (answer.by or not row.asked.sampling.is_greedy) and row.tries < self._tries:
                self._again.append(row)
                return None
            is_cut = answer.is_cut_off or not answer.by
            cut = f"was cut after {answer.generated_tokens:,} tokens, before it was complete"
            problem = f"has an answer that {cut if is_cut else 'does not satisfy its schema or choices'}"
        return replace(answer, problem=problem), question_of(row.asked)


def question_of(asked: RowRequest) -> str:
    return asked.messages[-1].content if asked.messages else ""


class RowFeed:
    """The rows of one run of a job.

    Args:
        asked: rows, each with the share of the input read so far, 0 to 1.
        has_ending: whether the row of this number is done already and skipped.
        count: records how far the input has been read.
        keep: takes outcomes of rows that never reach the executor, with the message to answer.
        must_pause: called for every row read: a resumed job may have to skip a million rows before the next one to run,
            and a chat must not wait for that.
    """

    def __init__(
        self,
        asked: Iterator[tuple[float, RowRequest | Answer]],
        has_ending: Callable[[int], bool],
        asking: Asking,
        count: RowCount,
        keep: Callable[[Answer, str], None],
        must_pause: Check,
    ) -> None:
        self._asked, self._has_ending = asked, has_ending
        self._asking, self._count = asking, count
        self._keep, self._must_pause = keep, must_pause
        self._read = 0
        self._is_read = False
        self.paused = False
        """Whether the last `rows` stopped before its end."""

    @property
    def is_over(self) -> bool:
        """Whether every row has been handed out or kept, and none needs another try."""
        return self._is_read and not self._asking.waiting

    def rows(self) -> Iterator[RowRequest]:
        """The rows to run next, continuing where the previous iterator stopped."""
        self.paused = False
        while not self._is_read or self._asking.waiting:
            yield from self._asking.again()
            if self._must_pause():
                self.paused = True
                return
            if not self._is_read:
                yield from self._next()

    def _next(self) -> Iterator[RowRequest]:
        entry = next(self._asked, None)
        if entry is None:
            self._is_read = True
            self._count.ended(self._read)
            return
        share, asked = entry
        self._read += 1
        self._count.read(self._read, share)
        if self._has_ending(asked.row):
            return
        if isinstance(asked, Answer):
            self._keep(asked, "")
        else:
            yield self._asking.ask(asked)


@dataclass(frozen=True, slots=True)
class Answerer:
    """Who answers a job's rows.

    Attributes:
        name: for lists of jobs.
        digest, precision: see `JobManifest`: a job is continued only by the same.
        servers: see `PreparedJob.open_journal`.
    """

    name: str
    digest: str
    precision: str
    servers: tuple[Mapping[str, str], ...] = ()


def run_job(
    prepared: PreparedJob,
    answerer: Answerer,
    open_executor: Callable[[JobWatcher], ClosingExecutor],
    watcher: JobWatcher,
    clock: Callable[[], float] = time.monotonic,
) -> JobEnding:
    """Answers the rows of a job and writes its result.

    Args:
        open_executor: makes who answers the rows, once the job's answers so far are open; it is closed in the end.
        clock: see `JobRun`.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    so_far = read_job(journal_path(prepared.output)) if prepared.job.start != "restart" else None
    known = Pace(0, 0, None, 0.0, None, None)
    if so_far is not None:
        known = replace(known, done=so_far.done, failed=so_far.failed, cut_off=so_far.cut_off)
    try:
        manifest = run_in_background(
            lambda between: prepared.manifest(answerer.digest, answerer.precision, between),
            watcher,
            lambda share: watcher.on_pace(known, f"Reading the input: {share:.0%}"),
        )
    except StoppedError:
        return JobEnding(False, known, 0)
    with (
        closing(prepared.open_journal(manifest, answerer.name, answerer.servers)) as journal,
        StopRequest(journal.path) as stop,
    ):
        here = watcher.cancelled
        watcher = replace(watcher, cancelled=lambda: here() or stop.is_made())
        with closing(open_executor(watcher)) as executor:
            ending = JobRun(prepared, manifest, journal, executor, watcher, clock).run()
            return replace(ending, note=" ".join(filter(None, (prepared.source.remark, ending.note, executor.note))))


def run_first_rows(
    prepared: PreparedJob,
    rows: int,
    executor: RowExecutor,
    watcher: JobWatcher,
    should_yield: Check = never,
    leave: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answers the first rows of a job without keeping anything.

    Args:
        watcher: receives each answer with the message it answers, in any order.  It receives no pace.
        should_yield: asked between two steps; `leave` is then called and returns once the rows may go on.

    Returns:
        every try of every row.
    """
    asking = Asking(prepared.job.tries)
    feed = RowFeed(islice(prepared.asked(), rows), lambda _row: False, asking, RowCount(None), watcher.on_answer, never)
    tries = list[Answer]()

    def answered(answer: Answer) -> None:
        tries.append(answer)
        ended = asking.ended(answer)
        if ended is not None:
            watcher.on_answer(*ended)

    outcome = BatchOutcome.YIELDED
    while outcome is BatchOutcome.YIELDED or (outcome is BatchOutcome.FINISHED and not feed.is_over):
        outcome = executor.run(feed.rows(), answered, should_yield, watcher.cancelled)
        if outcome is BatchOutcome.YIELDED:
            leave()
    return tries


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
        """Answers every row that has no outcome yet, and writes the result."""
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

    def _answered(self, answer: Answer) -> None:
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
