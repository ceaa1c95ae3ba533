"""`switchyard bench chats`: several chats at once against one after the other, and a chat beside a batch.

Everything goes through the scheduler, as in the window; only the engine process and the window are left out.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from time import perf_counter, sleep
from typing import Any

from engine.bench.opened import opened, random_text, vocabulary_of
from engine.bench.report import Report, in_turn
from engine.common.config import EngineConfig, SamplingParams
from engine.runtime.batch.policy import policy_for
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.background import JobRows
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.scheduler import Scheduler

_PROMPT_TOKENS = 64
_ROWS, _ROW_TOKENS = 32, 512
"""Of the batch: so many are in progress at a time, and none ends meanwhile: reading new prompts is no writing."""
_WARM_TOKENS = 2
"""A batch is timed once so many tokens have come for each of its rows."""
_FEWEST_SWEEPS, _LEAST_S = 4, 2.0
"""It is timed alone for so long."""
_BESIDE_SWEEPS = 60
"""A chat beside it lasts for as long as so many sweeps would take if neither had the other."""
_NO_END: frozenset[int] = frozenset()
_SINGLY = "one after the other"


@dataclass(frozen=True, slots=True)
class ChatsPlan:
    """What to run: so many chats of `tokens` tokens each."""

    chats: int
    tokens: int
    repeats: int


@dataclass(slots=True)
class _Together:
    """What came of several chats.

    Attributes:
        rate: tokens per second of all together, the reading of their prompts included.
        spread: the slowest chat's seconds over the fastest one's.
    """

    rate: float
    spread: float


@dataclass(slots=True)
class _Beside:
    """A chat and a batch beside each other, each against itself alone.

    Attributes:
        sweeps: of the batch, from when the chat was asked to its first token.
        chat, batch: shares of their speeds alone.
    """

    sweeps: float
    chat: float
    batch: float


def bench_chats(config: EngineConfig, plan: ChatsPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: chats at once against one after the other, and a chat beside a batch against both alone."""
    with opened(config) as loaded:
        vocabulary = vocabulary_of(loaded)

        def asked(repeat: int) -> tuple[list[tuple[int, ...]], int]:
            seeds = range(1000 * repeat, 1000 * repeat + plan.chats)
            prompts = [random_text(vocabulary, _PROMPT_TOKENS, 0, seed=seed).prompt for seed in seeds]
            return prompts, plan.tokens if repeat else 4

        turns: dict[str, Callable[[int], Any]] = {
            "at once": lambda repeat: _chats(loaded, *asked(repeat), at_once=True),
            _SINGLY: lambda repeat: _chats(loaded, *asked(repeat), at_once=False),
            "beside a batch": lambda repeat: _beside(loaded, asked(repeat)[0][0], asked(repeat)[1]),
        }
        found = in_turn(turns, plan.repeats, report, say)
    at_once, singly, beside = found.values()
    name = f"{plan.chats} chats, {plan.tokens} tokens each"
    rates, one = ([each.rate for each in runs] for runs in (at_once, singly))
    report.add(name, rates, "tokens/s", peer=_SINGLY, peer_values=one)
    spreads = [each.spread for each in at_once]
    report.add("the slowest of them over the fastest", spreads, "x", higher_is_better=False)
    first = [each.sweeps for each in beside]
    report.add("a chat beside a batch: to its first token", first, "sweeps of the batch")
    for who, shares in (("its", [each.chat for each in beside]), ("the batch's", [each.batch for each in beside])):
        report.add(f"{who} speed over its speed alone", shares, "x")
        say(f"{who} speed over its speed alone, each run: {', '.join(f'{share:.2f}' for share in sorted(shares))}")


def _request(prompt: Sequence[int], tokens: int, number: int = 0) -> BatchRequest:
    return BatchRequest(number, ids=tuple(prompt), sampling=SamplingParams(max_tokens=tokens), end_ids=_NO_END)


