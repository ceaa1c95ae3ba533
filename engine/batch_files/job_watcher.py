"""A running job as seen from outside: its callbacks, its speed and remaining time, its outcome.

The clock stops while a job waits, so rates and estimates count computing time only. Long reads and writes run on a
background thread, so that the engine thread can answer chats.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from engine.batch_files.rows import Answer
from engine.planner.batch_prediction import JobPrediction


class ComputingClock:
    """Monotonic seconds, starting at 0."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._waited_s = 0.0
        self._waits_since_s: float | None = None

    def now(self) -> float:
        """Seconds of computing so far."""
        return (self._clock() if self._waits_since_s is None else self._waits_since_s) - self._begun_s - self._waited_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock inside the block; may be nested."""
        if self._waits_since_s is not None:
            yield
            return
        self._waits_since_s = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - self._waits_since_s
            self._waits_since_s = None


_WINDOW_S = 120.0
_LEAST_S = 3.0
_TELLING_TOKENS = 2
"""Tokens generated per active row before estimating: earlier, prompts take most of the time."""
_PARTS = 6


PlaceState = Literal["starting", "working", "resting", "out"]
"""`starting`: it will answer.  `resting`: it is asked again after a pause.  `out`: somebody has to do something first,
as where a key is wrong."""


@dataclass(frozen=True, slots=True)
class PlacePace:
    """One of several places where a job's rows are answered: this machine, an endpoint, a node of a cluster.

    Attributes:
        name: what people call it; empty for this machine.
        host: where text goes; empty if it stays on this machine.
        why: it is not `working`, as a sentence.
        under_way, at_once: rows that it has now, and how many it may have.
        rows, failed: answered in this run, and those of them that failed.
        prompt_tokens, generated_tokens: of all that it was asked in this run, attempts that were discarded among them.
        tokens_per_s: generated recently; 0 while unknown.
        cost: of these tokens, in `currency`; None if it has no price.
    """

    name: str
    host: str = ""
    state: PlaceState = "working"
    why: str = ""
    under_way: int = 0
    at_once: int = 0
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    cost: float | None = None
    currency: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """A job's progress.

    Attributes:
        done, failed: rows completed, and those of them that failed.
        cut_off: those whose answers ended at their limit of tokens; some may have failed for that.
        total: total rows; None while unknown.
        tokens_per_s: generated over the last two minutes; 0 while unknown.
        remaining_low_s, remaining_high_s: seconds until the end, from the fastest and the slowest part of those two
            minutes, wider while few rows are complete, and at most as if every answer had its maximum length. None
            while unknown; before the first row is complete only the low one is known.
        under_way: rows that are being answered now; on this machine they share each sweep over the weights.
        places: where they are answered, if not on this machine alone.
    """

    done: int
    failed: int
    total: int | None
    tokens_per_s: float
    remaining_low_s: float | None
    remaining_high_s: float | None
    under_way: int = 0
    places: tuple[PlacePace, ...] = ()
    cut_off: int = 0


class PaceMeter:
    """Measures a job's pace; `now` is any monotonic clock in seconds.

    Args:
        done, failed: rows completed by earlier runs.
        most_tokens: of one answer; None if nothing limits it.
    """

    def __init__(self, done: int, failed: int, now: float, most_tokens: int | None = None) -> None:
        self._done, self._failed = done, failed
        self._most_tokens = most_tokens
        self._tokens = 0
        self._seen: deque[tuple[float, int, int]] = deque([(now, done, 0)])

    def ended(self, *, failed: bool, generated_tokens: int) -> None:
        self._done += 1
        self._failed += failed
        self._tokens += generated_tokens

    @property
    def tokens(self) -> int:
        """Tokens generated for rows completed in this run."""
        return self._tokens

    def pace(self, total: int | None, now: float, *, under_way: int = 0, under_way_tokens: int = 0) -> Pace:
        """The progress at `now`.

        Args:
            total: total rows, if known.
            under_way, under_way_tokens: active rows, and the tokens generated for them so far.
        """
        tokens = self._tokens + under_way_tokens
        if now - self._seen[-1][0] >= _WINDOW_S / _PARTS / 4 or len(self._seen) == 1:
            self._seen.append((now, self._done, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        begun, done_then, tokens_then = self._seen[0]
        elapsed = now - begun
        if elapsed < _LEAST_S:
            return Pace(self._done, self._failed, total, 0.0, None, None, under_way)
        generated = max(0, tokens - tokens_then)
        rate = generated / elapsed if generated >= _TELLING_TOKENS * under_way else 0.0
        low, high = self._remaining(total, now, done_then, elapsed)
        most = self._most_remaining(total, rate, under_way_tokens)
        if most is not None:
            low, high = None if low is None else min(low, most), most if high is None else min(high, most)
        return Pace(self._done, self._failed, total, rate, low, high, under_way)

    def _most_remaining(self, total: int | None, rate: float, under_way_tokens: int) -> float | None:
        """Seconds if every answer reaches its maximum length."""
        if total is None or self._most_tokens is None or rate <= 0:
            return None
        return max(0.0, (total - self._done) * self._most_tokens - under_way_tokens) / rate

    def _remaining(
        self, total: int | None, now: float, done_then: int, elapsed: float
    ) -> tuple[float | None, float | None]:
        if total is None or self._done == done_then:
            return None, None
        left = max(0, total - self._done)
        ended = self._done - done_then
        mean = elapsed / ended
        times = [mean]
        points = [*self._seen, (now, self._done, 0)]
        step = max(1, len(points) // _PARTS)
        for first, last in zip(points[:-step:step], points[step::step], strict=False):
            if last[1] > first[1]:
                times.append((last[0] - first[0]) / (last[1] - first[1]))
        # A part with hardly any completed rows reflects chance, not the machine.
        low, high = max(min(times), mean / 2), min(max(times), mean * 2)
        # Completions are roughly a Poisson process: the rate's relative error is 1 / sqrt(n).
        unsure = 1 + 2 / ended**0.5
        return left * min(low, mean / unsure), left * max(high, mean * unsure)


def _nobody(_prediction: JobPrediction) -> None:
    """For callers that ignore predictions."""


@dataclass(frozen=True, slots=True)
class JobWatcher:
    """Callbacks of a running job.

    Attributes:
        on_pace: called with the progress, and the reason if the job is blocked.
        on_answer: called with each answer and its last user message (empty if the row was never sent).
        should_yield: whether a chat is to have its turn; `give_way` then returns when all of them are done.
        cancelled: whether to stop.
        on_plan: called with the predicted speed before the first answer.
        patience_s: how long to wait while the disk is full; None: until there is room or the job is cancelled.
        share: called between two steps of computing if `should_yield`: returns once chats have had their turn, and
            goes on with them the next time.  None where nothing may be computed before they are done.
    """

    on_pace: Callable[[Pace, str], None]
    on_answer: Callable[[Answer, str], None]
    should_yield: Callable[[], bool]
    give_way: Callable[[], None]
    cancelled: Callable[[], bool]
    on_plan: Callable[[JobPrediction], None] = _nobody
    patience_s: float | None = None
    share: Callable[[], None] | None = None

    def take_turns(self) -> None:
        """Lets chats have their turn between two steps of computing."""
        (self.share or self.give_way)()


@dataclass(frozen=True, slots=True)
class JobEnding:
    """The outcome of a run of a job.

    Attributes:
        finished: all rows are complete; otherwise the job was cancelled and can be resumed.
        written: rows in the result file.
        tokens: generated in this run, without discarded attempts.
        computing_s: duration of this run, without waiting for chats, files or a full disk.
        note: a remark on how rows were run, or on the result's path if it differs from the requested one.
        output, errors: files of the result and of failed OpenAI requests; None if not written.
        unkept: answers lost because the disk was full until the job was cancelled; resuming generates them again.
    """

    finished: bool
    pace: Pace
    written: int
    tokens: int = 0
    computing_s: float = 0.0
    note: str = ""
    output: Path | None = None
    errors: Path | None = None
    unkept: int = 0


_LOOK_S = 0.02
_Result = TypeVar("_Result")

Between = Callable[[float], None]
"""Called by background work between two steps with its progress, 0 to 1. It returns when the work may continue, and
raises `StoppedError` if it must stop."""


class StoppedError(Exception):
    """The work was cancelled; it leaves nothing behind."""


def noop(_share: float) -> None:
    """A `Between` that never pauses or stops the work."""


def run_in_background(
    work: Callable[[Between], _Result],
    watcher: JobWatcher,
    on_share: Callable[[float], None],
    *,
    cancelled: Callable[[], bool] | None = None,
) -> _Result:
    """Runs `work` in the background and returns its result; it pauses while a chat has priority.

    Args:
        work: runs on another thread while the caller's waits here and yields to chats.
        on_share: called with the progress on the caller's thread, every few hundredths of a second.
        cancelled: whether to stop; defaults to the watcher's.

    Raises:
        StoppedError: it was cancelled.
        Exception: whatever `work` raises.
    """
    is_over, may_go_on, shall_stop = threading.Event(), threading.Event(), threading.Event()
    may_go_on.set()
    share = [0.0]
    results: list[_Result] = []
    errors: list[BaseException] = []

    def between(done: float) -> None:
        share[0] = done
        may_go_on.wait()
        if shall_stop.is_set():
            raise StoppedError

    def run() -> None:
        try:
            results.append(work(between))
        except BaseException as error:  # re-raised in the waiting thread
            errors.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=run, name="batch-files", daemon=True)
    thread.start()
    try:
        while not is_over.wait(_LOOK_S):
            if (cancelled or watcher.cancelled)():
                shall_stop.set()
            elif watcher.should_yield():
                may_go_on.clear()
                watcher.give_way()
                may_go_on.set()
            on_share(share[0])
    finally:
        shall_stop.set()
        may_go_on.set()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
