"""Room for a KV cache on the devices that hold it: counted before it is needed, taken from the experts if need be."""

from __future__ import annotations

from transformers.cache_utils import Cache

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.runtime.cache_capacity import grown_capacity
from engine.runtime.growing_cache import cache_layer_bytes
from engine.runtime.model_devices import ModelDevices


class KvRoom:
    """What one KV cache takes of each device; on the CPU alone there is nothing to count.

    Args:
        most_tokens: longest context.
    """

    def __init__(self, devices: ModelDevices | None, most_tokens: int) -> None:
        self._devices = devices
        self._most_tokens = most_tokens
        opened = devices.devices if devices is not None else ()
        self._reservations = [device.memory.reserve(0, MemoryCategory.KV) for device in opened]

    @property
    def nbytes(self) -> int:
        """Bytes counted now, on all devices."""
        return sum(reservation.nbytes for reservation in self._reservations)

    def make(self, cache: Cache | None, tokens: int, rows: int = 1) -> None:
        """Before a forward that lets each of `rows` sequences hold `tokens`.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: not even all slots of the expert caches would do.
        """
        if self._devices is None:
            return
        held = self._held(cache)
        for index, kv in enumerate(self._devices.kv):
            now = max(0, held[index] // rows - kv.fixed) // kv.per_token if kv.per_token else 0
            capacity = now if tokens <= now else grown_capacity(now, tokens, self._most_tokens)
            self._resize(index, max(held[index], rows * (kv.fixed + capacity * kv.per_token)), tokens)

    def count(self, cache: Cache | None) -> None:
        """After a forward: the bytes that are really held.

        Raises:
            EngineError: as `make`.
        """
        if self._devices is None:
            return
        for index, nbytes in enumerate(self._held(cache)):
            if nbytes != self._reservations[index].nbytes:
                self._resize(index, nbytes, cache.get_seq_length() if cache is not None else 0)

    def release(self) -> None:
        """The cache is gone: its memory is the experts' again."""
        if self.nbytes:
            for reservation in self._reservations:
                reservation.release()
            assert self._devices is not None
            self._devices.experts.take_back()

    def _held(self, cache: Cache | None) -> list[int]:
        held = [0] * len(self._reservations)
        assert self._devices is not None
        for layer, nbytes in enumerate(cache_layer_bytes(cache)):
            held[self._devices.layers.of_cache_layer(layer)] += nbytes
        return held

    def _resize(self, index: int, nbytes: int, tokens: int) -> None:
        reservation = self._reservations[index]
        assert self._devices is not None
        try:
            reservation.resize(nbytes)
            return
        except DeviceMemoryError as error:
            self._devices.experts.give_back(index, error.asked - error.free)
        try:
            reservation.resize(nbytes)
        except DeviceMemoryError as error:
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY,
                f"A context of {tokens:,} tokens needs another {rounded_up(error.asked)} of "
                f"{self._devices.devices[index].name}, which has {rounded_down(error.free)} left: start a new chat, "
                "allow it more with --vram, or use --device cpu.",
            ) from None
