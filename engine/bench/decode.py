"""`switchyard bench decode`: tokens per second at batch 1, against peers in the same run, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.bench.opened import opened
from engine.bench.report import Report, in_turn
from engine.common import clock
from engine.common.config import EngineConfig, SamplingParams
from engine.measure.arithmetic import MemoryReader, cold_memory, spread_of
from engine.runtime.decode.prompt import check_length
from engine.runtime.engine import TIMED_PROMPT
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
Beside = Callable[["EngineConfig", "LoadedModel", DecodePlan, ExitStack], _Peers]
"""Opens the peers of a model, which the stack closes."""


Found = dict[str, list[list[float]]]
"""By a contestant's name: in each repeat its tokens per second with each of the models that it runs."""


def bench_decode(
    config: EngineConfig,
    plan: DecodePlan,
    report: Report,
    say: Callable[[str], None],
    beside: Beside | None = None,
    also: Sequence[EngineConfig] = (),
) -> dict[str, Found]:
    """Adds rows to `report`: our decode rate at each context, against each peer and against the memory-bandwidth limit,
    and what of a token is layers and what is the head.

    Args:
        also: models that each contestant runs right after the first one.

    Returns:
        What was measured, by the name of the figure.

    Raises:
        EngineError: as `load_model`; also `PROMPT_TOO_LONG`.
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
    """The rows of one length of context."""
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
    weight = next(loaded.model.get_decoder().norm.parameters(), None) if hasattr(loaded.model, "get_decoder") else None
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
    output, table = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    unread = 0
    if table is not None and output is not None and table.weight is not output.weight:
        unread = table.weight.numel() * table.weight.element_size()
    return info.weights_bytes - unread + info.experts_bytes * used
