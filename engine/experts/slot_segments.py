"""Device memory for records, in segments that can be freed one by one, and copies into them.

Experts that are not cached pass through a ring of slots: a group is computed by one launch while the next one arrives
(DuoServe, section IV), and once a layer's last group is on its way, the first experts of the layer after it follow,
while attention computes.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.common.errors import EngineError
from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.policies import Slot
from engine.experts.cache.tier import Purpose, TierCounters
from engine.experts.record_source import Held
from engine.formats.layouts import RecordLayout
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
