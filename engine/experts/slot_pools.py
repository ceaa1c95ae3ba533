"""The slots of an expert cache: pieces of device memory, and the pools that say who is in them.

Either all layers share one pool, or the first layers have one of so many ways each (N indexes of M ways: CPU-GPU
Collaborative, section III).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from engine.common.footprint import pool_segment_slots, pool_segments
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.cache.policies import Key, make_policy
from engine.experts.cache.pool import Pool, Slot
from engine.experts.record import RecordLayout
from engine.experts.slot_segments import JoinedRecords, KernelMaker, Segment
from engine.kernels.interface import ExpertKernel


class SlotPools:
    """Slots of records of one layout.  Not for several threads.

    Args:
        layers, experts: that may come, and so how many slots are of use at most.
        slots: how many there should be at first; a piece of memory is about an eighth of it.
        ways: slots of each layer, or None for one pool.
        policy, popularity, seed: see `engine.experts.cache.policies.make_policy`.
    """

    def __init__(
        self,
        device: Device,
        layout: RecordLayout,
        layers: int,
        experts: int,
        slots: int,
        ways: int | None,
        policy: str,
        popularity: Mapping[Key, float] | None,
        seed: int,
    ) -> None:
        self.ways = None if ways is None else max(1, min(ways, experts))
        self.policy = policy
        self._device, self._layout = device, layout
        self._layers, self._most = layers, layers * experts
        self._popularity, self._seed = popularity, seed
        self.segment_slots = pool_segment_slots(slots, self._most, self.ways)
        self.segments: list[Segment] = []
        # What a policy forgets is measured in uses of a whole pool, so it is told how big the pool is going to be.
        self._pool_slots = self.ways or max(1, min(slots, self._most))
        self._pools: list[Pool] = [] if self.ways else [self._new_pool(range(0))]
        self._kernels: dict[KernelMaker, ExpertKernel] = {}

    @property
    def slots(self) -> int:
        """How many there are now."""
        return len(self.segments) * self.segment_slots

    @property
    def layers(self) -> int:
        """How many layers have a share in them."""
        return self._layers if self.ways is None else len(self.segments)

    def of(self, layer: int) -> Pool:
        """The pool of a layer; an empty one if it has no slots."""
        if self.ways is None:
            return self._pools[0]
        return self._pools[layer] if layer < len(self._pools) else _NO_SLOTS

    @property
    def keys(self) -> tuple[list[Key], list[Key]]:
        """Who is there, and who is on the way."""
        there = [key for pool in self._pools for key in pool.residents]
        return there, [key for pool in self._pools for key in pool.arriving]

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a slot, and which of its records it is."""
        return self.segments[slot // self.segment_slots], slot % self.segment_slots

    def kernel(self, make: KernelMaker) -> ExpertKernel:
        """The kernel that computes the experts in all slots; to it their numbers are the slots."""
        kernel = self._kernels.get(make)
        if kernel is None:
            kernel = self._kernels[make] = make(JoinedRecords(self._layout, self.segments))
        return kernel

    def record(self, slot: Slot) -> torch.Tensor:
        """[record bytes], uint8, on the device."""
        segment, row = self.locate(slot)
        return segment.records.records[row]

    def segments_for(self, slots: int) -> int:
        """How many pieces hold at most so many slots, where all of them are of use."""
        return pool_segments(slots, self.segment_slots, self._layers, self._most, self.ways)

    def grow(self, segments: int) -> DeviceMemoryError | None:
        """Adds pieces until there are so many, or until the device refuses one: then why."""
        self._kernels.clear()
        for index in range(len(self.segments), segments):
            size = self.segment_slots
            try:
                segment = Segment(self._device, self._layout, size, index * size, MemoryCategory.EXPERTS)
            except DeviceMemoryError as error:
                return error
            self.segments.append(segment)
            if self.ways is None:
                self._pools[0].grow(list(reversed(segment.slots)))
            else:
                self._pools.append(self._new_pool(segment.slots))
        return None

    def shrink(self, segments: int) -> list[Key]:
        """Gives up pieces from the end until there are so many, or one of them is in use; who had to leave.

        Nothing may compute from them: what a pool calls free may still be read by work that was submitted.
        """
        gone: list[Key] = []
        self._kernels.clear()
        while len(self.segments) > segments:
            slots, pool = self.segments[-1].slots, self._pools[-1]
            leaving = [key for key, slot in pool.residents.items() if slot in slots]
            if not pool.withdraw(slots):
                break
            gone += leaving
            if self.ways is not None:
                self._pools.pop()
            self.segments.pop().release()
        return gone

    def adopt(self, policy: str) -> None:
        """Lets another policy decide from now on; whoever is there stays."""
        self.policy = policy
        for pool in self._pools:
            pool.adopt(make_policy(policy, pool.capacity, self._popularity, self._seed))

    def close(self) -> None:
        """Gives all memory back.  Nothing may be in flight to it.  Harmless if repeated."""
        self._kernels.clear()
        with contextlib.suppress(IndexError):
            while True:
                self.segments.pop().release()
        self._pools = [] if self.ways else [self._new_pool(range(0))]

    def _new_pool(self, slots: range) -> Pool:
        return Pool(slots, make_policy(self.policy, self._pool_slots, self._popularity, self._seed))


_NO_SLOTS = Pool(range(0), make_policy("lru", 0))
