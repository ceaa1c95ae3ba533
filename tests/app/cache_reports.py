"""Cache reports as an engine would send them, and as one that has gone mad would."""

from dataclasses import replace

import numpy as np

from engine.protocol import CacheReport, CacheTier, MemoryPart, PolicyRate, PredictorRate, TierReport

MIB = 2**20


def tier(name: CacheTier = "vram", slots: int = 1000, most: int = 6144, **changes: object) -> TierReport:
    """A tier that hits 60%."""
    whole = TierReport(
        tier=name,
        slots=slots,
        most_slots=most,
        record_bytes=2 * MIB,
        hits=5500,
        lookups=10000,
        recent_hit_rate=0.6,
        policy="lfru",
        is_adaptive=True,
        shadows=tuple(
            PolicyRate(policy, rate) for policy, rate in (("lru", 0.5), ("lfru", 0.58), ("lfu", 0.55), ("random", 0.3))
        ),
        arriving=2,
        evictions=900,
        prefetched=400,
        prefetches_used=300,
        prefetches_wasted=60,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def report(*tiers: TierReport, **changes: object) -> CacheReport:
    """Of an engine that decodes at 20 tokens per second; without tiers it has one in VRAM."""
    slots = tuple(range(0, 6145, 128))
    rates = tuple((1 - np.exp(-np.array(slots) / 1200)).tolist())
    whole = CacheReport(
        tiers=tiers or (tier(),),
        curve_slots=slots,
        curve_hit_rates=rates,
        steps_per_s=20.0,
        lookups_per_step=384.0,
        hit_s=20e-6,
        miss_s=200e-6,
        adopted="gate",
        ahead=1,
        predictors=(
            PredictorRate("gate", 900, 0.8, 0.7, 1e-4, 2.1e-3),
            PredictorRate("previous", 900, 0.4, 0.5, 0.0, 0.4e-3),
        ),
        memory=(
            MemoryPart("ram", "experts", 700 * MIB),
            MemoryPart("ram", "other", 300 * MIB),
            MemoryPart("ram", "total", 1000 * MIB),
            MemoryPart("cuda:0", "weights", 500 * MIB),
            MemoryPart("cuda:0", "experts", 2000 * MIB),
            MemoryPart("cuda:0", "free", 1500 * MIB),
            MemoryPart("cuda:0", "total", 4000 * MIB),
        ),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def without_cache(place: str = "ram") -> CacheReport:
    """All experts in one place."""
    parts = (MemoryPart(place, "experts", 160 * MIB), MemoryPart(place, "total", 900 * MIB))
    return replace(report(), tiers=(), curve_slots=(), curve_hit_rates=(), predictors=(), adopted="", memory=parts)
