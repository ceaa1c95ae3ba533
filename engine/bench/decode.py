"""`switchyard bench decode`, `prefill` and `batch`: tokens per second, against peers in the same run, in turn."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

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
from engine.common import clock
from engine.common.config import EngineConfig, SamplingParams
from engine.families import fast_path_of
from engine.measure.arithmetic import MemoryReader, cold_memory, spread_of
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.prompt import check_length
from engine.runtime.engine import TIMED_PROMPT
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel


_HEAD_RUNS = 21
_OURS, _MEMORY = "ours", "memory"
"""Reads RAM in turn with the contestants: how fast that is changes with what else a machine does."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What to run.

    Attributes:
        tokens: decoded per repeat, after one warm-up; each repeat goes on where the one before ended.
        contexts: tokens of the prompt before them, which is not timed, a row for each; `None`: a sentence.
        words: for the names of figures, what the model lacks of the one whose shape it has.
    """

    tokens: int
    repeats: int
    contexts: Sequence[int | None] = (None,)
    words: str = ""


_Peers = Callable[[list[int], str], dict[str, Callable[[], float]]]
"""(prompt, name of the figure) -> tokens per second after it, by the peer's name."""
DecodeBeside = Callable[["EngineConfig", "LoadedModel", DecodePlan, ExitStack], _Peers]
"""Opens the peers of a model, which the stack closes."""


Found = dict[str, list[list[float]]]
"""By a contestant's name: in each repeat its tokens per second with each of the models that it runs."""


def bench_decode(
    config: EngineConfig,
    plan: DecodePlan,
    report: Report,
    say: Callable[[str], None],
    beside: DecodeBeside | None = None,
    also: Sequence[EngineConfig] = (),
) -> dict[str, Found]:
    """Adds rows to `report`: our decode rate at each context, against each peer and against the memory-bandwidth limit,
    and what of a token is layers and what is the head.

    Args:
        also: models that each contestant runs right after the first one.

    Returns:
        What was measured, by the name of the figure.
    """
    with ExitStack() as held:
        models: list[tuple[LoadedModel, _Peers]] = []
        for each in (config, *also):
            say("loading the model")
            loaded = held.enter_context(opened(each))
            check_length(max(context or 0 for context in plan.contexts) + plan.tokens, loaded.context_tokens)
            models.append((loaded, beside(each, loaded, plan, held) if beside is not None else _none))
        return dict(_at(context, models, plan, report, say) for context in plan.contexts)


def _none(_prompt: list[int], _name: str) -> dict[str, Callable[[], float]]:
    return {}


def _decode(loaded: LoadedModel, prompt: Sequence[int], tokens: int, held: ExitStack) -> Callable[[], float]:
    """Our tokens per second of so many steps after a prompt, as a chat makes them, past any end token.

    Each call goes on where the one before ended.
    """
    scheduler, ids, sampling = Scheduler(loaded), list(prompt), SamplingParams(max_tokens=tokens + 1)
    held.callback(scheduler.close)

    def rate() -> float:
        done = scheduler.answer(BatchRequest(0, ids=tuple(ids), sampling=sampling, end_ids=frozenset()))
        if not loaded.model.config.is_encoder_decoder:
            ids.extend(done.token_ids)
        return done.tokens_per_s

    return rate


