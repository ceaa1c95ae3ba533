"""Who predicts a model's experts, and what it is worth: for caches on devices, and for slots in RAM over disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.common.config import EngineConfig
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.prediction.learning import Learning
from engine.experts.prediction.making import make_prefetcher
from engine.experts.prediction.prefetcher import Prefetcher
from engine.experts.prediction.times import over_disk, over_link
from engine.experts.sites import ExpertsSite
from engine.experts.vram_cache import VramPrefetch
from engine.runtime.device_binding import BoundLayer
from engine.runtime.gates import find_gates


def foretell_for_devices(
    model: Any, bound: Sequence[BoundLayer], config: EngineConfig, per_token: int, model_key: str
) -> Prefetcher | None:
    """A prefetcher over the caches of all devices; None where nobody predicts or there is nowhere to bring experts."""
    if config.misses in ("off", "layer") or not any(layer.place.cache.slots for layer in bound):
        return None
    latency = bound[0].latency
    target = VramPrefetch([layer.place for layer in bound])
    caches = {id(layer.place.cache): number for number, layer in enumerate(bound)}
    own_ways = config.cache_ways is not None
    pools = [number if own_ways else caches[id(layer.place.cache)] for number, layer in enumerate(bound)]
    distinct = list({id(layer.place.cache): layer.place.cache for layer in bound}.values())
    return make_prefetcher(
        target,
        lambda: over_link(latency, [cache.counters for cache in distinct]),
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
    layouts = [layer.layout for layer in bank.disk.header.layers]
    nbytes = max(layout.nbytes for layout in layouts)
    return make_prefetcher(
        bank.ram,
        lambda: over_disk(bank.disk, nbytes),
        layers=len(in_order),
        experts=max(site.num_experts for site in in_order),
        per_token=per_token,
        choice=config.prefetch,
        gates=find_gates(model, in_order),
        learning=_learning(config, model_key, in_order, per_token),
        pools=[layouts.index(layout) for layout in layouts],  # slots are shared by layers of one layout
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
