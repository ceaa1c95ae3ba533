"""`switchyard bench loops`: how many answers to a newcomer's questions end in a loop, with DRY and without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from engine.bench.report import Report, ReportRow
from engine.checkpoint.profile import suggested_sampling
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import never_cancelled
from engine.runtime.decode.generation import GenerationResult, ignore_progress
from engine.runtime.load.model import load_model
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea",
    "Explain how a rainbow forms",
    "Hello, who are you?",
    "Tell me a joke",
    "What can you do?",
    "Why is the sky blue?",
    "Write a short story about a cat",
    "How do I boil an egg?",
    "What is machine learning?",
    "Give me five tips for sleeping better",
    "Write an email asking my boss for a day off",
    "What is the difference between a virus and a bacterium?",
    "Name three famous painters",
    "How does a car engine work?",
    "Write a poem about autumn",
    "What should I cook for dinner tonight?",
    "Who was Albert Einstein?",
    "List the planets of the solar system",
    'Translate "good morning" into French',
)
_TOKENS, _MOST = 4, 4
"""An answer loops if any so many tokens in a row occur more often than this."""


@dataclass(frozen=True, slots=True)
class LoopsPlan:
    """How many seeds every question is asked with, and the longest answer in tokens."""

    seeds: int
    tokens: int


def most_repeated(ids: Sequence[int]) -> int:
    """How often the most frequent four tokens in a row occur; 0 if there are no four."""
    runs = zip(*(ids[start:] for start in range(_TOKENS)), strict=False)
    return max(Counter(runs).values(), default=0)


def bench_loops(config: EngineConfig, plan: LoopsPlan, report: Report, note: Callable[[str], None]) -> None:
    """Counts the loops in answers with the model's own sampling, and with the same but no DRY."""
    suggested = suggested_sampling(Path(config.model))
    if not suggested.uses_dry:
        note("The model suggests no DRY: its usual strength of 0.8 is taken.")
        suggested = replace(suggested, dry_multiplier=0.8)
    loaded = load_model(config, on_progress=ignore_progress, cancelled=never_cancelled)
    try:
        for name, sampling in (("with DRY", suggested), ("without DRY", replace(suggested, dry_multiplier=0.0))):
            note(f"Asking {len(QUESTIONS)} questions with {plan.seeds} seeds, {name}")
            answers = _answers(loaded, replace(sampling, max_tokens=plan.tokens), plan.seeds)
            counts = [most_repeated(answer.token_ids) for answer in answers]
            report.rows += [
                ReportRow(f"answers that loop, {name}", sum(count > _MOST for count in counts), "answers", len(counts)),
                ReportRow(f"worst repetition, {name}", max(counts), "times", len(counts)),
                ReportRow(
                    f"answers that did not end, {name}",
                    sum(answer.finish_reason == "length" for answer in answers),
                    "answers",
                    len(counts),
                ),
            ]
    finally:
        loaded.close()


def _answers(loaded: LoadedModel, sampling: SamplingParams, seeds: int) -> list[GenerationResult]:
    asked = [
        BatchRequest(row, (ChatMessage("user", question),), sampling=replace(sampling, seed=seed))
        for row, (seed, question) in enumerate(product(range(seeds), QUESTIONS))
    ]
    answers: list[GenerationResult] = []
    BatchExecutor(loaded).run(iter(asked), answers.append)
    return answers
