"""Where experts are prefetched to, and what that takes and saves, over a link and from a disk."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from engine.experts.disk_tier import DiskTier
from engine.experts.latency import LatencyModel
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import VramCache, VramCounters

_MEASURED_RECORDS = 64
"""Records that must have been read before the disk's measured bandwidth is used."""
_ASSUMED_BYTES_PER_S = 1e9


class PrefetchTarget(Protocol):
    """A cache that experts can be prefetched to: slots in RAM over disk, or in VRAM over RAM."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes in flight."""
        ...

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that are neither resident nor arriving, in the same order.  Not counted as a use."""
        ...

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Starts copying experts, in this order, while there are free slots or `dead` experts to evict.

        Args:
            dead: (layer, expert) pairs that may be evicted, consumed only as needed.

        Returns:
            How many copies were started: of the first absent ones.
        """
        ...


@dataclass(frozen=True)
class Place:
    """Experts of a layer on a device: its cache, the layer's index there, their records, and the first one's number."""

    cache: VramCache
    layer: int
    source: RecordSource
    first: int = 0

    def has(self, expert: int) -> bool:
        """Whether this expert of the layer is one of them."""
        return 0 <= expert - self.first < self.source.num_experts


class VramPrefetch:
    """A `PrefetchTarget` over the caches of all devices.

    Args:
        layers: places of each layer with experts, in model order; callers index layers by this order.
    """

    def __init__(self, layers: Sequence[Sequence[Place]]) -> None:
        self._layers = layers
        self._of_device: dict[str, dict[int, VramCache]] = {}
        for cache in (place.cache for places in layers for place in places):
            self._of_device.setdefault(cache.device.name, {})[id(cache)] = cache

    @property
    def backlog_bytes(self) -> int:
        """Bytes in flight to the device that has most of them: each has a link of its own."""
        return max(sum(cache.backlog_bytes for cache in caches.values()) for caches in self._of_device.values())

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        places = self._layers[layer]
        if len(places) == 1:
            return places[0].cache.absent(places[0].layer, experts)
        wanted, gone = list(experts), set[int]()
        for place in places:
            mine = place.cache.absent(place.layer, [expert - place.first for expert in wanted if place.has(expert)])
            gone.update(place.first + expert for expert in mine)
        return [expert for expert in wanted if expert in gone]

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """See `PrefetchTarget.prefetch`; what is on disk is read into RAM first, and copied when asked for again."""
        begun, found = 0, (self._place(*each) for each in dead)
        left: list[tuple[Place, int]] = []  # dead experts of other caches
        for expert in self.absent(layer, dict.fromkeys(experts)):
            place, own = self._place(layer, expert)
            ours = _of_cache(place.cache, found, left)
            if not (place.cache.prefetch(place.layer, own, place.source, ours) or place.source.prefetch([own])):
                break
            begun += 1
        return begun

    def _place(self, layer: int, expert: int) -> tuple[Place, int]:
        """Where an expert is, and its number there."""
        place = next(place for place in self._layers[layer] if place.has(expert))
        return place, expert - place.first


def _of_cache(
    cache: VramCache, found: Iterator[tuple[Place, int]], left: list[tuple[Place, int]]
) -> Iterator[tuple[int, int]]:
    for each in [each for each in left if each[0].cache is cache]:
        left.remove(each)
        yield each[0].layer, each[1]
    for place, expert in found:
        if place.cache is cache:
            yield place.layer, expert
        else:
            left.append((place, expert))


