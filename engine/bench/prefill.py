"""`switchyard bench prefill`: tokens per second of a long prompt, and its effect on the decode cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.bench.opened import (
    ForcedText,
    caches_of,
    decode_seconds,
    opened,
    prefill_seconds,
    random_text,
    vocabulary_of,
)
from engine.bench.report import Report, in_turn

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to run.

    Attributes:
        prompt_tokens: of the long prompt.
        decode_tokens: decoded before and after it, to see what the cache hits.
        words: for the name of the figure, what the model lacks of the one whose shape it has.
    """

    prompt_tokens: int
    decode_tokens: int
    repeats: int
    words: str = ""


Beside = Callable[[str, Sequence[int]], dict[str, Callable[[int], float]]]
"""(our precision, prompt) -> tokens per second of it, by the contestant's name: what is run in turn with us."""


def bench_prefill(
    config: EngineConfig,
    plan: PrefillPlan,
    report: Report,
    say: Callable[[str], None],
    beside: Beside | None = None,
    opening: Callable[[EngineConfig], AbstractContextManager[LoadedModel]] = opened,
) -> dict[str, list[float]]:
    """Adds rows: our rate, against each contestant in the same run, and the decode hit rate before and after.

    Each repeat opens one contestant after the other, so that no two share the memory.

    Returns:
        The rates of all contestants.
    """
    hits: tuple[list[float], list[float]] = [], []

    def ours() -> tuple[float, str, tuple[int, ...]]:
        with opening(config) as loaded:
            prompt = random_text(vocabulary_of(loaded), plan.prompt_tokens, 0, seed=1).prompt
            return _our_rate(loaded, plan, hits), loaded.info.precision, prompt

    first, precision, prompt = ours()
    contestants: dict[str, Callable[[int], float]] = {"ours": lambda repeat: first if repeat == 1 else ours()[0]}
    contestants |= beside(precision, prompt) if beside is not None else {}
    rates = in_turn(contestants, plan.repeats, report, say, warm_ups=0)
    name = f"prefill of {plan.prompt_tokens:,} tokens on {config.device}"
    name += f", {plan.words}" if plan.words else ""
    report.add_against(name, rates["ours"], "tokens/s", {who: rates[who] for who in rates if who != "ours"})
    if hits[0]:
        report.add("hits of decode after it", hits[1], "%", peer="before it", peer_values=hits[0])
    return rates


def _our_rate(loaded: LoadedModel, plan: PrefillPlan, hits: tuple[list[float], list[float]]) -> float:
    if not caches_of(loaded):
        return read_rate(loaded, plan.prompt_tokens)
    text = random_text(vocabulary_of(loaded), 16, plan.decode_tokens)
    _hit_rate(loaded, text)  # fills the cache
    before = _hit_rate(loaded, text)
    rate = read_rate(loaded, plan.prompt_tokens)
    after = _hit_rate(loaded, text)
    if before is not None and after is not None:
        hits[0].append(100 * before)
        hits[1].append(100 * after)
    return rate


def read_rate(loaded: LoadedModel, tokens: int) -> float:
    """Tokens per second of reading a prompt of so many."""
    prompt, another = (random_text(vocabulary_of(loaded), tokens, 0, seed=seed).prompt for seed in (1, 2))
    prefill_seconds(loaded, another)  # first-time costs: touching memory, preparing products
    return len(prompt) / prefill_seconds(loaded, prompt)


def _hit_rate(loaded: LoadedModel, text: ForcedText) -> float | None:
    counters = [cache.counters for cache in caches_of(loaded)]
    lookups, hits = sum(each.lookups for each in counters), sum(each.hits for each in counters)
    decode_seconds(loaded, text)
    looked_up = sum(each.lookups for each in counters) - lookups
    return (sum(each.hits for each in counters) - hits) / looked_up if looked_up else None
