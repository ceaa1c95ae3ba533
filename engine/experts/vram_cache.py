"""The expert cache of one device: slots in its memory over records in RAM.

A step does not wait for a miss: it is computed elsewhere, and its weights are post-fetched in the background (CPU-GPU
Collaborative, section III).  Experts that are pinned or in flight are never evicted, and one in flight is not a hit
until its copy's event is done.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from engine.common.errors import EngineError
from engine.common.footprint import SEGMENTS, pool_segment_slots, pool_segments
from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.cache.policies import Key, Slot
from engine.experts.cache.tier import ADAPTIVE, CacheSnapshot, Copy, Purpose, Tier, TierCounters
from engine.experts.record_source import Held, RecordSource
from engine.formats.tiles import RecordLayout
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.telemetry import lanes

KernelMaker = Callable[[LayerRecords], ExpertKernel]
"""Binds a kernel to records.  Layers that compute alike share one, and with it the kernel's cached state."""


class Segment:
    """Slots in one block of memory, which kernels index like the experts of a layer."""

    def __init__(self, device: Device, layout: RecordLayout, count: int, first: int, category: MemoryCategory) -> None:
        self._device = device
        memory = device.memory.allocate(count * layout.nbytes, category)
        self._memory = memory
        self.slots = range(first, first + count)
        self.records = LayerRecords("slots", layout, memory.view(count, layout.nbytes))
        self._kernels: dict[KernelMaker, ExpertKernel] = {}

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        kernel = self._kernels.get(make)
        if kernel is None:
            kernel = self._kernels[make] = make(self.records)
        return kernel

    def release(self) -> None:
        self._kernels.clear()
        self.records.forget()
        self._device.memory.release(self._memory)
        del self._memory, self.records


