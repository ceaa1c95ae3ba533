"""`switchyard bench batch`: tokens per second of many rows together, against one at a time and against peers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bench.forced_text import random_text
from engine.bench.llama_cpp import LlamaCppPeer, PeerError
from engine.bench.llama_cpp.models import files_beside
from engine.bench.opened import opened
from engine.bench.peers import TransformersPeer
from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.runtime.batch.executor import BatchExecutor
from engine.runtime.batch.request import BatchAnswer, BatchRequest
from engine.runtime.decode.chat_session import ChatSession

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

_MEAN, _LONGEST = 77, 418
"""Prompt tokens of MTBench's questions, according to MoE-Lightning, table 3."""
_ALONE = 8
"""Rows timed one at a time."""
_NO_END: frozenset[int] = frozenset()
_Contestant = Callable[[Sequence[Sequence[int]], int], float]
"""(prompts, tokens to generate for each) -> tokens per second."""
_TRANSFORMERS = "transformers' batched generate"


@dataclass(frozen=True, slots=True)
class BatchBenchPlan:
    """What to run: `rows` prompts of MTBench's lengths, `tokens` generated for each; `peers`: also run the peers."""

    rows: int
    tokens: int
    repeats: int
    peers: bool


def prompt_lengths(rows: int, seed: int = 0) -> list[int]:
    """Lengths with MTBench's mean and maximum: many short questions, a few long ones."""
    draw = random.Random(seed)
    lengths = [min(_LONGEST, max(8, round(draw.lognormvariate(3.95, 0.85)))) for _ in range(rows)]
    scale = _MEAN * rows / sum(lengths)
    return [min(_LONGEST, max(4, round(length * scale))) for length in lengths]


def bench_batch(config: EngineConfig, plan: BatchBenchPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: generated tokens per second, including prompt time, against each contestant in the same run.

    Raises:
        EngineError: as `load_model`.
    """
    with opened(config) as loaded, ExitStack() as peers:
        vocabulary = int(loaded.model.config.get_text_config().vocab_size)
        lengths = prompt_lengths(plan.rows)
        prompts = [random_text(vocabulary, length, 0, seed=seed).prompt for seed, length in enumerate(lengths)]
        executor = BatchExecutor(loaded)
        peers.callback(executor.close)
        if executor.note:
            say(executor.note)
        contestants: dict[str, _Contestant] = {
            "ours": lambda prompts, tokens: batch_rate(executor, prompts, tokens),
            "one row after the other": lambda prompts, tokens: _one_by_one_rate(loaded, prompts[:_ALONE], tokens),
        }
        if plan.peers:
            _add_peers(config, loaded, prompts, plan, contestants, peers, report, say)
        else:
            report.skip_peer(f"{_TRANSFORMERS}, llama.cpp's parallel decoding", "asked for with --peers")
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(plan.repeats + 1):
            for name in list(rates):
                say(f"{f'repeat {repeat} of {plan.repeats}' if repeat else 'warm-up'}: {name}")
                try:
                    rate = contestants[name](prompts, plan.tokens) if repeat else contestants[name](prompts[:_ALONE], 4)
                except PeerError as failure:
                    report.skip_peer(name, str(failure))
                    del rates[name]
                    continue
                if repeat:
                    say(f"{name}: {rate:.1f} tokens/s")
                    rates[name].append(rate)
    ours = rates.pop("ours")
    name = f"{plan.rows} rows, {plan.tokens} tokens each"
    report.rows.append(row(name, ours, "tokens/s"))
    report.rows += [row(name, ours, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates.items()]


def batch_rate(executor: BatchExecutor, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Generated tokens per second of all rows together."""
    sampling, answers = SamplingParams(max_tokens=tokens), list[BatchAnswer]()
    requests = (
        BatchRequest(number, ids=tuple(prompt), sampling=sampling, end_ids=_NO_END)
        for number, prompt in enumerate(prompts)
    )
    executor.forget_prefixes()  # a second run must not reuse the first one's prompts
    started = time.perf_counter()
    executor.run(requests, answers.append)
    return sum(answer.generated_tokens for answer in answers) / (time.perf_counter() - started)


def _one_by_one_rate(loaded: LoadedModel, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    sampling, session, generated = SamplingParams(max_tokens=tokens), ChatSession(loaded), 0
    started = time.perf_counter()
    for prompt in prompts:
        generated += session.generate_from_ids(list(prompt), sampling, end_ids=_NO_END).generated_tokens
    return generated / (time.perf_counter() - started)


def _add_peers(
    config: EngineConfig,
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    plan: BatchBenchPlan,
    contestants: dict[str, _Contestant],
    opened_peers: ExitStack,
    report: Report,
    say: Callable[[str], None],
) -> None:
    path, dtype = Path(config.model), torch.float32 if config.precision == "fp32" else torch.bfloat16
    if loaded.info.precision in ("bf16", "fp32"):
        try:
            library = TransformersPeer(_TRANSFORMERS, path, dtype)
            contestants[_TRANSFORMERS] = library.batch_rate
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            report.skip_peer(_TRANSFORMERS, str(error).splitlines()[0])
    else:
        report.skip_peer(_TRANSFORMERS, f"it has no {loaded.info.precision} experts on the CPU")
    context = sum(len(prompt) + plan.tokens + 1 for prompt in prompts)
    for name, file in files_beside(path, loaded.info.precision, report, say).items():
        try:
            peer = LlamaCppPeer(name, file, torch.get_num_threads(), context, sequences=plan.rows)
        except PeerError as failure:
            report.skip_peer(name, str(failure))
            continue
        opened_peers.enter_context(peer)
        contestants[name] = peer.parallel_rate
