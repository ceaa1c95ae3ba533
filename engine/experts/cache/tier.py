"""One tier of experts over a slower one: VRAM over RAM, or RAM over disk.

It tracks which expert is in which slot, which are arriving and which are pinned, and counts how prefetches turn out.
A `Copier` moves the bytes, over a link or from a disk.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.common.choice import clearly_least
from engine.common.clock import read
from engine.experts.cache.policies import CANDIDATES, Key, Policy, Pool, Slot, make_policy
from engine.telemetry import lanes

SAMPLED_LAYERS = 4
"""At most, and one in `LAYERS_PER_SAMPLE`, but always one."""
LAYERS_PER_SAMPLE = 8
BURST_STEPS = 256
BUDGET_S = 1e-6
"""Average cost allowed per layer and step."""


@dataclass(slots=True)
class _Shadow:
    name: str
    pool: Pool
    hits: float = 0.0
    copies: float = 0.0

    def worth(self, copy_price: float) -> float:
        return self.hits - copy_price * self.copies


def step_pool(pool: Pool, keys: Sequence[Key]) -> tuple[int, int]:
    """One step of an idealised cache: looks up all keys, then post-fetches the misses.

    A key used in a step is never evicted in that step.
    """
    pinned: list[Key] = []
    missed: list[Key] = []
    for key in keys:
        if pool.use(key) is None:
            missed.append(key)
        else:
            pool.pin(key)
            pinned.append(key)
    hits = len(pinned)
    for key in missed:
        if pool.reserve(key) is not None:
            pool.arrived(key)
            pool.pin(key)
            pinned.append(key)
    for key in pinned:
        pool.unpin(key)
    return hits, len(pinned) - hits


_MARGIN = 0.01
"""By how much a candidate's hit rate, less what its copies cost, must be higher to be adopted."""


class PolicySelector:
    """Shadow pools of every candidate policy for one real pool, and the choice which to adopt.

    No single policy is right for all models: expert popularity is stable in one and useless in another.  A shadow is a
    pool without bytes.  Adoption has hysteresis, because switching evicts residents that the new policy would not keep.

    Args:
        capacity: slots of the real pool.
        candidates: names of the policies to simulate.
        popularity: from a calibration; adds `static` to the candidates.
        adopted: the initial policy; the first candidate if None.
    """

    def __init__(
        self,
        capacity: int,
        candidates: Iterable[str] = CANDIDATES,
        popularity: Mapping[Key, float] | None = None,
        adopted: str | None = None,
    ) -> None:
        names = [*candidates, *(["static"] if popularity is not None else [])]
        self._shadows = [
            _Shadow(name, Pool(range(capacity), make_policy(name, capacity, popularity))) for name in names
        ]
        self._decay = 2.0 ** (-1.0 / max(64.0 * capacity, 2000.0))  # a hit counts half after so many accesses
        self._accesses = 0.0
        self._patience = 4.0 * capacity
        self._copy_price = 0.0
        self.adopted = adopted if adopted is not None else names[0]

    @property
    def copy_price(self) -> float:
        return self._copy_price

    @copy_price.setter
    def copy_price(self, hits: float) -> None:
        self._copy_price = hits
        for shadow in self._shadows:
            shadow.pool.policy.copy_price = hits

    def observe(self, keys: Sequence[Key]) -> Policy | None:
        """Feeds one step's experts to all shadows."""
        fade = self._decay ** len(keys)
        self._accesses = self._accesses * fade + len(keys)
        for shadow in self._shadows:
            hits, copies = step_pool(shadow.pool, keys)
            shadow.hits, shadow.copies = shadow.hits * fade + hits, shadow.copies * fade + copies
        if self._accesses < self._patience:
            return None
        costs = {shadow.name: -shadow.worth(self._copy_price) for shadow in self._shadows}
        best = clearly_least(costs, self.adopted, least=_MARGIN * self._accesses)
        if best == self.adopted:
            return None
        self.adopted = best
        return next(shadow for shadow in self._shadows if shadow.name == best).pool.policy.without_residents()

    def hit_rates(self) -> dict[str, float]:
        return {shadow.name: shadow.hits / self._accesses if self._accesses else 0.0 for shadow in self._shadows}


