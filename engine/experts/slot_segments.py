"""Device memory for records, in pieces that can be given back one by one, and copies into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.bank import BankLayer
from engine.experts.cache.pool import Slot
from engine.experts.cache.tier import Purpose
from engine.experts.record import RecordLayout
from engine.experts.record_source import Held
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

KernelMaker = Callable[[LayerRecords], ExpertKernel]
"""Binds a kernel to records.  Layers that compute alike share one, and with it what kernels keep for themselves."""


class Segment:
    """Some slots in one piece of memory; to a kernel they are a layer whose experts are the slots.

    Args:
        first: number of its first slot.

    Raises:
        DeviceMemoryError: the device has not so much left.
    """

    def __init__(self, device: Device, layout: RecordLayout, count: int, first: int, category: MemoryCategory) -> None:
        self._device = device
        memory = device.memory.allocate(count * layout.nbytes, category)
        self._memory = memory
        self.slots = range(first, first + count)
        self.records = BankLayer("slots", layout, memory.view(count, layout.nbytes))
        self._kernels: dict[KernelMaker, ExpertKernel] = {}

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        """The kernel that computes the experts in these slots."""
        kernel = self._kernels.get(make)
        if kernel is None:
            kernel = self._kernels[make] = make(self.records)
        return kernel

    def release(self) -> None:
        """Gives the memory back.  Nothing may be in flight to it, and nothing compute from it."""
        self._kernels.clear()
        self.records.stacked.clear()
        self.records.rows.clear()
        self._device.memory.release(self._memory)
        del self._memory, self.records


class JoinedRecords:
    """The slots of several segments as one layer of records: a kernel is called once, wherever its experts lie.

    Args:
        segments: at least one.
    """

    def __init__(self, layout: RecordLayout, segments: Sequence[Segment]) -> None:
        self.layout = layout
        self.pieces = [segment.records.records for segment in segments]
        self.stacked = segments[0].records.stacked if len(segments) == 1 else {}
        self.rows = {
            part.name: [row for segment in segments for row in segment.records.rows[part.name]] for part in layout.parts
        }

    @property
    def num_experts(self) -> int:
        """How many slots there are."""
        return sum(piece.shape[0] for piece in self.pieces)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.pieces[0].device


class DeviceSlots:
    """Slots in segments of one size, and a `Copier` over the link to them.  Not for several threads.

    Attributes:
        layer_numbers: of its layers in the decoder, for a timeline.
    """

    def __init__(self, device: Device, layout: RecordLayout, segment_slots: int, layers: int) -> None:
        self.device, self.layout, self.segment_slots = device, layout, segment_slots
        self.segments: list[Segment] = []
        self.layer_numbers = list(range(layers))
        self._kernels: dict[KernelMaker, ExpertKernel] = {}
        self._last_use: Event | None = None

    def __len__(self) -> int:
        return len(self.segments) * self.segment_slots

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a slot, and which of its records it is."""
        return self.segments[slot // self.segment_slots], slot % self.segment_slots

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        """The kernel that computes the experts in all slots; to it their numbers are the slots."""
        kernel = self._kernels.get(make)
        if kernel is None:
            kernel = self._kernels[make] = make(JoinedRecords(self.layout, self.segments))
        return kernel

    def add(self) -> Segment:
        """One more segment.

        Raises:
            DeviceMemoryError: the device has not so much left.
        """
        self._kernels.clear()
        size = self.segment_slots
        segment = Segment(self.device, self.layout, size, len(self), MemoryCategory.EXPERTS)
        self.segments.append(segment)
        return segment

    def drop(self) -> None:
        """Gives the last segment back.  Nothing may be in flight to it, and nothing compute from it."""
        self._kernels.clear()
        self.segments.pop().release()

    def not_before(self, last_use: Event | None) -> None:
        """No slot is written to before this event: work submitted earlier may read what has left the cache since."""
        self._last_use = last_use

    def start(self, layer: int, expert: int, slot: Slot, source: Held, purpose: Purpose) -> Event:
        """See `engine.experts.cache.tier.Copier`; the record stays in RAM until it has been copied."""
        stream = self.device.h2d_stream
        if self._last_use is not None:
            stream.wait(self._last_use)
            self._last_use = None  # what comes after waits behind it all the same
        segment, row = self.locate(slot)
        event = stream.copy(segment.records.records[row], source.record(expert), direction=Direction.H2D)
        source.until(expert, event)
        if RECORDER.on:
            number, nbytes = self.layer_numbers[layer], self.layout.nbytes
            RECORDER.event(event, lanes.H2D, purpose.value, number, expert, nbytes, device=self.device.index)
        return event


class Staging:
    """A few slots, taken in turn, for experts that are computed as soon as they are there."""

    def __init__(self, device: Device, layout: RecordLayout, count: int) -> None:
        self.segment = Segment(device, layout, count, 0, MemoryCategory.STAGING)
        self._last_use: list[Event | None] = [None] * count
        self._next = 0

    def take(self) -> tuple[int, Event | None]:
        """The next slot, and what must be over before anything is written to it."""
        slot = self._next
        self._next = (slot + 1) % len(self._last_use)
        return slot, self._last_use[slot]

    def used(self, slot: int, last_use: Event) -> None:
        """`last_use` is the end of the last work on the slot."""
        self._last_use[slot] = last_use

    def forget_uses(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._last_use = [None] * len(self._last_use)
