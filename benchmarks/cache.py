"""`switchyard bench cache`: hit rates of the adopted policy on recorded routing, and what the bookkeeping costs.

Bookkeeping per layer is lookups, pinning, counting and eviction choices. It is measured in CPU time, which is the same
on a busy machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from engine.bench.report import Report
from engine.devices.cpu import open_cpu
from engine.experts.cache.policies import CANDIDATES
from engine.experts.direct_file import Part
from engine.experts.disk_tier import DiskTier
from engine.experts.ram_tier import RamTier
from engine.experts.record import LayerSpec, allocate_records
from engine.experts.record_source import RecordSource
from engine.experts.replay import ADOPTED, RoutingTrace, belady_hits, read_trace, replay
from engine.experts.vram_cache import VramCache
from engine.formats.tiles import RecordLayout
from engine.kernels.interface import LayerRecords

if TYPE_CHECKING:
    from engine.experts.replay import RoutingTrace
    from engine.kernels.interface import ExpertKernel

_LAYOUT = RecordLayout.of({"down_proj": ((8, 8), torch.bfloat16)}, transposed=False)
"""The smallest record: one page."""
_RESIDENT_SHARE = 0.25


def vram_cache_us(routing: RoutingTrace) -> float:
    """Mean microseconds of a layer's `acquire` and `release` over the second half of the routing.

    The first half fills the cache. Misses are post-fetched between the timed calls, as in a run, with the CPU as
    device, whose copies finish immediately.
    """
    steps, spent_s, timed = _steps(routing), 0.0, 0
    records = allocate_records(routing.num_experts, _LAYOUT, torch.device("cpu"))
    records.zero_()
    source = RecordSource(LayerRecords("made up", _LAYOUT, records), cast("ExpertKernel", None))  # nothing is computed
    device = open_cpu()
    slots = int(_RESIDENT_SHARE * routing.layers * routing.num_experts)
    cache = VramCache(device, _LAYOUT, layers=routing.layers, experts=routing.num_experts, slots=slots, staging=0)
    try:
        for number, (layer, experts) in enumerate(steps):
            begun_s = time.thread_time()
            lookup = cache.acquire(layer, experts)
            found_s = time.thread_time()
            cache.post_fetch(layer, lookup.misses, source.acquire(lookup.misses))
            posted_s = time.thread_time()
            cache.release(lookup)
            if number >= len(steps) // 2:
                spent_s += time.thread_time() - posted_s + found_s - begun_s
                timed += 1
    finally:
        cache.close()
        device.close()
    return 1e6 * spent_s / timed


def ram_tier_us(routing: RoutingTrace) -> float:
    """Microseconds of a layer's `acquire` and `release` with all experts in RAM, over the second half."""
    steps, spent_s, timed = _steps(routing), 0.0, 0
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as folder:
        disk = _made_up(Path(folder) / "made-up", routing)
        with RamTier(disk, disk.table.nbytes, at_least=routing.per_token) as tier:
            everything = list(range(routing.num_experts))
            for layer in range(routing.layers):
                whole = tier.acquire(layer, everything)
                for arrival in whole.arriving.values():
                    arrival.result()
                whole.release()
            for number, (layer, experts) in enumerate(steps):
                begun_s = time.thread_time()
                tier.acquire(layer, experts).release()
                if number >= len(steps) // 2:
                    spent_s += time.thread_time() - begun_s
                    timed += 1
    return 1e6 * spent_s / timed


def _steps(routing: RoutingTrace) -> list[tuple[int, list[int]]]:
    """(layer, experts in ascending order), in the order of a run."""
    return [
        (layer, sorted(expert for expert in experts if expert >= 0))
        for token in routing.experts.tolist()
        for layer, experts in enumerate(token)
    ]


def _made_up(path: Path, routing: RoutingTrace) -> DiskTier:
    """Records of zeros on disk."""
    specs = [LayerSpec(f"layers.{index}", routing.num_experts, _LAYOUT) for index in range(routing.layers)]
    nbytes = sum(spec.nbytes for spec in specs)
    path.write_bytes(bytes(nbytes))
    numbers = iter(range(0, nbytes, _LAYOUT.nbytes))
    parts = [[Part(0, _LAYOUT.nbytes, [(path, next(numbers)) for _ in range(spec.num_experts)])] for spec in specs]
    return DiskTier(specs, parts)


SHARES = (0.1, 0.25, 0.5)
BOOKKEEPING_LIMIT_US = 20.0
"""Microseconds per layer and step, on one core."""
_LAYERS, _EXPERTS, _TOP_K = 60, 256, 8


def bench_cache(traces: Sequence[Path], repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows for every trace (or a synthetic one, if none is given) and for the bookkeeping."""
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
        report.add(what, values, "us", limit=BOOKKEEPING_LIMIT_US, higher_is_better=False)


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
    report.add(
        what, [adopted], "%", peer=f"{best}, the best policy by itself", peer_values=[singles[best]], limit=bound
    )
