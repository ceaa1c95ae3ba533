"""One tier of experts over a slower one: VRAM over RAM, or RAM over disk.

It says who is in which slot, who is on the way and who may not leave, and it counts what came of what was predicted.
Bytes are moved by a `Copier`: over a link, or from a disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from engine.experts.cache.policies import Key, make_policy
from engine.experts.cache.pool import Pool, Slot
from engine.experts.cache.selection import CANDIDATES, PolicySampler
from engine.telemetry import lanes

ADAPTIVE = "auto"
"""Name of the choice among the policies by what each would have hit."""


class Purpose(Enum):
    """Why an expert is copied: it is needed now, it has been missed, or somebody predicted it."""

    FETCH = lanes.FETCH
    POST_FETCH = lanes.POST_FETCH
    PREFETCH = lanes.PREFETCH


Source = TypeVar("Source", contravariant=True)
"""Where the records of the slower tier are."""
Handle = TypeVar("Handle", covariant=True)
"""What a copy is followed by: an event of a stream, the future of a read."""


class Copier(Protocol[Source, Handle]):
    """Writes experts into the slots of a tier: all that differs between tiers."""

    def start(self, layer: int, expert: int, slot: Slot, source: Source, purpose: Purpose) -> Handle:
        """Begins to write a record into a slot.

        Raises:
            EngineError: it cannot be begun; nothing is written to the slot.
        """


@dataclass(slots=True, eq=False)
class Copy(Generic[Handle]):
    """Bytes on their way into a reserved slot; cancelled: taken back before it began."""

    key: Key
    pool: Pool
    slot: Slot
    purpose: Purpose
    handle: Handle
    cancelled: bool = False


@dataclass
class TierCounters:
    """What a tier has done.

    Attributes:
        hits, misses: experts that were there when they were needed, and that were not.
        late: those whose copy was already on its way: misses of the tier in VRAM, while whoever needs one in RAM waits
            for it, and it is no miss.
        evictions: experts that left for others or for a smaller tier.
        kept, post_fetches: experts that arrived because they were needed at once, and for later after a miss.
        prefetched: copies begun because somebody predicted them; prefetches_used, prefetches_wasted: those whose expert
            was then needed, and those that failed or left before it was.
        failures, cancelled: copies that ended so.
        kept_bytes, post_fetched_bytes, prefetched_bytes: that arrived, by why they were copied.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    evictions: int = 0
    kept: int = 0
    post_fetches: int = 0
    prefetched: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    failures: int = 0
    cancelled: int = 0
    kept_bytes: int = 0
    post_fetched_bytes: int = 0
    prefetched_bytes: int = 0

    @property
    def arrived_bytes(self) -> int:
        """Of all records that were copied into slots."""
        return self.kept_bytes + self.post_fetched_bytes + self.prefetched_bytes


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """One moment of a tier: who is where, and who decides.

    Attributes:
        residents, arriving: keys.
        slots: places for experts.
        policy: that decides now; is_adaptive: chosen while running.
        shadows: what each candidate would have hit recently; empty unless adaptive.
    """

    residents: list[Key]
    arriving: list[Key]
    slots: int
    policy: str
    is_adaptive: bool
    shadows: Mapping[str, float]


