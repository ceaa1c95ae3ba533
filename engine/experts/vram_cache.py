"""The expert cache of one device: slots in its memory over records in RAM.

A miss is not waited for: it is computed elsewhere, and its weights are post-fetched in the background (CPU-GPU
Collaborative, section III).  An expert in use or in flight is never evicted, and one in flight is not a hit before
its copy's event is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.errors import EngineError
from engine.experts.bank import BankLayer
from engine.experts.cache.policies import Key, make_policy
from engine.experts.cache.pool import Pool, Slot
from engine.experts.policy_sampling import PolicySampler
from engine.experts.record import RecordLayout
from engine.experts.slot_segments import Segment, Staging

_log = logging.getLogger(__name__)

ADAPTIVE = "auto"
"""Name of the choice among the policies by what each would have hit."""
SEGMENTS = 8
"""Pieces of a global pool: few, because a kernel runs once for each piece that has a hit."""


@dataclass
class VramCounters:
    """What the cache has done.  lookups = hits + misses; misses = on_cpu + fetched once a step has ended well.

    Attributes:
        late: misses whose copy was already on its way.
        on_cpu, fetched: how misses were met.
        evictions: experts that left for others or for a smaller cache.
        post_fetches: experts that arrived over the link for later; kept: that were copied from staging.
        failures, cancelled: copies into slots that ended so.
        fetched_bytes, post_fetched_bytes: that crossed the link to be computed at once, and for later.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    on_cpu: int = 0
    fetched: int = 0
    evictions: int = 0
    post_fetches: int = 0
    kept: int = 0
    failures: int = 0
    cancelled: int = 0
    fetched_bytes: int = 0
    post_fetched_bytes: int = 0


@dataclass
class Lookup:
    """One layer's experts of one step.

    Attributes:
        hits: expert -> its slot, pinned until `VramCache.release`.
        misses: the others, in the order asked for; late: those of them that are on their way.
    """

    layer: int
    hits: dict[int, Slot] = field(default_factory=dict)
    misses: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)


@dataclass
class _Flight:
    """A copy into a reserved slot."""

    key: Key
    pool: Pool
    event: Event
    direction: Direction
    cancelled: bool = False