@dataclass(frozen=True, slots=True)
class PrefetchTimes:
    """What it takes to copy an expert, and what it saves if it is resident.

    Attributes:
        record_nbytes: bytes of an expert.
        arrival_s: seconds from the arrival of the previous expert in the queue to the arrival of this one.
        miss_s: seconds that one more miss costs a step.
        hit_s: seconds that a hit takes.
        late_saves: whether the step waits for an expert in flight, so that a late prefetch still helps; if not, the
            expert is computed elsewhere as if it had not been prefetched.
        urgent_share: share of misses that are copied at once, and that a prefetch can therefore delay.
    """

    record_nbytes: int
    arrival_s: float
    miss_s: float
    hit_s: float
    late_saves: bool
    urgent_share: float

    def saved_s(self, queued: int, time_left_s: float, backlog_bytes: int = 0) -> float:
        """Seconds that a prefetch saves if its expert is needed.

        Args:
            queued: prefetches queued before it.
            time_left_s: until the layer runs.
        """
        arrives_s = (queued + 1 + backlog_bytes / self.record_nbytes) * self.arrival_s
        late_s = max(0.0, arrives_s - time_left_s)
        if not self.late_saves:
            return self.miss_s - self.hit_s if late_s == 0 else 0.0
        return max(0.0, self.miss_s - self.hit_s - late_s)

    def room(self, time_left_s: float, backlog_bytes: int = 0) -> int:
        """How many queued prefetches save anything, that is, have a `saved_s` above 0."""
        if self.miss_s <= self.hit_s:
            return 0
        if self.arrival_s <= 0:
            return 2**31
        bearable_s = time_left_s + (self.miss_s - self.hit_s if self.late_saves else 0.0)
        count = bearable_s / self.arrival_s - backlog_bytes / self.record_nbytes
        return max(0, math.ceil(count) - 1 if self.late_saves else math.floor(count + 1e-9))


def over_link(latency: LatencyModel, counters: Sequence[VramCounters]) -> PrefetchTimes:
    """Times for slots on a device over records in RAM.

    Misses are computed on the CPU or fetched, concurrently: with a share f of them fetched, one more miss takes
    max((1 - f) cpu_lat, f (trans_lat + gpu_lat)).

    Args:
        counters: of the devices' caches, for how misses have been served so far.
    """
    hit_s = latency.gpu_s(1)
    fetched_s = latency.transfer_s + hit_s
    fetched_so_far = sum(each.fetched for each in counters)
    served = fetched_so_far + sum(each.on_cpu for each in counters)
    fetched = fetched_so_far / served if served else float(not latency.prefers_cpu(1))
    return PrefetchTimes(
        record_nbytes=latency.record_nbytes,
        arrival_s=latency.transfer_s,
        miss_s=max((1 - fetched) * latency.cpu_s(1), fetched * fetched_s),
        hit_s=hit_s,
        late_saves=False,
        urgent_share=fetched,
    )


def over_disk(disk: DiskTier, record_nbytes: int) -> PrefetchTimes:
    """Times for slots in RAM over a bank on disk, where a step waits for every miss."""
    read_bytes, busy_s = disk.bytes_read, disk.busy_s
    is_measured = busy_s > 0 and read_bytes >= _MEASURED_RECORDS * record_nbytes
    rate = read_bytes / busy_s if is_measured else _ASSUMED_BYTES_PER_S
    arrival_s = record_nbytes / rate
    return PrefetchTimes(
        record_nbytes=record_nbytes,
        arrival_s=arrival_s,
        miss_s=arrival_s,
        hit_s=0.0,
        late_saves=True,
        urgent_share=1.0,
    )


_SPARED_STEPS = 2
"""Experts used in this step or the previous one are never evicted: routing repeats from token to token."""
_LONGEST = 8.0
"""Upper bound of the estimated residency, in steps."""
_CHOICE = 4
"""Candidates examined per slot needed; of these, the least used are evicted first."""


_EWMA_WEIGHT = 0.02
_DECAY = 0.98
_STAYING = 0.5
"""Share of wasted prefetches that are still resident when they are needed after all."""
_MEMORY = 1000.0
"""Events after which the counts are halved."""


