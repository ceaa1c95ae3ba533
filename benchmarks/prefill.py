"""`switchyard bench prefill` with peers, and with `--strategies` beside the single ways to serve misses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.peers.beside import ON_CPU, reading_peers
from benchmarks.peers.library import LIBRARY
from benchmarks.shared_experts import opened_with_cache, with_quarter_resident, without_cache
from engine.bench.decode import PrefillPlan, bench_prefill, read_rate
from engine.bench.opened import opened
from engine.bench.report import Report

if TYPE_CHECKING:
    from engine.common.config import EngineConfig, Misses

_SINGLES: dict[Misses, str] = {"fetch": "on-demand fetch", "cpu": "all experts on the CPU"}


def bench_prefill_beside(
    config: EngineConfig,
    plan: PrefillPlan,
    peers: Sequence[str],
    report: Report,
    say: Callable[[str], None],
    *,
    strategies: bool,
) -> None:
    """Adds the rows of `bench_prefill`, and ours against each peer.

    Args:
        strategies: also run the single ways to serve misses; then the device keeps 25% of the experts unless the
            configuration says otherwise.
    """
    if strategies:
        config = with_quarter_resident(config)
    else:
        report.skip_peer("on-demand fetch, all experts on the CPU", "asked for with --strategies")
    if LIBRARY not in peers:
        report.skip_peer(ON_CPU, "asked for with --peers")

    def single(misses: Misses, _repeat: int) -> float:
        with opened(without_cache(replace(config, misses=misses))) as loaded:
            return read_rate(loaded, plan.prompt_tokens)

    def beside(precision: str, prompt: Sequence[int]) -> dict[str, Callable[[int], float]]:
        singles = {name: partial(single, misses) for misses, name in _SINGLES.items()} if strategies else {}
        return {**singles, **reading_peers(config, precision, prompt, report, say, peers)}

    rates = bench_prefill(config, plan, report, say, beside, opened_with_cache if strategies else opened)
    if strategies:
        better = [max(pair) for pair in zip(*(rates[single] for single in _SINGLES.values()), strict=True)]
        first = report.rows[0]
        report.add(first.name, rates["ours"], first.unit, peer="the better of these two", peer_values=better)
