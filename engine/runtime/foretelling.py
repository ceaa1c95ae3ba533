"""Who foretells a model's experts, and what it is worth: for caches on devices, and for slots in RAM over disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.latency import LatencyModel
from engine.experts.prediction.learning import Learning
from engine.experts.prediction.making import make_prefetcher
from engine.experts.prediction.prefetcher import Prefetcher
from engine.experts.prediction.target import PrefetchTimes
from engine.experts.sites import ExpertsSite
from engine.experts.vram_prefetch import VramPrefetch
from engine.runtime.device_binding import BoundLayer
from engine.runtime.gates import find_gates

_USUAL_DISK_BYTES_PER_S = 1e9
"""Until anything has been read."""


def foretell_for_devices(
    model: Any, bound: Sequence[BoundLayer], config: EngineConfig, per_token: int, model_key: str
) -> Prefetcher | None:
    """A prefetcher over the caches of all devices; None where nobody foretells or there is nowhere to bring experts."""
    if config.misses in ("off", "layer") or not any(layer.place.cache.slots for layer in bound):
        return None
    latency = bound[0].latency
    target = VramPrefetch([layer.place for layer in bound])
    caches = {id(layer.place.cache): number for number, layer in enumerate(bound)}
    own_ways = config.cache_ways is not None
    pools = [number if own_ways else caches[id(layer.place.cache)] for number, layer in enumerate(bound)]
    fetches_only = config.misses == "fetch"
    return make_prefetcher(
        target,
        lambda: _device_times(latency, fetches_only=fetches_only),
        layers=len(bound),
        experts=max(layer.site.num_experts for layer in bound),
        per_token=per_token,
        choice=config.prefetch,
        gates=find_gates(model, [layer.site for layer in bound]),
        learning=_learning(config, model_key, [layer.site for layer in bound], per_token),
        pools=pools,
    )


def foretell_for_ram(
    model: Any, sites: Sequence[ExpertsSite], bank: DiskBackedBank, config: EngineConfig, per_token: int, model_key: str
) -> Prefetcher | None:
    """A prefetcher over the slots in RAM of a bank on disk; its layers are the bank's."""
    by_name = {site.name: site for site in sites}
    in_order = [by_name[layer.name] for layer in bank.disk.header.layers]
    return make_prefetcher(
        bank.ram,
        lambda: _disk_times(bank),
        layers=len(in_order),
        experts=max(site.num_experts for site in in_order),
        per_token=per_token,
        choice=config.prefetch,
        gates=find_gates(model, in_order),
        learning=_learning(config, model_key, in_order, per_token),
    )


def _device_times(latency: LatencyModel, *, fetches_only: bool) -> PrefetchTimes:
    fetched_s = latency.transfer_s + latency.gpu_s(1)
    is_fetched = fetches_only or not latency.prefers_cpu(1)
    return PrefetchTimes(
        record_nbytes=latency.record_nbytes,
        arrival_s=latency.transfer_s,
        miss_s=fetched_s if is_fetched else latency.cpu_s(1),
        hit_s=latency.gpu_s(1),
        late_saves=False,
        urgent_share=1.0 if is_fetched else 0.0,
    )


def _disk_times(bank: DiskBackedBank) -> PrefetchTimes:
    """Whoever misses waits for the disk; what follows takes the same either way."""
    nbytes = max(layer.layout.nbytes for layer in bank.disk.header.layers)
    read, busy_s = bank.disk.bytes_read, bank.disk.busy_s
    arrival_s = nbytes * (busy_s / read if read > nbytes and busy_s > 0 else 1 / _USUAL_DISK_BYTES_PER_S)
    return PrefetchTimes(
        record_nbytes=nbytes,
        arrival_s=arrival_s,
        miss_s=arrival_s,
        hit_s=0.0,
        late_saves=True,
        urgent_share=1.0,
    )


def _learning(config: EngineConfig, model_key: str, sites: Sequence[ExpertsSite], per_token: int) -> Learning | None:
    if config.prefetch not in ("auto", "mlp"):
        return None
    experts = max(site.num_experts for site in sites)
    return Learning(
        f"{model_key} {len(sites)}",
        layers=len(sites),
        experts=experts,
        per_token=per_token,
        limit=min(2 * per_token, experts),
    )
