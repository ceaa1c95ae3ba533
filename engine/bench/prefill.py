"""`switchyard bench prefill`: tokens per second of a long prompt, and its effect on the decode cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.bench.opened import (
    ForcedText,
    caches_of,
    decode_seconds,
    opened,
    opened_with_cache,
    prefill_seconds,
    random_text,
    with_quarter_resident,
    without_cache,
)
from engine.bench.peers.best_flags import Room, best_flags, name_with, open_peer
from engine.bench.peers.library import LIBRARY, OFFLOAD, TransformersPeer, accelerate_offload
from engine.bench.peers.peer import Beside, PeerError, files_beside
from engine.bench.report import Report, row
from engine.bench.synthetic import Cut

if TYPE_CHECKING:
    from engine.bench.peers.editions import Flags
    from engine.common.config import EngineConfig, Misses
    from engine.runtime.loaded_model import LoadedModel

_SINGLES: dict[Misses, str] = {"fetch": "on-demand fetch", "cpu": "all experts on the CPU"}
_TRANSFORMERS = "transformers on the CPU"


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to run.

    Attributes:
        prompt_tokens: of the long prompt.
        decode_tokens: decoded before and after it, to see what the cache hits.
        strategies: also run the single ways to serve misses; then the device keeps 25% of the experts unless the
            configuration says otherwise.
        peers: the names of those to run as well.
        cut: what a synthetic model lacks of the one whose shape it has.
    """

    prompt_tokens: int
    decode_tokens: int
    repeats: int
    strategies: bool
    peers: Sequence[str] = ()
    cut: Cut | None = None


