"""Experts that stay on the device from sweep to sweep (MoE-Lightning's r_w, Klotski's tensor placement).

They lie in the slots of the expert cache, whose memory the pipeline's buffers leave: what is there need not cross the
link.  Free slots are filled while sweeps go on, with the experts that have the most tokens.
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
        numbers: [experts + 1] on the device, the slot of each expert; `nobody` of those that are not there, and behind
            the last one.
        kernel: computes what is in slots.
    """

    lookup: Lookup
    numbers: torch.Tensor
    nobody: int
    kernel: ExpertKernel

    @property
    def slots(self) -> dict[int, int]:
        return self.lookup.hits


class Residents:
    """What the cache has of each layer.  By one thread.

    Args:
        layers: of the pipeline's buffers, in their order.
        likeliest: (layer, how many) -> the experts that are expected to have the most tokens.
    """

    def __init__(self, layers: Sequence[HybridExperts], likeliest: Callable[[int, int], Sequence[int]]) -> None:
        self._layers, self._likeliest = layers, likeliest
        self._held: dict[int, Resident | None] = {}

    def of(self, number: int) -> Resident | None:
        """A layer's, the same until it is released; None if there is nothing of it."""
        if number not in self._held:
            self._held[number] = self._hold(number)
        return self._held[number]

    def release(self, number: int, last_use: Event | None) -> None:
        """They may leave from now on, `last_use` being the end of all work on them; free slots get others."""
        held = self._held.pop(number, None)
        if held is not None:
            self._layers[number].cache.release(held.lookup, last_use)
        self._fill(number)

    def release_all(self) -> None:
        """The same for all layers, when nothing is under way any more."""
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

    def _fill(self, number: int) -> None:
        """Slots that nobody has, with this layer's share of what is missing."""
        experts = self._layers[number]
        cache, layer = experts.cache, experts.layer
        sharing = sum(other.cache is cache for other in self._layers)
        share = -(-cache.slots // sharing) if cache.slots else 0
        room = min(share - len(cache.residents(layer)), cache.free_slots(layer))
        if room <= 0:
            return
        likeliest = self._likeliest(number, min(share, experts.source.num_experts))
        for expert in cache.absent(layer, likeliest)[:room]:
            if not cache.prefetch(layer, expert, experts.source):
                return