class VramCache:
    """Slots for the experts of `layers` layers whose records have one layout.  Safe to use from several threads.

    Args:
        slots: as many as there should be; fewer if they do not divide evenly, see `slots`.
        ways: slots of each layer: then the first slots // ways layers have some and the others none (N indexes of M
            ways).  None: all layers share one pool.
        policy: of `engine.experts.cache.policies`, or `auto`.
        popularity: uses of each `key_of(layer, expert)` in a calibration, for the static policy.
        staging: slots apart for experts that are fetched to be computed at once.
        most_in_flight: copies for later are not begun while so many are under way: later needs would wait for them.

    Raises:
        DeviceMemoryError: the device has not so much memory left.
    """

    def __init__(
        self,
        device: Device,
        layout: RecordLayout,
        *,
        layers: int,
        experts: int,
        slots: int,
        ways: int | None = None,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        seed: int = 0,
        staging: int = 3,
        most_in_flight: int = 8,
    ) -> None:
        self.device = device
        self.layout = layout
        self.most_in_flight = most_in_flight
        self.counters = VramCounters()
        self._layers, self._experts = layers, experts
        self._ways = None if ways is None else max(1, min(ways, experts))
        self._is_adaptive = policy == ADAPTIVE
        self._policy = "lru" if self._is_adaptive else policy
        self._popularity, self._seed = popularity, seed
        most = layers * experts
        # Not one: kernels may compute a layer of one expert in another way, and so differ from the CPU in the last bit.
        self._segment_slots = self._ways or max(min(2, slots, most), 1, -(-min(slots, most) // SEGMENTS))
        self._segments: list[Segment] = []
        self._pools: list[Pool] = [] if self._ways else [self._new_pool(range(0))]
        self._flights: tuple[deque[_Flight], deque[_Flight]] = deque(), deque()  # over the link, from staging
        self._last_use: Event | None = None
        self._lock = threading.RLock()
        self._sampler: PolicySampler | None = None
        self.staging = Staging(device, layout, staging) if staging else None
        try:
            self._grow(self._segments_for(slots))
        except BaseException:
            self.close()
            raise
        self._renew_sampler()

    @property
    def slots(self) -> int:
        """How many there are now."""
        return len(self._segments) * self._segment_slots

    @property
    def nbytes(self) -> int:
        """Device memory of the slots, without staging."""
        return self.slots * self.layout.nbytes

    @property
    def policy(self) -> str:
        """Name of the policy that decides now."""
        return self._policy

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the copies over the link that have not ended."""
        return len(self._flights[0]) * self.layout.nbytes

    def key_of(self, layer: int, expert: int) -> Key:
        """The cache's name of an expert."""
        return layer * self._experts + expert

    def residents(self, layer: int) -> dict[int, Slot]:
        """A layer's experts that are there now; they may leave at any time."""
        first = self.key_of(layer, 0)
        with self._lock:
            self._settle()
            pool = self._pool(layer)
            return {key - first: slot for key, slot in pool.residents.items() if 0 <= key - first < self._experts}

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a pinned slot, and which of its records it is."""
        segment = self._segments[slot // self._segment_slots]
        return segment, slot % self._segment_slots

    def acquire(self, layer: int, experts: Sequence[int]) -> Lookup:
        """Looks up the distinct experts that a layer needs now, and pins the hits.

        Raises:
            EngineError: the device is past help.
        """
        with self._lock:
            self._settle()
            keys = [self.key_of(layer, expert) for expert in experts]
            if self._sampler is not None and (name := self._sampler.observe(layer, keys)) is not None:
                self._adopt(name)
            pool, lookup, counters = self._pool(layer), Lookup(layer), self.counters
            for expert, key in zip(experts, keys, strict=True):
                slot = pool.use(key)
                if slot is not None:
                    pool.pin(key)
                    lookup.hits[expert] = slot
                    continue
                lookup.misses.append(expert)
                if key in pool.arriving:
                    lookup.late.add(expert)
            counters.lookups += len(keys)
            counters.hits += len(lookup.hits)
            counters.misses += len(lookup.misses)
            counters.late += len(lookup.late)
            return lookup

    def release(self, lookup: Lookup, last_use: Event | None = None) -> None:
        """Unpins the hits.  Harmless if repeated.

        Args:
            last_use: on the compute stream, the end of all work on slots so far; no slot is written to before.
        """
        with self._lock:
            if last_use is not None:
                self._last_use = last_use
            pool = self._pool(lookup.layer)
            for expert in lookup.hits:
                pool.unpin(self.key_of(lookup.layer, expert))
            lookup.hits = {}

    def count_met(self, on_cpu: int, fetched: int) -> None:
        """Misses of a step that ended well."""
        with self._lock:
            self.counters.on_cpu += on_cpu
            self.counters.fetched += fetched
            self.counters.fetched_bytes += fetched * self.layout.nbytes

    def post_fetch(self, layer: int, experts: Sequence[int], source: BankLayer, last_use: Event | None = None) -> int:
        """Begins to copy experts that may be needed again, as far as the policy admits them.

        Args:
            source: the layer's records in RAM; they must stay as they are until the copies have ended.
            last_use: as for `release`.

        Returns:
            How many copies were begun.
        """
        stream, begun = self.device.h2d_stream, 0
        with self._lock:
            self._settle()
            self._last_use = last_use or self._last_use
            for expert in experts:
                if len(self._flights[0]) >= self.most_in_flight:
                    break
                target = self._reserve(layer, expert)
                if target is None:
                    continue
                if self._last_use is not None:
                    stream.wait(self._last_use)
                    self._last_use = None  # what comes after waits behind it all the same
                self._fly(layer, expert, target, source.records[expert], Direction.H2D)
                begun += 1
        return begun

    def keep(self, layer: int, expert: int, staged: torch.Tensor) -> Event | None:
        """Copies an expert that was fetched to be computed at once into a slot, if the policy admits it.

        Returns:
            The end of the copy: until then its staging slot must stay as it is.
        """
        with self._lock:
            target = self._reserve(layer, expert)
            if target is None:
                return None
            return self._fly(layer, expert, target, staged, Direction.D2D)

    def cancel(self) -> int:
        """Takes back copies for later that have not begun; how many."""
        with self._lock:
            for flight in self._flights[0]:
                flight.cancelled = flight.cancelled or flight.event.cancel()
            taken_back = sum(flight.cancelled for flight in self._flights[0])
            self._settle()
            return taken_back

    def wait(self) -> None:
        """Returns when nothing is in flight."""
        with self._lock:
            for flight in [*self._flights[0], *self._flights[1]]:
                with contextlib.suppress(EngineError):
                    flight.event.wait()
            self._settle()

    def resize(self, slots: int) -> int:
        """Gives memory back, for example for a longer KV cache, or takes more.  Experts in other slots stay.

        Returns:
            How many slots there are now: more than asked for while one that should go is in use, fewer if memory is
            short.

        Raises:
            EngineError: the compute stream has failed, so nobody knows what is in use.
        """
        with self._lock:
            wanted = self._segments_for(slots)
            if wanted < len(self._segments):
                self._shrink(wanted)
            else:
                with contextlib.suppress(DeviceMemoryError):
                    self._grow(wanted)
            self._renew_sampler()
            return self.slots

    def forget_uses(self) -> None:
        """After a failed step whose streams have recovered: nothing is in flight on them any more."""
        with self._lock:
            self._last_use = None
            if self.staging is not None:
                self.staging.forget_uses()
            self.wait()

    def close(self) -> None:
        """Gives all memory back, when what is in flight has ended.  Harmless if repeated."""
        with self._lock:
            self._drain()
            with contextlib.suppress(EngineError):
                self.device.compute_stream.synchronize()
            for segment in self._segments:
                segment.release()
            self._segments = []
            self._pools = [] if self._ways else [self._new_pool(range(0))]
            if self.staging is not None:
                self.staging.segment.release()
                self.staging = None

    def _drain(self) -> None:
        """Ends what is in flight, on a device that may have failed or been closed."""
        for flight in self._flights[0]:
            flight.cancelled = flight.cancelled or flight.event.cancel()
        for flights in self._flights:
            while flights:
                with contextlib.suppress(EngineError):
                    flights[0].event.wait()
                self._end(flights.popleft())

    def _pool(self, layer: int) -> Pool:
        if self._ways is None:
            return self._pools[0]
        return self._pools[layer] if layer < len(self._pools) else _NO_SLOTS

    def _reserve(self, layer: int, expert: int) -> torch.Tensor | None:
        """The record to copy an absent expert to, if it gets one."""
        pool, key = self._pool(layer), self.key_of(layer, expert)
        if pool.capacity == 0 or key in pool.residents or key in pool.arriving:
            return None
        placement = pool.reserve(key)
        if placement is None:
            return None
        self.counters.evictions += placement.evicted is not None
        segment, row = self.locate(placement.slot)
        return segment.records.records[row]

    def _fly(self, layer: int, expert: int, target: torch.Tensor, source: torch.Tensor, direction: Direction) -> Event:
        """Begins the copy into a reserved slot."""
        over_link = direction is Direction.H2D
        stream = self.device.h2d_stream if over_link else self.device.compute_stream
        pool, key = self._pool(layer), self.key_of(layer, expert)
        try:
            event = stream.copy(target, source, direction=direction)
        except BaseException:
            pool.abandon(key)
            raise
        self._flights[0 if over_link else 1].append(_Flight(key, pool, event, direction))
        return event

    def _settle(self) -> None:
        """Takes note of copies that have ended."""
        stream = self.device.h2d_stream
        if self._flights[0] and stream.failure is not None:
            # A copy for later has failed, and with it all behind it: nobody waits for them, so it is only counted.
            _log.warning("experts could not be copied to %s: %s", self.device.name, stream.failure)
            stream.recover()
        for flights in self._flights:
            while flights and flights[0].event.done():
                self._end(flights.popleft())

    def _end(self, flight: _Flight) -> None:
        counters = self.counters
        if flight.event.done() and flight.event.failure is None:
            flight.pool.arrived(flight.key)
            if flight.direction is Direction.H2D:
                counters.post_fetches += 1
                counters.post_fetched_bytes += self.layout.nbytes
            else:
                counters.kept += 1
            return
        flight.pool.abandon(flight.key)
        counters.cancelled += flight.cancelled
        counters.failures += not flight.cancelled

    def _segments_for(self, slots: int) -> int:
        most = self._layers * self._experts
        if self._ways is not None:
            return min(max(slots, 0) // self._ways, self._layers)
        return min(max(slots, 0), most + self._segment_slots - 1) // self._segment_slots

    def _grow(self, segments: int) -> None:
        for index in range(len(self._segments), segments):
            size = self._segment_slots
            segment = Segment(self.device, self.layout, size, index * size, MemoryCategory.EXPERTS)
            self._segments.append(segment)
            if self._ways is None:
                self._pools[0].grow(list(reversed(segment.slots)))
            else:
                self._pools.append(self._new_pool(segment.slots))

    def _shrink(self, segments: int) -> None:
        """Gives up segments from the end, until one of them is in use."""
        for flight in self._flights[0]:
            flight.cancelled = flight.cancelled or flight.event.cancel()
        self.wait()
        # What was released may still be read by kernels that the card has been given.
        self.device.compute_stream.synchronize()
        while len(self._segments) > segments:
            segment = self._segments[-1]
            pool = self._pools[-1]
            before = len(pool.residents)
            if not pool.withdraw(segment.slots):
                return
            self.counters.evictions += before - len(pool.residents)
            if self._ways is not None:
                self._pools.pop()
            self._segments.pop().release()

    def _new_pool(self, slots: range) -> Pool:
        return Pool(slots, make_policy(self._policy, len(slots), self._popularity, self._seed))

    def _adopt(self, name: str) -> None:
        self._policy = name
        for pool in self._pools:
            pool.adopt(make_policy(name, pool.capacity, self._popularity, self._seed))

    def _renew_sampler(self) -> None:
        """Shadows have the size of the cache."""
        if not self._is_adaptive or not self._segments:
            self._sampler = None
            return
        layers = len(self._segments) if self._ways is not None else self._layers
        self._sampler = PolicySampler(layers, self.slots, self._ways, self._popularity, self._policy)


_NO_SLOTS = Pool(range(0), make_policy("lru", 0))
