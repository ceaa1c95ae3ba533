"""What the expert cache of a device tells its users: where experts are, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.experts.cache.pool import Slot


@dataclass
class VramCounters:
    """What the cache has done.  Once a step has ended well, lookups = hits + misses and misses = on_cpu + fetched.

    Prefills are counted apart: they use the cache as it is and leave no trace in it.

    Attributes:
        late: misses whose copy was already on its way.
        on_cpu, fetched: how misses were met.
        hits_on_cpu: hits that the CPU computed all the same, because that was done sooner.
        recomputed: experts that the CPU computed because their copy had failed; they count as on_cpu.
        evictions: experts that left for others or for a smaller cache.
        kept: experts that stayed where they had been fetched to.
        post_fetches: experts that arrived over the link for later.
        prefetched: copies begun because somebody predicted them; prefetches_used, prefetches_wasted: those that were
            a hit, and those that left without having been one.
        failures, cancelled: copies into slots that ended so.
        fetched_bytes, post_fetched_bytes, prefetched_bytes: that crossed the link to be computed at once, after a
            miss for later, and before any.
        prefill_lookups, prefill_hits, prefill_on_cpu, prefill_fetched: the same for experts of prefills.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    on_cpu: int = 0
    fetched: int = 0
    hits_on_cpu: int = 0
    recomputed: int = 0
    evictions: int = 0
    kept: int = 0
    post_fetches: int = 0
    prefetched: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    failures: int = 0
    cancelled: int = 0
    fetched_bytes: int = 0
    post_fetched_bytes: int = 0
    prefetched_bytes: int = 0
    prefill_lookups: int = 0
    prefill_hits: int = 0
    prefill_on_cpu: int = 0
    prefill_fetched: int = 0


@dataclass(slots=True)
class Lookup:
    """One layer's experts of one step.

    Attributes:
        hits: expert -> its slot, pinned until `VramCache.release`.
        misses: the others, in the order asked for; late: those of them that are on their way.
        is_use: whether the step counts for the cache: a prefill's does not.
        taken_in: misses that are being copied to a slot, pinned as well.
    """

    layer: int
    hits: dict[int, Slot] = field(default_factory=dict)
    misses: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    is_use: bool = True
    taken_in: list[int] = field(default_factory=list)
