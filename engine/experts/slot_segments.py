"""Device memory for records, in segments that can be freed one by one, and copies into them."""

from __future__ import annotations

from collections.abc import Callable

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.pool import Slot
from engine.experts.cache.tier import Purpose
from engine.experts.record_source import Held
from engine.formats.layouts import RecordLayout
from engine.kernels.interface import ExpertKernel, LayerRecords

KernelMaker = Callable[[LayerRecords], ExpertKernel]
"""Binds a kernel to records.  Layers that compute alike share one, and with it the kernel's cached state."""


class Segment:
    """Slots in one block of memory, which kernels index like the experts of a layer.

    Args:
        first: number of its first slot.
    """

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