class Aging:
    """Recency of the experts of a tier, and how often those evicted for prefetches were needed again.

    Args:
        pools: for each layer, the index of its pool of slots.
        stride: greater than any expert's number.
    """

    def __init__(self, pools: Sequence[int], stride: int) -> None:
        self._pools = pools
        self._stride = stride
        self._stay = _LONGEST
        self._evicted = self._wasted = self._wasted_then_used = 0.0
        self._evicted_then_used = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the residents, but not the statistics of evictions."""
        self._order: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(max(self._pools, default=0) + 1)]
        self._uses: dict[int, int] = {}
        self._recently_evicted: dict[int, int] = {}
        self._recently_wasted: dict[int, int] = {}

    @property
    def regret(self) -> float:
        """Expected number of extra misses per wasted prefetch.

        An evicted expert would have stayed, and a wasted one does stay, for about the age at which experts are evicted.
        So the cost is the share of evicted experts needed again within that time, minus the share of wasted prefetches
        needed within it and still resident.
        """
        lost = (self._evicted_then_used + 0.5) / (self._evicted + 5)
        won = self._wasted_then_used / (self._wasted + 5)
        return max(0.0, lost - _STAYING * won)

    def decay(self) -> None:
        """Decays the statistics while nothing is evicted, because they become outdated."""
        self._evicted *= _DECAY
        self._evicted_then_used *= _DECAY
        self._wasted *= _DECAY
        self._wasted_then_used *= _DECAY

    def use(self, layer: int, experts: Sequence[int], step: int) -> None:
        """A layer uses these experts."""
        first, order, uses = layer * self._stride, self._order[self._pools[layer]], self._uses
        evicted = self._recently_evicted
        for expert in experts:
            key = first + expert
            order[key] = step
            order.move_to_end(key)
            uses[key] = uses.get(key, 0) + 1
        if evicted:
            self._evicted_then_used += _pop_recent(evicted, first, experts, step - self._stay)
        if self._recently_wasted:
            self._wasted_then_used += _pop_recent(self._recently_wasted, first, experts, step - self._stay)

    def prefetched(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These experts are being prefetched, which counts as recent."""
        first, order = layer * self._stride, self._order[self._pools[layer]]
        for expert in experts:
            order[first + expert] = step
            order.move_to_end(first + expert)
            self._uses.setdefault(first + expert, 0)

    def wasted(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These experts were prefetched but not used when their layer came."""
        for expert in experts:
            self._recently_wasted[layer * self._stride + expert] = step
        self._wasted += len(experts)
        if self._wasted > _MEMORY:
            self._wasted, self._wasted_then_used = self._wasted / 2, self._wasted_then_used / 2

    def dead(
        self, layer: int, places: int, step: int, predicted: Mapping[int, Collection[int]], target: PrefetchTarget
    ) -> list[tuple[int, int]]:
        """(layer, expert) of residents in this layer's pool that may be evicted, least used first.

        Args:
            places: how many are needed at most.
            predicted: layer -> experts predicted for it.
        """
        order, uses, latest = self._order[self._pools[layer]], self._uses, step - _SPARED_STEPS
        oldest = [key for key in islice(order, _CHOICE * places) if order[key] <= latest]
        oldest.sort(key=uses.__getitem__)
        found: list[tuple[int, int]] = []
        for key in oldest:
            owner, expert = divmod(key, self._stride)
            if expert in predicted.get(owner, ()):
                continue
            if target.absent(owner, [expert]):  # evicted by the cache's own policy
                del order[key], uses[key]
                continue
            found.append((owner, expert))
            self._stay += _EWMA_WEIGHT * (min(step - order[key], _LONGEST) - self._stay)
            if len(found) == places:
                break
        return found

    def evicting(self, dead: list[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
        """Iterates over `dead` for a target, and counts every item it consumes as evicted."""
        for layer, expert in dead:
            key = layer * self._stride + expert
            self._recently_evicted[key] = step
            self._evicted += 1
            self._order[self._pools[layer]].pop(key, None)
            self._uses.pop(key, None)
            if self._evicted > _MEMORY:
                self._evicted, self._evicted_then_used = self._evicted / 2, self._evicted_then_used / 2
            yield layer, expert


def _pop_recent(since: dict[int, int], first: int, experts: Sequence[int], not_before: float) -> int:
    """Removes these experts from `since`; returns how many were recorded at or after `not_before`."""
    count = 0
    for expert in experts:
        begun = since.pop(first + expert, None)
        count += begun is not None and begun >= not_before
    return count
