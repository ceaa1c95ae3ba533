"""`switchyard bench batch`: tokens per second of many rows together, against one at a time and against peers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from engine.bench.opened import opened, random_text, vocabulary_of
from engine.bench.report import Report, in_turn
from engine.common import clock
from engine.common.config import EngineConfig, SamplingParams
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

_MEAN, _LONGEST = 77, 418
"""Prompt tokens of MTBench's questions, according to MoE-Lightning, table 3."""
_ALONE = 8
"""Rows timed one at a time."""
_WARM_UP_TOKENS = 4
_NO_END: frozenset[int] = frozenset()
_Prompts = Sequence[Sequence[int]]
_Contestant = Callable[[_Prompts, int], float]
"""(prompts, tokens to generate for each) -> tokens per second."""
Beside = Callable[["LoadedModel", _Prompts, ExitStack], dict[str, _Contestant]]
"""Opens what runs in turn with us, which the stack closes."""


@dataclass(frozen=True, slots=True)
class BatchBenchPlan:
    """What to run: `rows` prompts of MTBench's lengths, `tokens` generated for each."""

    rows: int
    tokens: int
    repeats: int


def prompt_lengths(rows: int) -> list[int]:
    """Lengths with MTBench's mean and maximum: many short questions, a few long ones."""
    draw = random.Random(0)
    lengths = [min(_LONGEST, max(8, round(draw.lognormvariate(3.95, 0.85)))) for _ in range(rows)]
    scale = _MEAN * rows / sum(lengths)
    return [min(_LONGEST, max(4, round(length * scale))) for length in lengths]


def prompts_of(loaded: LoadedModel, rows: int) -> list[tuple[int, ...]]:
    """Random prompts with the lengths of `prompt_lengths`."""
    vocabulary = vocabulary_of(loaded)
    return [random_text(vocabulary, length, 0, seed=seed).prompt for seed, length in enumerate(prompt_lengths(rows))]


def bench_batch(
    config: EngineConfig,
    plan: BatchBenchPlan,
    report: Report,
    say: Callable[[str], None],
    beside: Beside | None = None,
) -> None:
    """Adds rows: generated tokens per second, including prompt time, against each contestant in the same run."""
    with opened(config) as loaded, ExitStack() as held:
        prompts = prompts_of(loaded, plan.rows)
        executor = BatchExecutor(loaded)
        held.callback(executor.close)
        if executor.note:
            say(executor.note)
        contestants: dict[str, _Contestant] = {
            "ours": partial(batch_rate, executor),
            "one row after the other": lambda prompts, tokens: _one_by_one_rate(loaded, prompts[:_ALONE], tokens),
        }
        contestants |= beside(loaded, prompts, held) if beside is not None else {}

        def run(contestant: _Contestant, repeat: int) -> float:
            return contestant(prompts, plan.tokens) if repeat else contestant(prompts[:_ALONE], _WARM_UP_TOKENS)

        turns = {name: partial(run, contestant) for name, contestant in contestants.items()}
        rates = in_turn(turns, plan.repeats, report, say)
    ours = rates.pop("ours")
    report.add_against(f"{plan.rows} rows, {plan.tokens} tokens each", ours, "tokens/s", rates)


def batch_rate(executor: BatchExecutor, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Generated tokens per second of all rows together."""
    sampling, answers = SamplingParams(max_tokens=tokens), list[GenerationResult]()
    requests = (
        BatchRequest(number, ids=tuple(prompt), sampling=sampling, end_ids=_NO_END)
        for number, prompt in enumerate(prompts)
    )
    executor.forget_prefixes()  # a second run must not reuse the first one's prompts
    started = clock.now()
    executor.run(requests, answers.append)
    return sum(answer.generated_tokens for answer in answers) / (clock.now() - started)


def _one_by_one_rate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    sampling, scheduler, generated = SamplingParams(max_tokens=tokens), Scheduler(loaded), 0
    started = clock.now()
    for prompt in prompts:
        request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=_NO_END)
        generated += scheduler.answer(request).generated_tokens
    rate = generated / (clock.now() - started)
    scheduler.close()
    return rate
