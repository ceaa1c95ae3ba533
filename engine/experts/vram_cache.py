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
from dataclasses import dataclass, field

from engine.common.errors import EngineError
from engine.common.footprint import pool_segment_slots, pool_segments
from engine.devices.device import Device, Event
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Slot
from engine.experts.cache.tier import ADAPTIVE, CacheSnapshot, Copy, Purpose, Tier, TierCounters
from engine.experts.record import RecordLayout
from engine.experts.record_source import Held, RecordSource
from engine.experts.slot_segments import DeviceSlots, KernelMaker, Segment, Staging
from engine.kernels.interface import ExpertKernel

_log = logging.getLogger(__name__)


@dataclass
class VramCounters(TierCounters):
    """What the cache has done.  Once a step has ended well, lookups = hits + misses and misses = on_cpu + fetched.

    Prefills are counted apart: they use the cache as it is and leave no trace in it.

    Attributes:
        on_cpu, fetched: how misses were met, of which some were `late`.
        hits_on_cpu: hits that the CPU computed all the same, because that was done sooner.
        recomputed: experts that the CPU computed because their copy had failed; they count as on_cpu.
        fetched_bytes: that crossed the link to be computed at once, whether they were kept or not.
        prefill_lookups, prefill_hits, prefill_on_cpu, prefill_fetched: the same for experts of prefills.
    """

    lookups: int = 0
    on_cpu: int = 0
    fetched: int = 0
    hits_on_cpu: int = 0
    recomputed: int = 0
    fetched_bytes: int = 0
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
        self.device, self.layout = device, layout
        self.counters = VramCounters()
        self.note: str | None = None
        self._layers, self._experts, self._most_in_flight = layers, experts, most_in_flight
        self._ways = None if ways is None else max(1, min(ways, experts))
        self._memory = DeviceSlots(device, layout, pool_segment_slots(slots, layers * experts, self._ways), layers)
        self._tier = Tier(self._memory, layers, experts, layout.nbytes, policy, popularity, seed, self.counters)
        if self._ways is None:
            self._tier.open_pool(range(layers), range(0), max(1, min(slots, layers * experts)))
        self._lock = threading.RLock()
        self.staging = self._open_staging(staging)
        try:
            wanted = self._segments_for(slots)
            self._say(self._grow(wanted), f"keeps {self.slots} of {wanted * self._memory.segment_slots} experts")
            self._tier.renew_sampler()
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        """How many there are now."""
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """Device memory of the slots, without staging."""
        return self.slots * self.layout.nbytes

    @property
    def policy(self) -> str:
        """Name of the policy that decides now."""
        return self._tier.policy

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the copies into slots that have not ended."""
        return self._tier.backlog_bytes

    @property
    def layer_numbers(self) -> list[int]:
        """Of its layers in the decoder, for a timeline; whoever knows them writes them in."""
        return self._memory.layer_numbers

    def key_of(self, layer: int, expert: int) -> Key:
        """The cache's name of an expert."""
        return self._tier.key_of(layer, expert)

    def residents(self, layer: int) -> dict[int, Slot]:
        """A layer's experts that are there now; they may leave at any time."""
        with self._lock:
            self._settle()
            return self._tier.residents(layer)

    def snapshot(self) -> CacheSnapshot:
        """Everything in it, at one moment."""
        with self._lock:
            self._settle()
            return self._tier.snapshot()

    def free_slots(self, layer: int) -> int:
        """Slots for a layer's experts with nobody in them or on the way to them."""
        with self._lock:
            self._settle()
            return self._tier.pool_of[layer].free

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither there nor on their way.  Counts as no use."""
        with self._lock:
            return self._tier.absent(layer, experts)

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        """The kernel that computes the experts in all slots, while some of them are pinned."""
        with self._lock:
            return self._memory.kernel(make)

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a pinned slot, and which of its records it is."""
        return self._memory.locate(slot)

    def acquire(self, layer: int, experts: Sequence[int]) -> Lookup:
        """Looks up the distinct experts that a layer needs now, and pins the hits.

        Raises:
            EngineError: the device is past help.
        """
        tier, counters, lookup = self._tier, self.counters, Lookup(layer)
        with self._lock:
            self._make_room()
            first = layer * self._experts
            keys = [first + expert for expert in experts]
            if tier.sampler is not None:
                tier.observe(layer, keys)
            hits, misses, arriving = lookup.hits, lookup.misses, tier.pool_of[layer].arriving
            for expert, slot in zip(experts, tier.look_up(layer, keys), strict=True):
                if slot is not None:
                    hits[expert] = slot
                    continue
                misses.append(expert)
                if first + expert in arriving:
                    lookup.late.add(expert)
            counters.lookups += len(keys)
            counters.hits += len(hits)
            counters.misses += len(misses)
            counters.late += len(lookup.late)
            return lookup

    def hold(self, layer: int, experts: Sequence[int]) -> Lookup:
        """As `acquire`, for a prefill: the cache stays as it is, and what it would keep is decided as before."""
        with self._lock:
            self._make_room()
            hits = self._tier.hold(layer, experts)
            self.counters.prefill_lookups += len(experts)
            self.counters.prefill_hits += len(hits)
            return Lookup(layer, hits, [expert for expert in experts if expert not in hits], is_use=False)

    def release(self, lookup: Lookup, last_use: Event | None = None) -> None:
        """Unpins the hits, and what was taken in.  Harmless if repeated.

        Args:
            last_use: on the compute stream, the end of all work on slots so far; no slot is written to before.
        """
        with self._lock:
            if last_use is not None:
                self._memory.not_before(last_use)
            self._tier.release(lookup.layer, lookup.hits)
            if lookup.taken_in:
                self._tier.release(lookup.layer, lookup.taken_in)
            lookup.hits, lookup.taken_in = {}, []

    def take_in(self, lookup: Lookup, expert: int, held: Held) -> tuple[Slot, Event] | None:
        """Begins to copy a miss to a slot where it can be computed as soon as the event is done, and then stays.

        Returns:
            None if the policy does not admit it: it is to be computed somewhere else.
        """
        with self._lock:
            copy = self._tier.bring(lookup.layer, expert, held, Purpose.FETCH)
            if copy is None:
                return None
            copy.pool.pin(copy.key)
            lookup.taken_in.append(expert)
            return copy.slot, copy.handle

    def post_fetch(self, layer: int, experts: Sequence[int], held: Held, most: int | None = None) -> int:
        """Begins to copy experts that may be needed again, as far as the policy admits them.

        Args:
            held: has them in RAM.
            most: copies that may be begun.

        Returns:
            How many were.
        """
        begun, tier = 0, self._tier
        with self._lock:
            self._settle()
            for expert in experts:
                if len(tier.copies) >= self._most_in_flight or begun == most:
                    break
                begun += tier.bring(layer, expert, held, Purpose.POST_FETCH) is not None
        return begun

    def prefetch(self, layer: int, expert: int, source: RecordSource, dead: Iterable[tuple[int, int]] = ()) -> bool:
        """Begins to copy an absent expert that may be wanted, where that costs nobody a place and it is in RAM.

        Args:
            dead: (layer, expert) pairs that are not expected to be wanted, of which one may leave for it.
        """
        tier = self._tier
        with self._lock:
            self._settle()
            if not tier.absent(layer, [expert]):
                return False
            if len(tier.copies) >= self._most_in_flight or source.lendable <= 0:
                return False
            held = source.hold_present([expert])
            try:
                return expert in held.rows and tier.prefetch(layer, expert, held, dead) is not None
            finally:
                held.release()

    def count_served(
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
            taken_back = 0
            for copy in self._tier.copies.values():
                if copy.purpose is not Purpose.FETCH and not copy.cancelled and copy.handle.cancel():
                    copy.cancelled = True
                    taken_back += 1
            self._settle()
            return taken_back

    def wait(self) -> None:
        """Returns when nothing is in flight."""
        with self._lock:
            for copy in self._tier.copies.values():
                with contextlib.suppress(EngineError):
                    copy.handle.wait()
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
            if wanted < len(self._memory.segments):
                self.cancel()
                self.wait()
                # What was released may still be read by kernels that the card has been given.
                self.device.compute_stream.synchronize()
                self._shrink(wanted)
            else:
                self._grow(wanted)
            self._tier.renew_sampler()
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
            self._memory.not_before(None)
            if self.staging is not None:
                self.staging.forget_uses()
            self.wait()

    def close(self) -> None:
        """Gives all memory back, when what is in flight has ended.  Harmless if repeated."""
        with self._lock:
            self.cancel()
            for copy in list(self._tier.copies.values()):  # the device may have failed or been closed
                with contextlib.suppress(EngineError):
                    copy.handle.wait()
                self._end(copy)
            with contextlib.suppress(EngineError):
                self.device.compute_stream.synchronize()
            while self._tier.pools:
                self._tier.close_pool()
            while self._memory.segments:
                self._memory.drop()
            if self.staging is not None:
                self.staging.segment.release()
                self.staging = None

    def _segments_for(self, slots: int) -> int:
        """How many pieces of memory hold at most so many slots, where all of them are of use."""
        most = self._layers * self._experts
        return pool_segments(slots, self._memory.segment_slots, self._layers, most, self._ways)

    def _grow(self, segments: int) -> DeviceMemoryError | None:
        """Adds pieces until there are so many, or until the device refuses one: then why."""
        try:
            while (count := len(self._memory.segments)) < segments:
                slots = self._memory.add().slots
                if self._ways is None:
                    self._tier.pools[0].grow(list(reversed(slots)))
                else:
                    self._tier.open_pool([count], slots, self._ways)
        except DeviceMemoryError as error:
            return error
        return None

    def _shrink(self, segments: int) -> None:
        """Gives up pieces from the end until there are so many, or one of them is in use.

        Nothing may compute from them: what a pool calls free may still be read by work that was submitted.
        """
        while len(self._memory.segments) > segments:
            if not self._tier.pools[-1].withdraw(self._memory.segments[-1].slots):
                break
            if self._ways is not None:
                self._tier.close_pool()
            self._memory.drop()

    def _settle(self) -> None:
        """Takes note of copies that have ended."""
        copies = self._tier.copies
        if not copies:
            return
        stream = self.device.h2d_stream
        if stream.failure is not None:
            # A copy has failed, and with it all behind it.  Whoever computes from one hears of it by its event.
            _log.warning("experts could not be copied to %s: %s", self.device.name, stream.failure)
            stream.recover()
        while copies and (first := next(iter(copies.values()))).handle.done():
            self._end(first)

    def _end(self, copy: Copy[Event]) -> None:
        self._tier.end(copy, succeeded=copy.handle.done() and copy.handle.failure is None)

    def _make_room(self) -> None:
        """Takes note of what has happened since the last step: copies that ended, memory that others took."""
        if self._tier.copies:
            self._settle()
        excess = self.device.memory.excess
        if excess and self._memory.segments:
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


@dataclass(frozen=True)
class Place:
    """Where a layer of the model is kept: its number in the cache of its device, and its records."""

    cache: VramCache
    layer: int
    source: RecordSource


class VramPrefetch:
    """An `engine.experts.prediction.target.PrefetchTarget` over the caches of all devices.

    Args:
        places: of each layer of the model that has experts, in their order: its numbers are what callers give.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._caches = list({id(place.cache): place.cache for place in places}.values())

    @property
    def backlog_bytes(self) -> int:
        """On its way to any device."""
        return sum(cache.backlog_bytes for cache in self._caches)

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither on the layer's device nor on their way, in the same order."""
        place = self._places[layer]
        return place.cache.absent(place.layer, experts)

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Begins to bring experts, in this order, as far as that costs nobody a place who is not dead.

        One that is on disk is read into RAM, and comes to the device when it is asked for again.

        Args:
            dead: (layer, expert) pairs that may leave for them.

        Returns:
            How many have been begun: the first ones of those that were absent.
        """
        place, begun = self._places[layer], 0
        dying = iter(dead)
        ours = (
            (there.layer, expert) for number, expert in dying if (there := self._places[number]).cache is place.cache
        )
        for expert in self.absent(layer, dict.fromkeys(experts)):
            if not (place.cache.prefetch(place.layer, expert, place.source, ours) or place.source.prefetch([expert])):
                break
            begun += 1
        return begun
