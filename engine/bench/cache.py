"""`switchyard bench cache`: hit rates of the adopted policy on recorded routing, and what the bookkeeping costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from engine.bench.bookkeeping import ram_tier_us, vram_cache_us
from engine.bench.report import Report, row
from engine.experts.cache.selection import CANDIDATES
from engine.experts.replay.bounds import belady_hits
from engine.experts.replay.simulation import ADOPTED, replay
from engine.experts.replay.trace_file import RoutingTrace, read_trace

SHARES = (0.1, 0.25, 0.5)
BOOKKEEPING_LIMIT_US = 20.0
"""Microseconds per layer and step, on one core."""
_LAYERS, _EXPERTS, _TOP_K = 60, 256, 8


def bench_cache(traces: Sequence[Path], repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows for every trace (or a synthetic one, if none is given) and for the bookkeeping.

    Raises:
        EngineError: `INVALID_REQUEST` if a file is not a routing trace.
    """
    named = [(path.stem, read_trace(path)) for path in traces] or [("made-up routing", made_up_trace(600, 8, 64, 8))]
    for name, trace in named:
        for share in SHARES:
            say(f"{name}: a cache for {share:.0%} of the experts")
            _replay(name, trace, share, report)
    routing = made_up_trace(60, _LAYERS, _EXPERTS, _TOP_K, seed=1)
    # One pass each to warm up.
    for label, measure in (("VRAM cache", vram_cache_us), ("RAM tier", ram_tier_us)):
        say(f"bookkeeping of the {label}")
        values = [measure(routing) for _ in range(repeats + 1)][1:]
        what = f"{label}, bookkeeping of a layer at {_LAYERS} x {_EXPERTS}, top-{_TOP_K}"
        report.rows.append(row(what, values, "us", limit=BOOKKEEPING_LIMIT_US, higher_is_better=False))


def made_up_trace(tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> RoutingTrace:
    """Synthetic routing with popular experts and persistent topics, like recorded routing."""
    draw = np.random.default_rng(seed)
    popularity = draw.normal(0, 0.7, (layers, experts))
    topic = draw.normal(0, 1, (layers, experts))
    chosen = np.empty((tokens, layers, top_k), np.int16)
    for token in range(tokens):
        if token % 50 == 0:
            topic = draw.normal(0, 1, (layers, experts))
        score = popularity + 0.7 * topic + draw.gumbel(0, 0.7, (layers, experts))
        chosen[token] = np.argpartition(-score, top_k, axis=1)[:, :top_k]
    return RoutingTrace(chosen, np.zeros(chosen.shape, np.float16), np.array([0, tokens]), experts)


def _replay(name: str, trace: RoutingTrace, share: float, report: Report) -> None:
    slots = max(1, int(trace.layers * trace.num_experts * share))
    singles = {policy: 100 * replay(trace, policy, slots, per_layer=False).hit_rate for policy in CANDIDATES}
    best = max(singles, key=lambda policy: singles[policy])
    bound = 100 * float(belady_hits(trace, slots, per_layer=False).sum()) / trace.accesses
    adopted = 100 * replay(trace, ADOPTED, slots, per_layer=False).hit_rate
    what = f"{name}, hits at {share:.0%}"
    report.rows.append(
        row(what, [adopted], "%", peer=f"{best}, the best policy by itself", peer_values=[singles[best]], limit=bound)
    )