class DeviceSlots:
    """Slots in segments of equal size, and the `Copier` over the link to them.  Not thread-safe.

    Attributes:
        layer_numbers: decoder layer of each of its layers, for the timeline.
        addresses: where each slot's record begins; another list once segments have come or gone.
    """

    def __init__(self, device: Device, layout: RecordLayout, segment_slots: int, layers: int) -> None:
        self.device, self.layout, self.segment_slots = device, layout, segment_slots
        self.segments: list[Segment] = []
        self.addresses: list[int] = []
        self.layer_numbers = list(range(layers))
        self._kernels: dict[KernelMaker, ExpertKernel] = {}
        self._last_use: Event | None = None

    def __len__(self) -> int:
        return len(self.segments) * self.segment_slots

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        return self.segments[slot // self.segment_slots], slot % self.segment_slots

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        kernel = self._kernels.get(make)
        if kernel is None:
            kernel = self._kernels[make] = make(
                LayerRecords("slots", self.layout, *(segment.records.records for segment in self.segments))
            )
        return kernel

    def add(self) -> Segment:
        self._kernels.clear()
        size = self.segment_slots
        segment = Segment(self.device, self.layout, size, len(self), MemoryCategory.EXPERTS)
        self.segments.append(segment)
        begin = segment.records.records.data_ptr()
        self.addresses = [*self.addresses, *(begin + row * self.layout.nbytes for row in range(size))]
        return segment

    def drop(self) -> None:
        self._kernels.clear()
        self.addresses = self.addresses[: -self.segment_slots]
        self.segments.pop().release()

    def not_before(self, last_use: Event | None) -> None:
        """Writes no slot before this event: work submitted earlier may still read experts evicted since."""
        self._last_use = last_use

    def start(self, layer: int, expert: int, slot: Slot, source: Held, purpose: Purpose) -> Event:
        stream = self.device.h2d_stream
        if self._last_use is not None:
            stream.wait(self._last_use)
            self._last_use = None  # later copies are ordered behind this one anyway
        segment, row = self.locate(slot)
        label = purpose.value, self.layer_numbers[layer], expert, 1
        event = stream.copy(segment.records.records[row], source.record(expert), label, direction=Direction.H2D)
        source.until(expert, event)
        return event


@dataclass(frozen=True, slots=True)
class Staged:
    """An expert in a slot, once `copied` is done."""

    slot: int
    copied: Event


class Staging:
    """A ring of slots.  They are given out in turn, and computed in the order in which they were given out.

    A group is computed by one launch while the next one arrives (DuoServe, section IV), and once a layer's last group
    is on its way, the first experts of the layer after it follow, while attention computes.

    Args:
        layer_numbers: decoder layer of each layer, for the timeline.
        counters: experts that are brought ahead are counted as prefetches, once each: when their copy begins, whatever
            becomes of them.

    Attributes:
        segment: the slots.
        most_together: experts of a group, at most half of the slots.
    """

    def __init__(
        self, device: Device, layout: RecordLayout, count: int, layer_numbers: Sequence[int], counters: TierCounters
    ) -> None:
        self.segment = Segment(device, layout, count, 0, MemoryCategory.STAGING)
        self.most_together = max(1, count // 2)
        self._h2d, self._numbers, self._counters = device.h2d_stream, layer_numbers, counters
        self._nbytes = layout.nbytes
        self._last_use: list[Event | None] = [None] * count
        self._coming: list[Event] = []  # they end in order
        self._waited: Event | None = None
        self._in_use: set[int] = set()
        self._next = 0
        self._ahead: dict[int, Staged] = {}
        self._ahead_of: int | None = None

    @property
    def free(self) -> int:
        """Slots that may be given out: the computation of their experts has been submitted, or nobody claimed them."""
        return len(self._last_use) - len(self._in_use) + len(self._ahead)

    @property
    def arriving(self) -> int:
        # Asking one costs a call of the driver: half of those that may have ended are ruled out each time.
        del self._coming[: bisect_left(self._coming, True, key=lambda copied: not copied.done())]
        return len(self._coming)

    def bring(self, layer: int, expert: int, held: Held) -> Staged:
        """Starts copying an expert to the next free slot, behind the last use of that.  There must be one."""
        slot = self._vacant()
        last_use = self._last_use[slot]
        if last_use is not None and last_use is not self._waited:
            self._h2d.wait(last_use)
            self._waited = last_use  # later copies are behind it, too
        label = lanes.FETCH, self._numbers[layer], expert, 1
        copied = self._h2d.copy(self.segment.records.records[slot], held.record(expert), label, direction=Direction.H2D)
        held.until(expert, copied)
        self._in_use.add(slot)
        self._coming.append(copied)
        if len(self._coming) > 2 * len(self._last_use):
            _ = self.arriving  # nobody else may ask
        return Staged(slot, copied)

    def used(self, slot: int, last_use: Event) -> None:
        self._in_use.discard(slot)
        self._last_use[slot] = last_use

    def bring_ahead(self, layer: int, experts: Iterable[int], held: Held) -> None:
        """Starts copying experts of a layer that has not begun, as far as slots are free."""
        self._drop(list(self._ahead))
        self._ahead_of = layer
        for expert in islice(experts, self.free):
            self._ahead[expert] = self.bring(layer, expert, held)
            self._counters.prefetched += 1
            self._counters.prefetched_bytes += self._nbytes

    def ahead(self, layer: int) -> Mapping[int, Staged]:
        """Experts of a layer that were brought ahead, in the order of their copies."""
        return self._ahead if layer == self._ahead_of else {}

    def claim(self, layer: int, experts: Iterable[int]) -> dict[int, Staged]:
        """Those of `experts` that were brought ahead: the caller computes them, in the order of their copies."""
        wanted = set(experts)
        claimed = {expert: staged for expert, staged in self.ahead(layer).items() if expert in wanted}
        for expert in claimed:
            del self._ahead[expert]
        self._counters.prefetches_used += len(claimed)
        return claimed

    def forget_uses(self) -> None:
        self._drop(list(self._ahead))
        self._last_use = [None] * len(self._last_use)
        self._coming.clear()
        self._waited = None
        self._in_use.clear()

    def close(self) -> None:
        """Waits for what still arrives, needed or not, and frees the memory.  No computation may be in flight."""
        for copied in self._coming:
            with contextlib.suppress(EngineError):  # the device may have failed or been closed
                copied.wait()
        self.segment.release()

    def _vacant(self) -> int:
        if len(self._in_use) == len(self._last_use):
            self._drop(list(self._ahead)[:1])
        count, slot = len(self._last_use), self._next
        while slot in self._in_use:
            slot = (slot + 1) % count
        self._next = (slot + 1) % count
        return slot

    def _drop(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self._in_use.discard(self._ahead.pop(expert).slot)
            self._counters.prefetches_wasted += 1


_log = logging.getLogger(__name__)


@dataclass
class VramCounters(TierCounters):
    """Counters of the cache.  After every successful step, lookups = hits + misses and misses = on_cpu + fetched.

    Prefills are counted separately: they use the residents without changing the cache.

    Attributes:
        on_cpu, fetched: how misses were served, including `late` ones.
        hits_on_cpu: hits that the CPU computed anyway, because that was faster.
        recomputed: experts that the CPU computed because their copy had failed; included in on_cpu.
        fetched_bytes: copied to be computed at once, whether cached or not, without what had come ahead: those bytes
            are prefetched_bytes.
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
    """One layer's experts of one step: hits are pinned until `VramCache.release`, misses in request order, `late` those
    of them that are arriving, `admitted` those that are being copied to a slot.  A prefill is no use for the policy."""

    layer: int
    hits: dict[int, Slot] = field(default_factory=dict)
    misses: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    is_use: bool = True
    admitted: list[int] = field(default_factory=list)


_MOST_IN_FLIGHT = 8
"""Copies with which no other that nobody waits for is begun, so that urgent ones do not queue long."""


class VramCache:
    """Slots for the experts of `layers` layers whose records have one layout.  Safe to use from several threads.

    If the device refuses memory there are fewer slots, and `note` says so.

    Args:
        slots: requested number; rounded down to whole segments, see the property `slots`.
        ways: slots per layer: the first slots // ways layers have their own pool and the others none (N indexes of M
            ways).  None: all layers share one pool.
        policy: one of `engine.experts.cache.policies`, or `auto`.
        popularity: uses of each `key_of(layer, expert)` in a calibration, for the static policy.
        staging: extra slots for experts that are fetched to be computed at once; allocated first.
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
        staging: int = 3,
    ) -> None:
        self.device, self.layout = device, layout
        self.counters = VramCounters()
        self.note: str | None = None
        self._before_others = 0
        self._layers, self._experts = layers, experts
        self._ways = None if ways is None else max(1, min(ways, experts))
        self._memory = DeviceSlots(device, layout, pool_segment_slots(slots, layers * experts, self._ways), layers)
        self._tier = Tier(self._memory, layers, experts, layout.nbytes, policy, popularity, self.counters)
        if self._ways is None:
            self._tier.open_pool(range(layers), range(0), max(1, min(slots, layers * experts)))
        self._lock = threading.RLock()
        self.staging = self._open_staging(staging)
        try:
            wanted = self._segments_for(slots)
            self._report(self._grow(wanted), f"keeps {self.slots} of {wanted * self._memory.segment_slots} experts")
            self._tier.renew_sampler()
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> int:
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        return self.slots * self.layout.nbytes

    @property
    def policy(self) -> str:
        return self._tier.policy

    @property
    def backlog_bytes(self) -> int:
        return self._tier.backlog_bytes

    @property
    def is_full(self) -> bool:
        return all(not pool.free for pool in self._tier.pools)

    @property
    def layer_numbers(self) -> list[int]:
        """Decoder layer of each of its layers, for the timeline; callers fill it in."""
        return self._memory.layer_numbers

    @property
    def experts(self) -> int:
        """The most of any layer: an expert's key is layer * experts + expert."""
        return self._experts

    def key_of(self, layer: int, expert: int) -> Key:
        return self._tier.key_of(layer, expert)

    def residents(self, layer: int) -> dict[int, Slot]:
        with self._lock:
            self._settle()
            return self._tier.residents(layer)

    def snapshot(self) -> CacheSnapshot:
        with self._lock:
            self._settle()
            return self._tier.snapshot()

    def free_slots(self, layer: int) -> int:
        with self._lock:
            self._settle()
            return self._tier.pool_of[layer].free

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither resident nor arriving.  Not counted as a use."""
        with self._lock:
            return self._tier.absent(layer, experts)

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        with self._lock:
            return self._memory.kernel(make)

    @property
    def slot_addresses(self) -> list[int]:
        """Where each slot's record begins; another list once there are more or fewer slots."""
        return self._memory.addresses

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        return self._memory.locate(slot)

    def acquire(self, layer: int, experts: Sequence[int]) -> Lookup:
        """Looks up the distinct experts that a layer needs now, and pins the hits."""
        with self._lock:
            self.make_room()
            return self._look_up(layer, experts)

    def _look_up(self, layer: int, experts: Sequence[int]) -> Lookup:
        tier, counters, lookup = self._tier, self.counters, Lookup(layer)
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

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[dict[Key, Slot | None]]:
        """While the device looks up experts by itself: no slot is written or given away, and other threads wait.

        Yields:
            What has changed since the last time: keys, with their slots now, or None.
        """
        with self._lock:
            self.make_room()
            moved, self._tier.moved = self._tier.moved, {}
            yield moved

    def looked_up(self, layers: Sequence[int], keys: NDArray[np.int64], missed: NDArray[np.bool_]) -> None:
        """Within `unchanged`: the device has looked up these keys, and the CPU computed those missed."""
        counters, copies, misses = self.counters, self._tier.copies, int(missed.sum())
        with self._lock:
            self._tier.used(layers, keys, missed)
            counters.lookups += keys.size
            counters.hits += keys.size - misses
            counters.misses += misses
            counters.on_cpu += misses
            if copies:
                counters.late += len(copies.keys() & set(keys.ravel().tolist()))

    def price_copies(self, hits: float) -> None:
        with self._lock:
            self._tier.price_copies(hits)

    def hold(self, layer: int, experts: Sequence[int]) -> Lookup:
        """As `acquire`, for a prefill: neither the cache nor its eviction order changes."""
        with self._lock:
            self.make_room()
            hits = self._tier.hold(layer, experts)
            self.counters.prefill_lookups += len(experts)
            self.counters.prefill_hits += len(hits)
            return Lookup(layer, hits, [expert for expert in experts if expert not in hits], is_use=False)

    def uncount(self, lookup: Lookup) -> None:
        """A prefill's lookup is repeated: it is not counted."""
        with self._lock:
            self.counters.prefill_lookups -= len(lookup.hits) + len(lookup.misses)
            self.counters.prefill_hits -= len(lookup.hits)

    def release(self, lookup: Lookup, last_use: Event | None = None) -> None:
        """Unpins hits and admitted misses; no slot is written before `last_use`, which is after all work on slots."""
        with self._lock:
            if last_use is not None:
                self._memory.not_before(last_use)
            self._tier.release(lookup.layer, lookup.hits)
            if lookup.admitted:
                self._tier.release(lookup.layer, lookup.admitted)
            lookup.hits, lookup.admitted = {}, []

    def admit(self, lookup: Lookup, expert: int, held: Held) -> tuple[Slot, Event] | None:
        """Starts copying a miss to a slot, where it can be computed after the event; None if the policy refuses it."""
        with self._lock:
            copy = self._tier.bring(lookup.layer, expert, held, Purpose.FETCH)
            if copy is None:
                return None
            copy.pool.pin(copy.key)
            lookup.admitted.append(expert)
            return copy.slot, copy.handle

    def post_fetch(self, layer: int, experts: Sequence[int], held: Held, most: int | None = None) -> int:
        """Starts copying experts that may be needed again, as far as the policy admits them."""
        begun, tier = 0, self._tier
        with self._lock:
            self._settle()
            for expert in experts:
                if len(tier.copies) >= _MOST_IN_FLIGHT or begun == most:
                    break
                begun += tier.bring(layer, expert, held, Purpose.POST_FETCH) is not None
        return begun

    def prefetch(self, layer: int, expert: int, source: RecordSource, dead: Iterable[tuple[int, int]] = ()) -> bool:
        """Starts copying an absent expert that may be needed, if it is in RAM; evicts nothing but experts in `dead`."""
        tier = self._tier
        with self._lock:
            self._settle()
            if not tier.absent(layer, [expert]):
                return False
            if len(tier.copies) >= _MOST_IN_FLIGHT or source.lendable <= 0:
                return False
            held = source.hold_present([expert])
            try:
                return expert in held.rows and tier.prefetch(layer, expert, held, dead) is not None
            finally:
                held.release()

    def count_served(
        self,
        lookup: Lookup,
        on_cpu: int,
        fetched: int,
        *,
        came_ahead: int = 0,
        recomputed: int = 0,
        hits_on_cpu: int = 0,
    ) -> None:
        """Counts how the misses of a successful step were served, and hits computed on the CPU.

        Args:
            came_ahead: those of `fetched` whose copy began before the step, and was counted then.
        """
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
            counters.fetched_bytes += (fetched - came_ahead) * self.layout.nbytes

    def wait(self) -> None:
        with self._lock:
            for copy in self._tier.copies.values():
                with contextlib.suppress(EngineError):
                    copy.handle.wait()
            self._settle()

    def resize(self, slots: int) -> int:
        """Frees memory, for example for a longer KV cache, or allocates more.  Experts in the remaining slots stay.

        Returns:
            Number of slots now: more than requested while one that should be freed is in use, fewer if memory is short.
        """
        with self._lock:
            wanted = self._segments_for(slots)
            if wanted < len(self._memory.segments):
                self.wait()
                # Submitted kernels may still read slots that have been released.
                self.device.compute_stream.synchronize()
                self._shrink(wanted)
            else:
                self._grow(wanted)
                if 0 < self._before_others <= self.slots:
                    self._before_others, self.note = 0, None
            self._tier.renew_sampler()
            return self.slots

    def remake(self, slots: int) -> int:
        """So many slots, to the last one if there is memory for them; what was cached is forgotten."""
        with self._lock:
            if self._ways is None and not self.resize(0) and slots > 0:
                pieces = max(each for each in range(1, SEGMENTS + 1) if slots % each == 0)
                self._memory.segment_slots = slots // pieces
            return self.resize(slots)

    def give_back(self, nbytes: int) -> int:
        """Shrinks the cache by at least `nbytes`, if it is large enough; returns the bytes freed."""
        with self._lock:
            before = self.nbytes
            self.resize(self.slots - -(-nbytes // self.layout.nbytes))
            return before - self.nbytes

    def forget_uses(self) -> None:
        """Forgets pending events after a failed step, when the streams have recovered and nothing is in flight."""
        with self._lock:
            self._memory.not_before(None)
            if self.staging is not None:
                self.staging.forget_uses()
            self.wait()

    def close(self) -> None:
        with self._lock:
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
                self.staging.close()
                self.staging = None

    def _segments_for(self, slots: int) -> int:
        """Number of segments that hold at most so many slots, all of them usable."""
        most = self._layers * self._experts
        return pool_segments(slots, self._memory.segment_slots, self._layers, most, self._ways)

    def _grow(self, segments: int) -> DeviceMemoryError | None:
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
        """Frees segments from the end down to this number, or until one is in use.

        The compute stream must be idle: submitted work may still read slots that the pool considers free.
        """
        while len(self._memory.segments) > segments:
            if not self._tier.pools[-1].withdraw(self._memory.segments[-1].slots):
                break
            if self._ways is not None:
                self._tier.close_pool()
            self._memory.drop()

    def _settle(self) -> None:
        copies = self._tier.copies
        if not copies:
            return
        stream = self.device.h2d_stream
        if stream.failure is not None:
            # A copy failed, and so did all queued behind it.  Computations that need one see the failure in its event.
            _log.warning("experts could not be copied to %s: %s", self.device.name, stream.failure)
            stream.recover()
        while copies and (first := next(iter(copies.values()))).handle.done():
            self._end(first)

    def _end(self, copy: Copy[Event]) -> None:
        self._tier.end(copy, succeeded=copy.handle.done() and copy.handle.failure is None)

    def make_room(self) -> None:
        """Handles what has happened since the last step: copies that ended, device memory that others need."""
        with self._lock:
            if self._tier.copies:
                self._settle()
            if self.device.watch is not None:
                self.device.watch.look(time.monotonic())
            excess = self.device.memory.excess
            before = self.slots
            if excess and self._memory.segments and self.give_back(excess):
                self._before_others = max(self._before_others, before)
                self.note = f"{self.device.name} keeps {self.slots} experts: others need its memory."

    def _open_staging(self, count: int) -> Staging | None:
        for slots in range(count, 0, -1):
            try:
                return Staging(self.device, self.layout, slots, self.layer_numbers, self.counters)
            except DeviceMemoryError as error:
                self._report(error, f"has {slots - 1} slots for experts that are fetched")
        return None

    def _report(self, why: object, what: str) -> None:
        if why is not None:
            self.note = f"{self.device.name} {what}: {why}"
            _log.warning("%s", self.note)