def _at(
    context: int | None,
    models: Sequence[tuple[LoadedModel, _Peers]],
    plan: DecodePlan,
    report: Report,
    say: Callable[[str], None],
) -> tuple[str, Found]:
    loaded = models[0][0]
    prompt: list[int] = loaded.tokenizer(TIMED_PROMPT)["input_ids"]
    name = "decode"
    if context is not None:
        prompt = (prompt * -(-context // len(prompt)))[:context]
        name = f"decode after {context:,} tokens"
    with ExitStack() as held:
        by_model = [
            {_OURS: _decode(model, prompt, plan.tokens, held), **peers(prompt, name)} for model, peers in models
        ]
        reader = held.enter_context(MemoryReader())
        if loaded.info.device == "cpu":
            memory = cold_memory()
            by_model[0][_MEMORY] = lambda: memory.nbytes / reader.seconds(memory)

        def run(who: str, _repeat: int) -> list[float]:
            return [runs[who]() for runs in by_model if who in runs]

        found = in_turn({who: partial(run, who) for who in by_model[0]}, plan.repeats, report, say, what=name)
    rates = {who: [each[0] for each in values] for who, values in found.items()}
    ours, reads = rates.pop(_OURS), rates.pop(_MEMORY, None)
    read = bytes_per_token(loaded) + loaded.info.kv_bytes_per_token * (len(prompt) + plan.tokens / 2)
    limit = statistics.median(reads) / read if reads else None
    if reads:
        report.machine["read_bandwidth_gb_per_s"] = statistics.median(reads) / 1e9
        report.machine["read_bandwidth_spread"] = spread_of(reads)
    label = f"{name}, {plan.words}" if plan.words else name
    report.add(label, ours, "tokens/s", limit=limit)
    for peer, theirs in rates.items():
        report.add(label, ours, "tokens/s", peer=peer, peer_values=theirs)
    if not plan.words and loaded.device.type == "cpu":
        _head_row(name, loaded, ours, report)
    return name, found


def _head_row(name: str, loaded: LoadedModel, rates: list[float], report: Report) -> None:
    """What of our time is the head, which is run alone, and what is left for the layers."""
    head = loaded.model.get_output_embeddings()
    if head is None:
        return
    decoder, path = getattr(loaded.model, "get_decoder", lambda: None)(), fast_path_of(loaded.model, "model")
    norm = getattr(decoder, path.last_norm if path is not None else "norm", None)
    weight = next(norm.parameters(), None) if norm is not None else None
    if weight is None:
        return
    hidden = torch.full((1, 1, weight.numel()), 0.01, dtype=weight.dtype)
    seconds = []
    with torch.inference_mode():
        for _ in range(_HEAD_RUNS):
            begun = clock.now_ns()
            head(hidden)
            seconds.append((clock.now_ns() - begun) / 1e9)
    alone = statistics.median(seconds)
    report.add(f"{name}: head", [1000 * alone], "ms")
    report.add(f"{name}: layers and the rest", [1000 * max(0.0, 1 / rate - alone) for rate in rates], "ms")


def bytes_per_token(loaded: LoadedModel) -> float:
    """Bytes of weights that one token has to read: all except unused experts and the embedding table."""
    info = loaded.info
    used = info.experts_per_token / info.experts if info.experts else 0.0
    shared = {tensor.data_ptr() for tensor in _held_by(loaded.model.get_output_embeddings())}
    table = _held_by(loaded.model.get_input_embeddings()) if shared else ()
    unread = sum(tensor.nbytes for tensor in table if tensor.data_ptr() not in shared)
    return info.weights_bytes - unread + info.experts_bytes * used


def _held_by(module: torch.nn.Module | None) -> list[torch.Tensor]:
    """Its numbers, or the blocks that it reads instead."""
    return [] if module is None else [each for each in (*module.parameters(), *module.buffers()) if each.numel()]


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


PrefillBeside = Callable[[str, Sequence[int]], dict[str, Callable[[int], float]]]
"""(our precision, prompt) -> tokens per second of it, by the contestant's name: what is run in turn with us."""


def bench_prefill(
    config: EngineConfig,
    plan: PrefillPlan,
    report: Report,
    say: Callable[[str], None],
    beside: PrefillBeside | None = None,
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
    report.add_against(name, rates["ours"], {who: rates[who] for who in rates if who != "ours"})
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


_MEAN, _LONGEST = 77, 418
"""Prompt tokens of MTBench's questions, according to MoE-Lightning, table 3."""
_ALONE = 8
"""Rows timed one at a time."""
_WARM_UP_TOKENS = 4
_NO_END: frozenset[int] = frozenset()
_Prompts = Sequence[Sequence[int]]
_Contestant = Callable[[_Prompts, int], float]
"""(prompts, tokens to generate for each) -> tokens per second."""
BatchBeside = Callable[["LoadedModel", _Prompts, ExitStack], dict[str, _Contestant]]
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
    beside: BatchBeside | None = None,
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
    report.add_against(f"{plan.rows} rows, {plan.tokens} tokens each", ours, rates)


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