class PolicySampler:
    """Feeds the steps of some layers to shadows, and says which policy the tier should adopt.

    A step through all shadows takes tens of microseconds, so a whole tier is judged by a sample: first a sample of its
    layers (as in SHARDS, Waldspurger et al. 2015: a fraction of the keys in a cache of that fraction of the size has
    the same hit rate), and if that is still too slow, bursts of consecutive steps, since recency is meaningless unless
    every use within a burst is seen.
    """

    def __init__(
        self,
        layers: Sequence[int],
        slots: int,
        ways: int | None,
        popularity: Mapping[Key, float] | None = None,
        adopted: str = CANDIDATES[0],
        clock: Callable[[], float] = read,
    ) -> None:
        self.adopted = adopted
        self._layers = len(layers)
        self._clock = clock
        # The middle layer of each part: the first and last layers route differently from the others.
        parts = max(1, min(SAMPLED_LAYERS, self._layers // LAYERS_PER_SAMPLE))
        sampled = [layers[(2 * part + 1) * self._layers // (2 * parts)] for part in range(parts)]
        candidates = [adopted, *(name for name in CANDIDATES if name != adopted)]
        if adopted == "static":
            candidates.remove("static")

        def selector(capacity: int) -> PolicySelector:
            return PolicySelector(max(capacity, 1), candidates, popularity, adopted=adopted)

        if ways is None:
            shared = selector(slots * parts // self._layers)
            self._selectors = dict.fromkeys(sampled, shared)
        else:
            self._selectors = {layer: selector(ways) for layer in sampled}
        self._leader = sampled[0]
        self._cost_s = 0.0
        self._steps_left = BURST_STEPS
        self._is_watching = True

    @property
    def layers(self) -> Set[int]:
        return self._selectors.keys()

    def rests(self) -> bool:
        """Whether the next step of all layers need not be observed, which then counts as one that was."""
        if self._is_watching or self._steps_left <= 1:
            return False
        self._steps_left -= 1
        return True

    def hit_rates(self) -> dict[str, float]:
        """Recent hit rate of every candidate's shadow, averaged over the sampled layers if each has its own slots."""
        rates = [selector.hit_rates() for selector in dict.fromkeys(self._selectors.values())]
        return {name: sum(rate[name] for rate in rates) / len(rates) for name in rates[0]} if rates else {}

    def price_copies(self, hits: float) -> None:
        for selector in dict.fromkeys(self._selectors.values()):
            selector.copy_price = hits

    def observe(self, layer: int, keys: Sequence[Key]) -> str | None:
        selector = self._selectors.get(layer)
        if selector is None:
            return None
        if layer == self._leader:
            self._count_step()
        if not self._is_watching:
            return None
        begun_s = self._clock()
        changed = selector.observe(keys) is not None
        took_s = self._clock() - begun_s
        self._cost_s = took_s if self._cost_s == 0 else self._cost_s + 0.05 * (took_s - self._cost_s)
        return self._verdict() if changed else None

    def _count_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        per_layer_s = self._cost_s * len(self._selectors) / self._layers
        pause = round(BURST_STEPS * (per_layer_s / BUDGET_S - 1)) if self._is_watching else 0
        self._is_watching = pause <= 0
        self._steps_left = pause if pause > 0 else BURST_STEPS

    def _verdict(self) -> str | None:
        """The policy adopted by most of the sampled selectors, if that changes the tier's."""
        selectors = list(self._selectors.values())
        name, votes = Counter(selector.adopted for selector in selectors).most_common(1)[0]
        if name == self.adopted or 2 * votes <= len(selectors):
            return None
        self.adopted = name
        return name


ADAPTIVE = "auto"
"""Name of the setting that picks the policy whose shadow has the best hit rate."""


class Purpose(Enum):
    """Why an expert is copied: it is needed now, it was a miss, or it was predicted."""

    FETCH = lanes.FETCH
    POST_FETCH = lanes.POST_FETCH
    PREFETCH = lanes.PREFETCH


Source = TypeVar("Source", contravariant=True)
"""Gives access to the records of the slower tier."""
Handle = TypeVar("Handle", covariant=True)
"""Completion of a copy: a stream event, or the future of a read."""


class Copier(Protocol[Source, Handle]):
    """Writes experts into the slots of a tier; the only part that differs between tiers."""

    def start(self, layer: int, expert: int, slot: Slot, source: Source, purpose: Purpose) -> Handle:
        """Starts writing a record into a slot."""


@dataclass(slots=True, eq=False)
class Copy(Generic[Handle]):
    """A copy into a reserved slot."""

    key: Key
    pool: Pool
    slot: Slot
    purpose: Purpose
    handle: Handle


@dataclass
class TierCounters:
    """Counters of a tier.

    Attributes:
        hits, misses: lookups that found the expert resident, and that did not.
        late: lookups of an expert whose copy was in flight.  In VRAM these also count as misses; in RAM the step waits
            for the copy, and they do not.
        evictions: experts evicted for others or by shrinking the tier.
        kept, post_fetches: completed copies of experts needed at once, and of misses copied for later use.
        prefetched: copies started on a prediction, or ahead of a prompt's next layer; prefetches_used,
            prefetches_wasted: those whose expert was then needed, and those that failed or were evicted before.
        failures: copies that ended this way.
        kept_bytes, post_fetched_bytes, prefetched_bytes: bytes copied, by purpose.
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
    kept_bytes: int = 0
    post_fetched_bytes: int = 0
    prefetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """State of a tier at one moment."""

    residents: list[Key]
    arriving: list[Key]
    slots: int
    policy: str
    is_adaptive: bool
    shadows: Mapping[str, float]


class Tier(Generic[Source, Handle]):
    """Slots for records of one size, in one pool for all layers or one pool per layer.  Not thread-safe.

    An expert is identified by its key, `layer * experts + expert`.  It is absent, arriving (not a hit until its copy
    has ended) or resident.  Arriving and pinned experts are never evicted.

    Args:
        layers: of the model, with or without slots here; experts: the most of any layer.
        record_nbytes: bytes of each slot.
        policy: one of `engine.experts.cache.policies`, or `auto`.
        popularity: uses of each key in a calibration, for the static policy.
        counters: to update; tiers may share them.

    Attributes:
        pools: in the order they were opened.
        pool_of: the pool of each layer; an empty one if it has no slots.
        copies: in flight, in the order they were started.
        predicted: keys that were prefetched and have not been needed yet.
        policy: name of the current policy.
        moved: keys that have come to a slot or left theirs since it was last emptied: the slot, or None.
    """

    def __init__(
        self,
        copier: Copier[Source, Handle],
        layers: int,
        experts: int,
        record_nbytes: int,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        counters: TierCounters | None = None,
    ) -> None:
        self.pools: list[Pool] = []
        self.pool_of = [_NO_SLOTS] * layers
        self.copies: dict[Key, Copy[Handle]] = {}
        self.predicted: set[Key] = set()
        self.moved: dict[Key, Slot | None] = {}
        self.counters = counters if counters is not None else TierCounters()
        self.is_adaptive = policy == ADAPTIVE
        self.policy = policy
        if self.is_adaptive:  # what was used most is there at first, and stays until another policy proves better
            self.policy = CANDIDATES[0] if popularity is None else "static"
        self.sampler: PolicySampler | None = None
        self._copier, self._experts, self._record_nbytes = copier, experts, record_nbytes
        self._popularity = popularity
        self._copy_price = 0.0

    def open_pool(self, layers: Iterable[int], slots: range, capacity: int) -> Pool:
        pool = Pool(slots, self._new_policy(capacity), self._count_eviction)
        self.pools.append(pool)
        for layer in layers:
            self.pool_of[layer] = pool
        return pool

    def close_pool(self) -> None:
        closed = self.pools.pop()
        self.pool_of = [_NO_SLOTS if pool is closed else pool for pool in self.pool_of]

    def renew_sampler(self) -> None:
        """Rebuilds the shadows after the number of slots has changed: they have the size of the tier."""
        self.sampler = None
        if self.is_adaptive and self.capacity:
            layers = [layer for layer, pool in enumerate(self.pool_of) if pool is not _NO_SLOTS]
            ways = self.pools[0].capacity if len(self.pools) > 1 else None
            self.sampler = PolicySampler(layers, self.capacity, ways, self._popularity, self.policy)
            self.sampler.price_copies(self._copy_price)

    def price_copies(self, hits: float) -> None:
        self._copy_price = hits
        for pool in self.pools:
            pool.policy.copy_price = hits
        if self.sampler is not None:
            self.sampler.price_copies(hits)

    @property
    def capacity(self) -> int:
        return sum(pool.capacity for pool in self.pools)

    @property
    def filled(self) -> int:
        return sum(len(pool.residents) + len(pool.arriving) for pool in self.pools)

    @property
    def backlog_bytes(self) -> int:
        return len(self.copies) * self._record_nbytes

    def key_of(self, layer: int, expert: int) -> Key:
        return layer * self._experts + expert

    def snapshot(self) -> CacheSnapshot:
        residents = [key for pool in self.pools for key in pool.residents]
        arriving = [key for pool in self.pools for key in pool.arriving]
        shadows = self.sampler.hit_rates() if self.sampler is not None else {}
        return CacheSnapshot(residents, arriving, self.capacity, self.policy, self.is_adaptive, shadows)

    def residents(self, layer: int) -> dict[int, Slot]:
        first, residents = layer * self._experts, self.pool_of[layer].residents
        if len(residents) > self._experts:
            keys = range(first, first + self._experts)
            return {key - first: residents[key] for key in keys if key in residents}
        return {key - first: slot for key, slot in residents.items() if 0 <= key - first < self._experts}

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither resident nor arriving, in the same order.  Not counted as a use."""
        first, pool = layer * self._experts, self.pool_of[layer]
        residents, arriving = pool.residents, pool.arriving
        return [one for one in experts if first + one not in residents and first + one not in arriving]

    def observe(self, layer: int, keys: Sequence[Key]) -> None:
        if self.sampler is not None and (name := self.sampler.observe(layer, keys)) is not None:
            self.policy = name
            for pool in self.pools:
                pool.adopt(self._new_policy(pool.capacity))

    def used(self, layers: Sequence[int], keys: NDArray[np.int64], missed: NDArray[np.bool_]) -> None:
        """As `observe` and `look_up` of several layers, for keys of which somebody has found out which were missed."""
        if self.sampler is not None and not self.sampler.rests():
            for layer in self.sampler.layers & set(layers):
                self.observe(layer, keys[layers.index(layer)].tolist())
        if len(self.pools) > 1:
            for layer, mine, is_missed in zip(layers, keys, missed, strict=True):
                self.pool_of[layer].policy.used(mine.tolist(), mine[~is_missed].tolist())
        elif self.pools:
            self.pools[0].policy.used(keys.ravel().tolist(), keys[~missed].tolist())
        if self.predicted:
            for key in self.predicted.intersection(keys[~missed].tolist()):
                self.count_needed(key)

    def look_up(self, layer: int, keys: Sequence[Key]) -> list[Slot | None]:
        """Looks up the distinct keys a layer needs now and pins the residents: the slot of each, None for a miss."""
        slots = self.pool_of[layer].use_all(keys)
        if self.predicted:
            for key, slot in zip(keys, slots, strict=True):
                if slot is not None and key in self.predicted:
                    self.count_needed(key)
        return slots

    def count_needed(self, key: Key) -> None:
        self.predicted.discard(key)
        self.counters.prefetches_used += 1

    def hold(self, layer: int, experts: Iterable[int]) -> dict[int, Slot]:
        """Pins the residents among `experts`, without counting a use, so eviction order does not change."""
        first, pool, held = layer * self._experts, self.pool_of[layer], dict[int, Slot]()
        for expert in experts:
            slot = pool.residents.get(first + expert)
            if slot is not None:
                pool.pin(first + expert)
                held[expert] = slot
        return held

    def release(self, layer: int, experts: Iterable[int]) -> None:
        first, unpin = layer * self._experts, self.pool_of[layer].unpin
        for expert in experts:
            unpin(first + expert)

    def bring(
        self, layer: int, expert: int, source: Source, purpose: Purpose, *, only_if_admitted: bool = True
    ) -> Copy[Handle] | None:
        """Starts copying an expert, unless it is resident or arriving, or no slot should or can be freed for it."""
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
        """As `bring`, for an expert that may be needed; evicts nothing but experts in `dead`."""
        pool, key = self.pool_of[layer], layer * self._experts + expert
        if key in pool.residents or key in pool.arriving or not (pool.free or self._evict_dead(pool, dead)):
            return None
        return self.bring(layer, expert, source, Purpose.PREFETCH, only_if_admitted=False)

    def end(self, copy: Copy[Handle], *, succeeded: bool) -> None:
        del self.copies[copy.key]
        counters, nbytes = self.counters, self._record_nbytes
        if not succeeded:
            copy.pool.abandon(copy.key)
            if copy.key in self.predicted:
                self._count_wasted(copy.key)
            counters.failures += 1
            return
        copy.pool.arrived(copy.key)
        self.moved[copy.key] = copy.slot
        if copy.purpose is Purpose.FETCH:
            counters.kept += 1
            counters.kept_bytes += nbytes
        elif copy.purpose is Purpose.POST_FETCH:
            counters.post_fetches += 1
            counters.post_fetched_bytes += nbytes
        else:
            counters.prefetched_bytes += nbytes

    def _new_policy(self, capacity: int) -> Policy:
        policy = make_policy(self.policy, capacity, self._popularity)
        policy.copy_price = self._copy_price
        return policy

    def _evict_dead(self, pool: Pool, dead: Iterable[tuple[int, int]]) -> bool:
        for layer, expert in dead:
            key = layer * self._experts + expert
            if self.pool_of[layer] is not pool or key not in pool.residents:
                continue
            with contextlib.suppress(ValueError):  # pinned, so it is in use after all
                pool.evict(key)
                return True
        return False

    def _count_eviction(self, key: Key) -> None:
        self.counters.evictions += 1
        self.moved[key] = None
        if key in self.predicted:
            self._count_wasted(key)

    def _count_wasted(self, key: Key) -> None:
        self.predicted.discard(key)
        self.counters.prefetches_wasted += 1


_NO_SLOTS = Pool(range(0), make_policy("lru", 0))
