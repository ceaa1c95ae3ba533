"""Experts that stay on the device from sweep to sweep (MoE-Lightning's r_w, Klotski's tensor placement).

They use the slots of the expert cache, and need not cross the link: as many of each layer as a plan says, which are
there before the first sweep, or what the pipeline's buffers leave of the cache.  Free slots are filled during sweeps,
with the experts that get the most tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.common.errors import EngineError
from engine.devices.device import Event
from engine.experts.dispatcher import HybridExperts
from engine.experts.vram_cache import Lookup
from engine.kernels.interface import ExpertKernel


@dataclass(frozen=True, slots=True)
class Resident:
    """A layer's experts in the cache, pinned until `Residents.release`.

    Attributes:
        slots: expert -> its slot in the cache.
        numbers: [experts + 1] on the device, the slot of each expert; `absent` for those not in the cache and for the
            extra last entry.
        kernel: computes experts in slots.
    """

    lookup: Lookup
    numbers: torch.Tensor
    absent: int
    kernel: ExpertKernel

    @property
    def slots(self) -> dict[int, int]:
        return self.lookup.hits


class Residents:
    """The cached experts of each layer.  For a single thread.

    Args:
        layers: layers in the order of the pipeline's buffers.
        likeliest: (layer, count) -> the experts that are expected to get the most tokens.
    """

    def __init__(self, layers: Sequence[HybridExperts], likeliest: Callable[[int, int], Sequence[int]]) -> None:
        self._layers, self._likeliest = layers, likeliest
        self._held: dict[int, Resident | None] = {}

    def of(self, number: int) -> Resident | None:
        """The cached experts of a layer, unchanged until `release`; None if there are none."""
        if number not in self._held:
            self._held[number] = self._hold(number)
        return self._held[number]

    def fill(self) -> None:
        """Fills the free slots of all layers and waits until their experts are there."""
        for number, experts in enumerate(self._layers):
            left, room = 0, self._fill(number)
            while room and room != left:
                experts.cache.wait()
                left, room = room, self._fill(number)
            experts.cache.wait()

    def release(self, number: int, last_use: Event | None) -> None:
        """Makes them evictable after `last_use`, the end of all work on them, and fills free slots."""
        held = self._held.pop(number, None)
        if held is not None:
            self._layers[number].cache.release(held.lookup, last_use)
        self._fill(number)

    def release_all(self) -> None:
        """The same for all layers, once no work is in flight."""
        for number in list(self._held):
            held = self._held.pop(number)
            if held is not None:
                with contextlib.suppress(EngineError):
                    self._layers[number].cache.release(held.lookup)

    def _hold(self, number: int) -> Resident | None:
        experts = self._layers[number]
        count, cache = experts.source.num_experts, experts.cache
        if not cache.slots:
            return None
        lookup = cache.hold(experts.layer, range(count))
        if not lookup.hits:
            return None
        numbers = torch.full((count + 1,), cache.slots)
        for expert, slot in lookup.hits.items():
            numbers[expert] = slot
        placed = numbers.to(cache.device.torch_device)
        return Resident(lookup, placed, cache.slots, cache.kernel(experts.make_kernel))

    def _fill(self, number: int) -> int:
        """Fills free slots up to this layer's share with its missing experts; returns how many are left."""
        experts = self._layers[number]
        cache, layer = experts.cache, experts.layer
        sharing = sum(other.cache is cache for other in self._layers)
        share = -(-cache.slots // sharing) if cache.slots else 0
        room = min(share - len(cache.residents(layer)), cache.free_slots(layer))
        if room <= 0:
            return 0
        likeliest = self._likeliest(number, min(share, experts.source.num_experts))
        for expert in cache.absent(layer, likeliest)[:room]:
            if not cache.prefetch(layer, expert, experts.source):
                break
            room -= 1
        return room