class Tier(Generic[Source, Handle]):
    """The slots for records of one size, in one pool for all layers or one for each.  Not for several threads.

    An expert is a key, `layer * experts + expert`.  It is absent, arriving (not a hit before its copy has ended) or
    resident; one that arrives or is pinned is never evicted.

    Args:
        layers: of the model, with slots here or not; experts: the most of any layer.
        record_nbytes: of each slot.
        policy: of `engine.experts.cache.policies`, or `auto`.
        popularity: uses of each key in a calibration, for the static policy.
        counters: to count in; tiers may share them.

    Attributes:
        pools: those that were opened, in that order.
        pool_of: the pool of each layer; an empty one if it has no slots.
        copies: under way, in the order in which they were begun.
        predicted: keys that were prefetched and have not been needed yet.
        policy: name of the policy that decides now.
    """

    def __init__(
        self,
        copier: Copier[Source, Handle],
        layers: int,
        experts: int,
        record_nbytes: int,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        seed: int = 0,
        counters: TierCounters | None = None,
    ) -> None:
        self.pools: list[Pool] = []
        self.pool_of = [_NO_SLOTS] * layers
        self.copies: dict[Key, Copy[Handle]] = {}
        self.predicted: set[Key] = set()
        self.counters = counters if counters is not None else TierCounters()
        self.is_adaptive = policy == ADAPTIVE
        self.policy = CANDIDATES[0] if self.is_adaptive else policy
        self.sampler: PolicySampler | None = None
        self._copier, self._experts, self._record_nbytes = copier, experts, record_nbytes
        self._popularity, self._seed = popularity, seed

    def open_pool(self, layers: Iterable[int], slots: range, capacity: int) -> Pool:
        """Slots for these layers, which have had none.

        Args:
            capacity: slots that there are going to be: what a policy forgets is measured in uses of a whole pool.
        """
        policy = make_policy(self.policy, capacity, self._popularity, self._seed)
        pool = Pool(slots, policy, self._count_eviction)
        self.pools.append(pool)
        for layer in layers:
            self.pool_of[layer] = pool
        return pool

    def close_pool(self) -> None:
        """Takes the pool that was opened last away."""
        gone = self.pools.pop()
        self.pool_of = [_NO_SLOTS if pool is gone else pool for pool in self.pool_of]

    def renew_sampler(self) -> None:
        """After a change of how many slots there are: shadows have the size of the tier."""
        self.sampler = None
        if self.is_adaptive and self.capacity:
            layers = [layer for layer, pool in enumerate(self.pool_of) if pool is not _NO_SLOTS]
            ways = self.pools[0].capacity if len(self.pools) > 1 else None
            self.sampler = PolicySampler(layers, self.capacity, ways, self._popularity, self.policy)

    @property
    def capacity(self) -> int:
        """Slots that there are now."""
        return sum(pool.capacity for pool in self.pools)

    @property
    def filled(self) -> int:
        """Slots with somebody in them or on the way to them."""
        return sum(len(pool.residents) + len(pool.arriving) for pool in self.pools)

    @property
    def backlog_bytes(self) -> int:
        """That are on their way."""
        return len(self.copies) * self._record_nbytes

    def key_of(self, layer: int, expert: int) -> Key:
        """The tier's name of an expert."""
        return layer * self._experts + expert

    def snapshot(self) -> CacheSnapshot:
        """Everything in it."""
        there = [key for pool in self.pools for key in pool.residents]
        coming = [key for pool in self.pools for key in pool.arriving]
        shadows = self.sampler.hit_rates() if self.sampler is not None else {}
        return CacheSnapshot(there, coming, self.capacity, self.policy, self.is_adaptive, shadows)

    def residents(self, layer: int) -> dict[int, Slot]:
        """The layer's experts that are there now."""
        first, residents = layer * self._experts, self.pool_of[layer].residents
        if len(residents) > self._experts:
            keys = range(first, first + self._experts)
            return {key - first: residents[key] for key in keys if key in residents}
        return {key - first: slot for key, slot in residents.items() if 0 <= key - first < self._experts}

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those that are neither there nor on their way, in the same order.  Counts as no use."""
        first, pool = layer * self._experts, self.pool_of[layer]
        residents, arriving = pool.residents, pool.arriving
        return [one for one in experts if first + one not in residents and first + one not in arriving]

    def observe(self, layer: int, keys: Sequence[Key]) -> None:
        """One layer's experts of one step, for the choice of the policy."""
        if self.sampler is not None and (name := self.sampler.observe(layer, keys)) is not None:
            self.policy = name
            for pool in self.pools:
                pool.adopt(make_policy(name, pool.capacity, self._popularity, self._seed))

    def look_up(self, layer: int, keys: Sequence[Key]) -> list[Slot | None]:
        """Slots of the residents among the distinct keys that a layer needs now, which are pinned."""
        slots = self.pool_of[layer].use_all(keys)
        if self.predicted:
            for key, slot in zip(keys, slots, strict=True):
                if slot is not None and key in self.predicted:
                    self.count_needed(key)
        return slots

    def count_needed(self, key: Key) -> None:
        """One of the predicted is needed."""
        self.predicted.discard(key)
        self.counters.prefetches_used += 1

    def hold(self, layer: int, experts: Iterable[int]) -> dict[int, Slot]:
        """Pins those that are there.  This is no use of them: who leaves is decided as before."""
        first, pool, held = layer * self._experts, self.pool_of[layer], dict[int, Slot]()
        for expert in experts:
            slot = pool.residents.get(first + expert)
            if slot is not None:
                pool.pin(first + expert)
                held[expert] = slot
        return held

    def release(self, layer: int, experts: Iterable[int]) -> None:
        """Unpins these."""
        first, unpin = layer * self._experts, self.pool_of[layer].unpin
        for expert in experts:
            unpin(first + expert)

    def bring(
        self, layer: int, expert: int, source: Source, purpose: Purpose, *, only_if_admitted: bool = True
    ) -> Copy[Handle] | None:
        """Begins to copy an expert, unless it is there or coming, or nobody should or can leave for it.

        Raises:
            EngineError: the copy could not be begun; the expert is absent.
        """
        pool, key = self.pool_of[layer], layer * self._experts + expert
        if key in pool.residents or key in pool.arriving:
            return None
        slot = pool.reserve(key, only_if_admitted)
        if slot is None:
            return None
        try:
            handle = self._copier.start(layer, expert, slot, source, purpose)
        except BaseException:
            pool.abandon(key)
            self.counters.failures += 1
            raise
        copy = self.copies[key] = Copy(key, pool, slot, purpose, handle)
        if purpose is Purpose.PREFETCH:
            self.predicted.add(key)
            self.counters.prefetched += 1
        return copy

    def prefetch(
        self, layer: int, expert: int, source: Source, dead: Iterable[tuple[int, int]] = ()
    ) -> Copy[Handle] | None:
        """As `bring`, for an expert that may be wanted, where that costs nobody a place.

        Args:
            dead: (layer, expert) pairs that are not expected to be wanted, of which one may leave for it.
        """
        pool, key = self.pool_of[layer], layer * self._experts + expert
        if key in pool.residents or key in pool.arriving or not (pool.free or self._evict_dead(pool, dead)):
            return None
        return self.bring(layer, expert, source, Purpose.PREFETCH, only_if_admitted=False)

    def end(self, copy: Copy[Handle], *, well: bool) -> None:
        """A copy has ended: only now is its expert resident, or the slot free again."""
        del self.copies[copy.key]
        counters, nbytes = self.counters, self._record_nbytes
        if not well:
            copy.pool.abandon(copy.key)
            if copy.key in self.predicted:
                self._count_wasted(copy.key)
            counters.cancelled += copy.cancelled
            counters.failures += not copy.cancelled
            return
        copy.pool.arrived(copy.key)
        if copy.purpose is Purpose.FETCH:
            counters.kept += 1
            counters.kept_bytes += nbytes
        elif copy.purpose is Purpose.POST_FETCH:
            counters.post_fetches += 1
            counters.post_fetched_bytes += nbytes
        else:
            counters.prefetched_bytes += nbytes

    def _evict_dead(self, pool: Pool, dead: Iterable[tuple[int, int]]) -> bool:
        for layer, expert in dead:
            key = layer * self._experts + expert
            if self.pool_of[layer] is not pool or key not in pool.residents:
                continue
            with contextlib.suppress(ValueError):  # in use: whoever thought it dead was wrong
                pool.evict(key)
                return True
        return False

    def _count_eviction(self, key: Key) -> None:
        self.counters.evictions += 1
        if key in self.predicted:
            self._count_wasted(key)

    def _count_wasted(self, key: Key) -> None:
        self.predicted.discard(key)
        self.counters.prefetches_wasted += 1


_NO_SLOTS = Pool(range(0), make_policy("lru", 0))