def _chats(loaded: LoadedModel, prompts: Sequence[Sequence[int]], tokens: int, *, at_once: bool) -> _Together:
    scheduler, took, generated = Scheduler(loaded), list[float](), 0
    begun = perf_counter()

    def ask(prompt: Sequence[int]) -> None:
        asked = perf_counter()

        def ended(outcome: Outcome) -> None:
            nonlocal generated
            if isinstance(outcome, BaseException):
                raise outcome
            generated += outcome.generated_tokens
            took.append(perf_counter() - asked)

        scheduler.submit(_request(prompt, tokens), ended)

    for prompt in prompts:
        ask(prompt)
        if not at_once:
            scheduler.serve()
    scheduler.serve()
    seconds = perf_counter() - begun
    scheduler.close()
    return _Together(generated / seconds, max(took) / min(took))


class _Batch:
    """A job in the background that goes on until it is stopped."""

    def __init__(self, scheduler: Scheduler, vocabulary: int, seed: int) -> None:
        self._scheduler, self._answered, self._seen = scheduler, 0, 0
        self._is_over = threading.Event()
        self._place: JobRows | None = None
        self.sweeps = list[float]()
        """When the tokens of each sweep came."""
        rows = (
            _request(random_text(vocabulary, _PROMPT_TOKENS, 0, seed=seed + each).prompt, _ROW_TOKENS, each)
            for each in count()
        )
        self._thread = threading.Thread(target=self._run, args=(rows,), name="bench-job")
        self._thread.start()
        while not scheduler.background.is_busy:
            sleep(0.001)

    @property
    def tokens(self) -> int:
        return self._answered + (self._place.under_way[1] if self._place is not None else 0)

    def serve(self, until: Callable[[], bool]) -> float:
        """Has the scheduler go on until `until()`; the job's tokens per second meanwhile."""
        begun, before = perf_counter(), self.tokens

        def look() -> bool:
            if self.tokens != self._seen:
                self._seen = self.tokens
                self.sweeps.append(perf_counter())
            return until()

        while not until():
            self._scheduler.serve(look)
        return (self.tokens - before) / (perf_counter() - begun)

    def stop(self) -> None:
        self._is_over.set()
        while self._thread.is_alive():
            self._scheduler.serve()
            self._thread.join(0.001)

    def _run(self, rows: Iterator[BatchRequest]) -> None:
        background = self._scheduler.background
        policy = replace(policy_for(background.loaded), rows=_ROWS)
        place = self._place = background.call(lambda: background.join(policy))
        place.run(rows, self._take, lambda: False, self._is_over.is_set)
        place.close()

    def _take(self, answer: GenerationResult) -> None:
        self._answered += answer.generated_tokens


def _beside(loaded: LoadedModel, prompt: Sequence[int], tokens: int) -> _Beside:
    scheduler, ends = Scheduler(loaded), list[Outcome]()
    scheduler.submit(_request(prompt, tokens), ends.append)
    scheduler.serve()
    vocabulary = vocabulary_of(loaded)
    batch = _Batch(scheduler, vocabulary, seed=int(prompt[0]))
    try:
        batch.serve(lambda: batch.tokens >= _WARM_TOKENS * _ROWS)
        sweeps, begun = len(batch.sweeps), perf_counter()
        batch_alone = batch.serve(
            lambda: len(batch.sweeps) >= sweeps + _FEWEST_SWEEPS and perf_counter() - begun >= _LEAST_S
        )
        times = batch.sweeps[sweeps:]
        sweep_s = statistics.median(late - early for early, late in pairwise(times))
        again = random_text(vocabulary, len(prompt), 0, seed=int(prompt[1])).prompt
        first = ends[0]
        assert isinstance(first, GenerationResult)
        # Long enough for sweeps of the batch to be counted, which has half of the time.
        lasting = min(round(_BESIDE_SWEEPS * sweep_s * first.tokens_per_s), loaded.context_tokens - len(prompt))
        scheduler.submit(_request(again, max(tokens, lasting)), ends.append)
        batch_beside = batch.serve(lambda: len(ends) == 2)
    finally:
        batch.stop()
        scheduler.close()
    by_itself, shared = ends
    assert isinstance(by_itself, GenerationResult)
    assert isinstance(shared, GenerationResult)
    return _Beside(
        shared.ttft_s / sweep_s, shared.tokens_per_s / by_itself.tokens_per_s, batch_beside / max(batch_alone, 1e-9)
    )
