"""The expert caches of a model on its devices: how much memory they have, and who else needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.experts.activations import Activations
from engine.experts.vram_cache import VramCache
from engine.experts.whole_layer import LayerBuffers
from engine.kernels.native.library import NativeKernels


@dataclass
class DeviceExperts:
    """The expert caches of a model, and what else was opened for them.

    Attributes:
        caches: of each device, one for each layout of records.
        activations: of each device, on their way.
        layer_buffers: in place of caches, where whole layers are fetched.
        kernels: the native ones that compute for emulated devices.
        shortages: sentences for the user about what did not fit from the start.
    """

    devices: Sequence[Device]
    caches: list[list[VramCache]] = field(init=False)
    activations: list[Activations] = field(default_factory=list)
    kernels: NativeKernels | None = None
    layer_buffers: list[LayerBuffers] = field(default_factory=list)
    shortages: list[str] = field(default_factory=list)
    _wanted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = [[] for _ in self.devices]

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about what could not be had, as of now."""
        said = [cache.note for caches in self.caches for cache in caches]
        return [*self.shortages, *(note for note in said if note is not None)]

    @property
    def slots(self) -> int:
        """Experts that can be kept on the devices."""
        return sum(cache.slots for caches in self.caches for cache in caches)

    def add(self, index: int, cache: VramCache) -> None:
        """A cache of the device of this index."""
        self.caches[index].append(cache)
        self._wanted[id(cache)] = cache.slots

    def give_back(self, index: int, nbytes: int) -> int:
        """Makes the caches of a device smaller by at least so many bytes, if they have them.

        Returns:
            Bytes that are free now and were not before.
        """
        freed = 0
        for cache in sorted(self.caches[index], key=lambda cache: -cache.nbytes):
            if freed >= nbytes:
                break
            before = cache.nbytes
            fewer = -(-(nbytes - freed) // cache.layout.nbytes)
            cache.resize(max(0, cache.slots - fewer))
            freed += before - cache.nbytes
        return freed

    def resize(self, slots: int) -> int:
        """So many slots on all devices from now on, shared as they are now, as far as there is memory; how many.

        Raises:
            EngineError: a device has failed.
        """
        caches = [cache for caches in self.caches for cache in caches] if not self.layer_buffers else []
        shares = [cache.slots for cache in caches] if self.slots else [1] * len(caches)
        for cache, share in zip(caches, shares, strict=True):
            self._wanted[id(cache)] = cache.resize(round(slots * share / sum(shares)))
        return self.slots

    def take_back(self) -> None:
        """Lets caches that had to give memory back have it again, as far as it is free."""
        for device, caches in zip(self.devices, self.caches, strict=True):
            for cache in caches:
                missing = self._wanted[id(cache)] - cache.slots
                fitting = device.memory.free // cache.layout.nbytes
                if missing > 0 and fitting > 0:
                    cache.resize(cache.slots + min(missing, fitting))

    def settle_for_less(self) -> None:
        """From now on caches are wanted as small as they have become."""
        for caches in self.caches:
            for cache in caches:
                self._wanted[id(cache)] = cache.slots

    def close(self) -> None:
        """Frees all slots.  The devices are closed by whoever opened them.  Harmless if repeated."""
        for buffers in self.layer_buffers:
            buffers.close()
        self.layer_buffers = []
        for caches in self.caches:
            for cache in caches:
                cache.close()
        for activations in self.activations:
            with contextlib.suppress(EngineError):
                activations.close()
        self.caches, self.activations = [[] for _ in self.devices], []
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None
