"""`switchyard bench batch`: tokens per second of many rows together, against one at a time and against peers.

With `--schedules`: schedules of a layer's work on a device, on the same rows, in turn.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bench.opened import opened, random_text
from engine.bench.peers.best_flags import Room, best_flags, name_with, open_peer
from engine.bench.peers.library import LIBRARY, TransformersPeer
from engine.bench.peers.peer import GgufPeer, PeerError, files_beside
from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device, Direction
from engine.planner.schedules import CGOPIPE, MULTI_BATCH, SCHEDULES
from engine.planner.simulator.sweeps import predicted_seconds
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchAnswer, BatchRequest

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

_MEAN, _LONGEST = 77, 418
"""Prompt tokens of MTBench's questions, according to MoE-Lightning, table 3."""
_ALONE = 8
"""Rows timed one at a time."""
_TRIED = 8
"""Tokens generated with each of a peer's flags, to find its best."""
_NO_END: frozenset[int] = frozenset()
_Contestant = Callable[[Sequence[Sequence[int]], int], float]
"""(prompts, tokens to generate for each) -> tokens per second."""
_TRANSFORMERS = "transformers' batched generate"


@dataclass(frozen=True, slots=True)
class BatchBenchPlan:
    """What to run: `rows` prompts of MTBench's lengths, `tokens` generated for each; `peers`: those to run as well."""

    rows: int
    tokens: int
    repeats: int
    peers: Sequence[str] = ()


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
            report.skip_peer(f"{_TRANSFORMERS}, parallel decoding of llama.cpp", "asked for with --peers")
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
    sampling, session, generated = SamplingParams(max_tokens=tokens), Alone(loaded), 0
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
    if LIBRARY in plan.peers and loaded.info.precision in ("bf16", "fp32"):
        try:
            library = TransformersPeer(_TRANSFORMERS, path, dtype)
            contestants[_TRANSFORMERS] = library.batch_rate
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            report.skip_peer(_TRANSFORMERS, str(error).splitlines()[0])
    elif LIBRARY in plan.peers:
        report.skip_peer(_TRANSFORMERS, f"it has no {loaded.info.precision} experts on the CPU")
    room = Room(sum(len(prompt) + plan.tokens + 1 for prompt in prompts), plan.rows)
    tried = prompts[: 2 * _ALONE]

    def task(peer: GgufPeer) -> float:
        return peer.parallel_rate(tried, _TRIED)

    for each in files_beside(path, loaded.info.precision, report, say, plan.peers):
        say(f"finding the best flags: {each.name}")
        try:
            peer = opened_peers.enter_context(open_peer(each, torch.get_num_threads(), room))
            contestants[name_with(each, best_flags(each, peer, task, room, say))] = peer.parallel_rate
        except PeerError as failure:
            report.skip_peer(each.name, str(failure))


_WARM_UP_TOKENS = 2
_SIMPLE = "simple pipeline"
"""The baseline of Klotski's table 3: each micro-batch passes the whole model separately."""


@dataclass(frozen=True, slots=True)
class SchedulesPlan:
    """What to run: `rows` prompts of MTBench's lengths, `tokens` generated for each, `micro_batch` rows at once."""

    rows: int
    tokens: int
    repeats: int
    micro_batch: int