def bench_prefill(config: EngineConfig, plan: PrefillPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: our rate, against each contestant in the same run, and the decode hit rate before and after.

    Each repeat opens one contestant after the other, so that no two share the memory.

    Raises:
        EngineError: as `load_model`; for strategies, `INVALID_REQUEST` without a device with an expert cache.
    """
    if plan.strategies:
        config = with_quarter_resident(config)
    rates: dict[str, list[float]] = {}
    beside: list[Beside] = []
    fastest: dict[Beside, Flags] = {}
    hits: tuple[list[float], list[float]] = [], []
    for repeat in range(plan.repeats):
        say(f"repeat {repeat + 1} of {plan.repeats}: ours")
        with opened_with_cache(config) if plan.strategies else opened(config) as loaded:
            rates.setdefault("ours", []).append(_our_rate(loaded, plan, hits))
            precision, threads = loaded.info.precision, torch.get_num_threads()
            prompt = random_text(_vocabulary(loaded), plan.prompt_tokens, 0, seed=1).prompt
        for misses, name in _SINGLES.items() if plan.strategies else ():
            say(f"repeat {repeat + 1} of {plan.repeats}: {name}")
            with opened(without_cache(replace(config, misses=misses))) as loaded:
                rates.setdefault(name, []).append(_rate(loaded, plan))
        if LIBRARY in plan.peers:
            say(f"repeat {repeat + 1} of {plan.repeats}: transformers")
            _run_transformers(config, plan, rates, report)
        if repeat == 0:
            beside = files_beside(Path(config.model), precision, report, say, plan.peers)
        for each in list(beside):
            say(f"repeat {repeat + 1} of {plan.repeats}: {each.name}")
            try:
                _run_beside(each, threads, prompt, rates, fastest, say)
            except PeerError as failure:
                report.skip_peer(each.name, str(failure))
                if each in fastest:
                    rates.pop(name_with(each, fastest[each]), None)
                beside.remove(each)
    _rows(rates, hits, plan, config, report)


def _run_beside(
    beside: Beside,
    threads: int,
    prompt: Sequence[int],
    rates: dict[str, list[float]],
    fastest: dict[Beside, Flags],
    say: Callable[[str], None],
) -> None:
    """Adds its rate, with the flags that were the fastest when it was first run."""
    room = Room(len(prompt))
    with open_peer(beside, threads, room, fastest.get(beside)) as peer:
        if beside not in fastest:
            fastest[beside] = best_flags(beside, peer, lambda peer: peer.prefill_rate(prompt), room, say)
        rates.setdefault(name_with(beside, fastest[beside]), []).append(peer.prefill_rate(prompt))


def _our_rate(loaded: LoadedModel, plan: PrefillPlan, hits: tuple[list[float], list[float]]) -> float:
    if not caches_of(loaded):
        return _rate(loaded, plan)
    text = random_text(_vocabulary(loaded), 16, plan.decode_tokens)
    _hit_rate(loaded, text)  # fills the cache
    before = _hit_rate(loaded, text)
    rate = _rate(loaded, plan)
    after = _hit_rate(loaded, text)
    if before is not None and after is not None:
        hits[0].append(100 * before)
        hits[1].append(100 * after)
    return rate


def _rate(loaded: LoadedModel, plan: PrefillPlan) -> float:
    prompt, another = (random_text(_vocabulary(loaded), plan.prompt_tokens, 0, seed=seed).prompt for seed in (1, 2))
    prefill_seconds(loaded, another)  # first-time costs: touching memory, preparing products
    return len(prompt) / prefill_seconds(loaded, prompt)


def _hit_rate(loaded: LoadedModel, text: ForcedText) -> float | None:
    counters = [cache.counters for cache in caches_of(loaded)]
    lookups, hits = sum(each.lookups for each in counters), sum(each.hits for each in counters)
    decode_seconds(loaded, text)
    looked_up = sum(each.lookups for each in counters) - lookups
    return (sum(each.hits for each in counters) - hits) / looked_up if looked_up else None


def _vocabulary(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config().vocab_size)


def _run_transformers(config: EngineConfig, plan: PrefillPlan, rates: dict[str, list[float]], report: Report) -> None:
    """Runs transformers in both of its modes, except for a mode that failed before."""
    path, dtype = Path(config.model), torch.float32 if config.precision == "fp32" else torch.bfloat16
    ways: dict[str, Callable[[], TransformersPeer]] = {
        _TRANSFORMERS: lambda: TransformersPeer(_TRANSFORMERS, path, dtype),
        OFFLOAD: lambda: accelerate_offload(path, dtype, config.vram_bytes),
    }
    for name, load in ways.items():
        if any(skipped["peer"] == name for skipped in report.peers_not_run):
            continue
        try:
            peer = load()
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            report.skip_peer(name, str(error).splitlines()[0])
            continue
        prompt = random_text(peer.vocabulary, plan.prompt_tokens, 0, seed=1).prompt
        rates.setdefault(name, []).append(peer.prefill_rate(prompt))
        del peer  # free it before loading the next one


def _rows(
    rates: dict[str, list[float]],
    hits: tuple[list[float], list[float]],
    plan: PrefillPlan,
    config: EngineConfig,
    report: Report,
) -> None:
    name, ours = f"prefill of {plan.prompt_tokens:,} tokens on {config.device}", rates.pop("ours")
    name += f", {plan.cut.words}" if plan.cut is not None else ""
    report.rows.append(row(name, ours, "tokens/s"))
    report.rows += [row(name, ours, "tokens/s", peer=peer, peer_values=theirs) for peer, theirs in rates.items()]
    if plan.strategies:
        better = [max(pair) for pair in zip(*(rates[single] for single in _SINGLES.values()), strict=True)]
        report.rows.append(row(name, ours, "tokens/s", peer="the better of these two", peer_values=better))
    else:
        report.skip_peer("on-demand fetch, all experts on the CPU", "asked for with --strategies")
    if LIBRARY not in plan.peers:
        report.skip_peer(_TRANSFORMERS, "asked for with --peers")
    if hits[0]:
        report.rows.append(row("hits of decode after it", hits[1], "%", peer="before it", peer_values=hits[0]))
