"""The devices that a model runs on: its weights, its expert caches and its KV, each within the device's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory, Reservation
from engine.runtime.device_experts import DeviceExperts
from engine.runtime.layer_devices import LayerDevices


class ModelDevices:
    """Owns the devices and all that was allocated on them; made empty, and filled while the model is loaded.

    Attributes:
        layers: what is where.
        experts: slots and whoever computes from them.
        kv_per_token: bytes that a token of context takes on each device.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self.layers = LayerDevices()
        self.experts = DeviceExperts(self.devices)
        self.kv_per_token: tuple[int, ...] = (0,) * len(self.devices)
        self._fixed: list[Reservation] = []

    def memory(self) -> tuple[int, int, int]:
        """Bytes of all devices: those that may be used, those that are, and the part of these that experts have."""
        uses = [device.memory.use() for device in self.devices]
        experts = sum(
            use.by_category[kind] for use in uses for kind in (MemoryCategory.EXPERTS, MemoryCategory.STAGING)
        )
        return sum(use.total for use in uses), sum(use.used for use in uses), experts

    def count(self, index: int, nbytes: int, category: MemoryCategory) -> None:
        """Counts memory of a device that torch or the library allocates.

        Raises:
            DeviceMemoryError: beyond the device's budget.
        """
        self._fixed.append(self.devices[index].memory.reserve(nbytes, category))

    def count_weights(self, sizes: Mapping[str, int]) -> None:
        """Counts tensors of these names and bytes on the devices that they go to.

        Raises:
            DeviceMemoryError: beyond a device's budget.
        """
        dense = [0] * len(self.devices)
        for name, nbytes in sizes.items() if dense else ():
            dense[self.layers.of(name)] += nbytes
        for index, nbytes in enumerate(dense):
            self.count(index, nbytes, MemoryCategory.WEIGHTS)

    def expert_budgets(self, context_tokens: int, activations: int) -> list[int]:
        """Bytes of each device for experts, once there is room for a context and for a piece of a prompt."""
        return [
            max(0, device.memory.free - context_tokens * per_token - activations)
            for device, per_token in zip(self.devices, self.kv_per_token, strict=True)
        ]

    def expect_kv(self, bytes_per_token: int, cache_layers: int) -> None:
        """How much one token of context will take; layers are taken to be alike."""
        shares = [0] * len(self.devices)
        for layer in range(cache_layers):
            shares[self.layers.of_cache_layer(layer)] += 1
        self.kv_per_token = tuple(-(-bytes_per_token * share // max(cache_layers, 1)) for share in shares)

    def context_room(self, wanted: int, fewest: int, activations: int) -> int:
        """The longest context, up to `wanted` tokens, that all devices can hold if their experts give way.

        Raises:
            DeviceMemoryError: one has not even room for `fewest` tokens.
        """
        room = wanted
        for device, caches, per_token in zip(self.devices, self.experts.caches, self.kv_per_token, strict=True):
            counted = device.memory.use().by_category[MemoryCategory.ACTIVATIONS]
            left = device.memory.free + sum(cache.nbytes for cache in caches) + counted - activations
            if left < min(wanted, fewest) * per_token:
                raise DeviceMemoryError(device.name, MemoryCategory.KV, min(wanted, fewest) * per_token, max(left, 0))
            room = min(room, left // per_token) if per_token else room
        return room

    def shrink(self) -> bool:
        """After a device has run out of memory: gives a quarter of the slots back for good.

        Returns:
            Whether there was anything to give.
        """
        freed = 0
        for index, caches in enumerate(self.experts.caches):
            held = sum(cache.nbytes for cache in caches)
            if held:
                freed += self.experts.give_back(index, max(held // 4, 1))
        self.experts.settle_for_less()
        return freed > 0

    def close(self) -> None:
        """Frees everything and closes the devices.  Harmless if repeated."""
        self.experts.close()
        for reservation in self._fixed:
            reservation.release()
        self._fixed = []
        for device in self.devices:
            device.close()