def bench_schedules(config: EngineConfig, plan: SchedulesPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: generated tokens per second of each schedule, measured and simulated; CGOPipe against each other one;
    and utilisation of the link.

    The simulation only uses the parts of a sweep, timed separately; it models their overlap. Nothing is cached on the
    device, so that all schedules move the same weights.

    Raises:
        EngineError: as `load_model`; `INVALID_REQUEST` if no experts are fetched to a device.
    """
    config = replace(config, cache_slots=0)
    if config.threads is None and config.device.startswith("emulated:"):
        config = replace(config, threads=1)  # the emulated card needs the other core
    with opened(config) as loaded:
        device = _device(loaded)
        vocabulary = int(loaded.model.config.get_text_config().vocab_size)
        lengths = prompt_lengths(plan.rows)
        prompts = [random_text(vocabulary, length, 0, seed=seed).prompt for seed, length in enumerate(lengths)]
        predicted = _predicted(loaded, plan, prompts)
        say(", ".join(f"{name} predicted {rate:.1f} tokens/s" for name, rate in predicted.items()))
        rates: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        for repeat in range(plan.repeats + 1):
            for name, policy in _policies(loaded, plan).items():
                tokens = plan.tokens if repeat else _WARM_UP_TOKENS
                rate, share = _run(loaded, device, policy, prompts, tokens)
                say(
                    f"{f'repeat {repeat}' if repeat else 'warm-up'}: {name}: {rate:.1f} tokens/s, link {share:.0%} busy"
                )
                if repeat:
                    rates.setdefault(name, []).append(rate)
                    busy.setdefault(name, []).append(share * 100)
    title = f"{plan.rows} rows, {plan.tokens} tokens each"
    report.rows += [
        row(f"{title}, {name}", values, "tokens/s", predicted=predicted.get(name)) for name, values in rates.items()
    ]
    ours = rates.pop(CGOPIPE.name)
    title = f"{title}, CGOPipe"
    report.rows += [row(title, ours, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates.items()]
    report.rows += [
        row(f"link busy, {name}", [statistics.median(shares)], "%", limit=100.0) for name, shares in busy.items()
    ]


def _predicted(loaded: LoadedModel, plan: SchedulesPlan, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens per second by each schedule that is simulated, from sweeps whose parts are timed separately."""
    policies = _policies(loaded, plan)
    executor = BatchExecutor(loaded, policies[CGOPIPE.name])
    try:
        timer = executor.time_parts()
        if timer is None:
            return {}
        batch_rate(executor, prompts, _WARM_UP_TOKENS)
        timer.sweeps.clear()
        timer.inside_s = 0.0
        begun_s = time.perf_counter()
        batch_rate(executor, prompts, plan.tokens)
        outside_s = max(0.0, time.perf_counter() - begun_s - timer.inside_s) / len(timer.sweeps)
    finally:
        executor.close()
    sweeps = [replace(parts, outside_s=outside_s) for parts in timer.sweeps]
    found = {name: predicted_seconds(schedule, sweeps) for name, schedule in SCHEDULES.items()}
    rounds = sweeps[0].times.count
    alone = [
        replace(parts, times=replace(parts.times, count=1), outside_s=parts.outside_s / rounds) for parts in sweeps
    ] * rounds
    found[_SIMPLE] = predicted_seconds(MULTI_BATCH, alone)
    return {name: plan.rows * plan.tokens / seconds for name, seconds in found.items() if seconds}


def busy_share(copies: Sequence[CopyRecord], since_s: float, until_s: float) -> float:
    """The fraction of an interval in which at least one of these copies was running."""
    total, reached = 0.0, since_s
    for copy in sorted(copies, key=lambda copy: copy.started_s):
        begin, end = max(copy.started_s, reached), min(copy.ended_s, until_s)
        if end > begin:
            total += end - begin
            reached = end
    return total / (until_s - since_s)


def _policies(loaded: LoadedModel, plan: SchedulesPlan) -> dict[str, BatchPolicy]:
    base = replace(policy_for(loaded), rows=plan.rows, micro_batch_rows=plan.micro_batch)
    policies = {name: replace(base, schedule=schedule) for name, schedule in SCHEDULES.items()}
    policies[_SIMPLE] = replace(base, rows=plan.micro_batch, schedule=MULTI_BATCH)
    return policies


def _run(
    loaded: LoadedModel, device: Device, policy: BatchPolicy, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float]:
    """(tokens per second, busy fraction of the link from the first copy to the last)."""
    copies: list[CopyRecord] = []
    executor = BatchExecutor(loaded, policy)
    stop = device.copy_log.listen(copies.append)
    try:
        rate = batch_rate(executor, prompts, tokens)
    finally:
        stop()
        executor.close()
    there = [copy for copy in copies if copy.direction == Direction.H2D]
    if not there:
        return rate, 0.0
    return rate, busy_share(there, min(c.started_s for c in there), max(c.ended_s for c in there))


def _device(loaded: LoadedModel) -> Device:
    if loaded.devices is None or len(loaded.devices.devices) != 1 or not loaded.devices.experts.activations:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{loaded.info.name} on {loaded.info.device} brings no experts to a device: choose --device cuda:0 or "
            "emulated:slow-link, and a model with experts.",
        )
    return loaded.devices.devices[0]
