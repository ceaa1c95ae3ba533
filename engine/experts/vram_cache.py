"""The expert cache of one device: slots in its memory over records in RAM.

A miss is not waited for: it is computed elsewhere, and its weights are post-fetched in the background (CPU-GPU
Collaborative, section III).  An expert in use or in flight is never evicted, and one in flight is not a hit before
its copy's event is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from engine.common.errors import EngineError
from engine.devices.device import Device, Event
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Slot
from engine.experts.cache.snapshot import CacheSnapshot
from engine.experts.flights import Flights
from engine.experts.lookup import Lookup, VramCounters
from engine.experts.policy_sampling import PolicySampler
from engine.experts.record import RecordLayout
from engine.experts.slot_arrivals import SlotArrivals
from engine.experts.slot_pools import SlotPools
from engine.experts.slot_segments import KernelMaker, Segment, Staging
from engine.kernels.interface import ExpertKernel

_log = logging.getLogger(__name__)

ADAPTIVE = "auto"
"""Name of the choice among the policies by what each would have hit."""


class VramCache:
    """Slots for the experts of `layers` layers whose records have one layout.  Safe to use from several threads.

    Where the device refuses memory there are fewer slots, and `note` says so.

    Args:
        slots: as many as there should be; fewer if they do not divide evenly, see `slots`.
        ways: slots of each layer: then the first slots // ways layers have some and the others none (N indexes of M
            ways).  None: all layers share one pool.
        policy: of `engine.experts.cache.policies`, or `auto`.
        popularity: uses of each `key_of(layer, expert)` in a calibration, for the static policy.
        staging: slots apart for experts that are fetched to be computed at once; they are allocated first.
        most_in_flight: copies for later are not begun while so many are under way: later needs would wait for them.
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
        self.counters = VramCounters()
        self.note: str | None = None
        self.layer_numbers = list(range(layers))
        """Of its layers in the decoder, for a timeline."""
        self._experts = experts
        self._is_adaptive = policy == ADAPTIVE
        self._popularity = popularity
        first = "lru" if self._is_adaptive else policy
        self._pools = SlotPools(device, layout, layers, experts, slots, ways, first, popularity, seed)
        self._flights = Flights(device, layout.nbytes, self.counters, self._name_of)
        self._lock = threading.RLock()
        self.arrivals = SlotArrivals(self._pools, self._flights, experts, self._lock, most_in_flight)
        self._sampler: PolicySampler | None = None
        self.staging = self._open_staging(staging)
        try:
            wanted = self._pools.segments_for(slots)
            self._say(self._pools.grow(wanted), f"keeps {self.slots} of {wanted * self._pools.segment_slots} experts")
            self._renew_sampler()
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """How many there are now."""
        return self._pools.slots

    @property
    def nbytes(self) -> int:
        """Device memory of the slots, without staging."""
        return self.slots * self.layout.nbytes

    @property
    def policy(self) -> str:
        """Name of the policy that decides now."""
        return self._pools.policy

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the copies into slots that have not ended."""
        return len(self._flights) * self.layout.nbytes

    def key_of(self, layer: int, expert: int) -> Key:
        """The cache's name of an expert."""
        return layer * self._experts + expert

    def residents(self, layer: int) -> dict[int, Slot]:
        """A layer's experts that are there now; they may leave at any time."""
        first = self.key_of(layer, 0)
        with self._lock:
            self._flights.settle()
            pool = self._pools.of(layer)
            return {key - first: slot for key, slot in pool.residents.items() if 0 <= key - first < self._experts}

    def snapshot(self) -> CacheSnapshot:
        """Everything in it, at one moment."""
        with self._lock:
            self._flights.settle()
            shadows = self._sampler.hit_rates() if self._sampler is not None else {}
            return CacheSnapshot(*self._pools.keys, self.slots, self.policy, self._is_adaptive, shadows)

    def free_slots(self, layer: int) -> int:
        """Slots for a layer's experts with nobody in them or on the way to them."""
        with self._lock:
            self._flights.settle()
            pool = self._pools.of(layer)
            return pool.capacity - len(pool.residents) - len(pool.arriving)

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither there nor on their way.  Counts as no use."""
        first = self.key_of(layer, 0)
        with self._lock:
            pool = self._pools.of(layer)
            there, arriving = pool.residents, pool.arriving
            return [one for one in experts if first + one not in there and first + one not in arriving]

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        """The kernel that computes the experts in all slots, while some of them are pinned."""
        with self._lock:
            return self._pools.kernel(make)

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a pinned slot, and which of its records it is."""
        return self._pools.locate(slot)

    def acquire(self, layer: int, experts: Sequence[int]) -> Lookup:
        """Looks up the distinct experts that a layer needs now, and pins the hits.

        Raises:
            EngineError: the device is past help.
        """
        with self._lock:
            self._settle()
            first = layer * self._experts
            keys = [first + expert for expert in experts]
            if self._sampler is not None and (name := self._sampler.observe(layer, keys)) is not None:
                self._pools.adopt(name)
            pool, lookup, foretold = self._pools.of(layer), Lookup(layer), self._flights.foretold
            hits, misses, arriving = lookup.hits, lookup.misses, pool.arriving
            for expert, key, slot in zip(experts, keys, pool.use_all(keys), strict=True):
                if slot is None:
                    misses.append(expert)
                    if key in arriving:
                        lookup.late.add(expert)
                    continue
                hits[expert] = slot
                if foretold and key in foretold:
                    foretold.discard(key)
                    self.counters.prefetches_used += 1
            counters = self.counters
            counters.lookups += len(keys)
            counters.hits += len(hits)
            counters.misses += len(misses)
            counters.late += len(lookup.late)
            return lookup

    def hold(self, layer: int, experts: Sequence[int]) -> Lookup:
        """As `acquire`, for a prefill: the cache stays as it is, and what it would keep is decided as before."""
        with self._lock:
            self._settle()
            first, pool, lookup = layer * self._experts, self._pools.of(layer), Lookup(layer, is_use=False)
            for expert in experts:
                slot = pool.residents.get(first + expert)
                if slot is None:
                    lookup.misses.append(expert)
                else:
                    pool.pin(first + expert)
                    lookup.hits[expert] = slot
            self.counters.prefill_lookups += len(experts)
            self.counters.prefill_hits += len(lookup.hits)
            return lookup

    def release(self, lookup: Lookup, last_use: Event | None = None) -> None:
        """Unpins the hits, and what was taken in.  Harmless if repeated.

        Args:
            last_use: on the compute stream, the end of all work on slots so far; no slot is written to before.
        """
        with self._lock:
            if last_use is not None:
                self._flights.not_before(last_use)
            pool, first = self._pools.of(lookup.layer), lookup.layer * self._experts
            for expert in lookup.hits:
                pool.unpin(first + expert)
            for expert in lookup.taken_in:
                pool.unpin(first + expert)
            lookup.hits, lookup.taken_in = {}, []

    def count_met(
        self, lookup: Lookup, on_cpu: int, fetched: int, *, recomputed: int = 0, hits_on_cpu: int = 0
    ) -> None:
        """How the misses of a step that ended well were met, and hits that were not made use of."""
        with self._lock:
            counters = self.counters
            if lookup.is_use:
                counters.on_cpu += on_cpu
                counters.fetched += fetched
            else:
                counters.prefill_on_cpu += on_cpu
                counters.prefill_fetched += fetched
            counters.recomputed += recomputed
            counters.hits_on_cpu += hits_on_cpu
            counters.fetched_bytes += fetched * self.layout.nbytes

    def cancel(self) -> int:
        """Takes back copies for later that have not begun; how many."""
        with self._lock:
            taken_back = self._flights.cancel()
            self._flights.settle()
            return taken_back

    def wait(self) -> None:
        """Returns when nothing is in flight."""
        with self._lock:
            self._flights.wait()

    def resize(self, slots: int) -> int:
        """Gives memory back, for example for a longer KV cache, or takes more.  Experts in other slots stay.

        Returns:
            How many slots there are now: more than asked for while one that should go is in use, fewer if memory is
            short.

        Raises:
            EngineError: the compute stream has failed, so nobody knows what is in use.
        """
        with self._lock:
            wanted = self._pools.segments_for(slots)
            if wanted < len(self._pools.segments):
                self._flights.cancel()
                self._flights.wait()
                # What was released may still be read by kernels that the card has been given.
                self.device.compute_stream.synchronize()
                for key in self._pools.shrink(wanted):
                    self._flights.evicted(key)
            else:
                self._pools.grow(wanted)
            self._renew_sampler()
            return self.slots

    def give_back(self, nbytes: int) -> int:
        """Makes the cache smaller by at least so many bytes, as far as it has them; how many it has given."""
        with self._lock:
            before = self.nbytes
            self.resize(self.slots - -(-nbytes // self.layout.nbytes))
            return before - self.nbytes

    def forget_uses(self) -> None:
        """After a failed step whose streams have recovered: nothing is in flight on them any more."""
        with self._lock:
            self._flights.not_before(None)
            if self.staging is not None:
                self.staging.forget_uses()
            self._flights.wait()

    def close(self) -> None:
        """Gives all memory back, when what is in flight has ended.  Harmless if repeated."""
        with self._lock:
            self._flights.drain()
            with contextlib.suppress(EngineError):
                self.device.compute_stream.synchronize()
            self._pools.close()
            if self.staging is not None:
                self.staging.segment.release()
                self.staging = None

    def _name_of(self, key: Key) -> tuple[int, int]:
        layer, expert = divmod(key, self._experts)
        return self.layer_numbers[layer], expert

    def _settle(self) -> None:
        """Takes note of what has happened since the last step: copies that ended, memory that others took."""
        self._flights.settle()
        excess = self.device.memory.excess
        if excess and self._pools.segments:
            given = self.give_back(excess)
            self._say(None if not given else "others need its memory.", f"keeps {self.slots} experts from now on")

    def _open_staging(self, count: int) -> Staging | None:
        for slots in range(count, 0, -1):
            try:
                return Staging(self.device, self.layout, slots)
            except DeviceMemoryError as error:
                self._say(error, f"has {slots - 1} places for experts that are fetched")
        return None

    def _say(self, why: object, what: str) -> None:
        if why is not None:
            self.note = f"{self.device.name} {what}: {why}"
            _log.warning("%s", self.note)

    def _renew_sampler(self) -> None:
        """Shadows have the size of the cache."""
        pools = self._pools
        if not self._is_adaptive or not pools.segments:
            self._sampler = None
            return
        self._sampler = PolicySampler(pools.layers, pools.slots, pools.ways, self._popularity, pools.policy)
