"""Activations on their way between a device and the CPU: small, and never behind expert weights."""

from __future__ import annotations

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory


class Activations:
    """Buffers of one device that all its layers use, one after the other.  Not for several threads."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._down: dict[str, torch.Tensor] = {}
        self._up: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        self._going_up: Event | None = None

    def to_host(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """`tensor` on the CPU, once what computes it is done; it stays as it is until the next one of this name.

        Raises:
            EngineError: the device failed.
        """
        device, host = self.device, self.device.host_memory
        tensor = tensor.contiguous()
        buffer = self._down.get(name)
        if buffer is None or buffer.nbytes < tensor.nbytes:
            if buffer is not None:
                host.release(buffer)
            buffer = self._down[name] = host.allocate(_roomy(tensor.nbytes))
        target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if device.compute_follows_caller:
            device.small_copy_stream.wait(device.compute_stream.record())
        device.small_copy_stream.copy(target, tensor, direction=Direction.D2H).wait()
        return target

    def to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Where the CPU's `tensor` will be on the device, and the event after which it is.

        It stays there until the next call, whose copy waits for the work submitted to the compute stream before.

        Raises:
            DeviceMemoryError: the device has no room for it.
            EngineError: the device failed.
        """
        device, needed = self.device, tensor.nbytes
        if self._going_up is not None:
            self._going_up.wait()
        if self._up is None or self._landed is None or self._up.nbytes < needed:
            device.compute_stream.synchronize()
            self._release_up()
            self._landed = device.memory.allocate(_roomy(needed), MemoryCategory.ACTIVATIONS)
            self._up = device.host_memory.allocate(_roomy(needed))
        host, landed = (buffer[:needed].view(tensor.dtype).view(tensor.shape) for buffer in (self._up, self._landed))
        host.copy_(tensor)
        self._going_up = device.small_copy_stream.copy(landed, host, direction=Direction.H2D)
        return landed, self._going_up

    def forget_uses(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._going_up = None

    def close(self) -> None:
        """Frees the buffers, which nothing may use any more.  Harmless if repeated."""
        for buffer in self._down.values():
            self.device.host_memory.release(buffer)
        self._down = {}
        self._release_up()

    def _release_up(self) -> None:
        if self._landed is not None:
            self.device.memory.release(self._landed)
        if self._up is not None:
            self.device.host_memory.release(self._up)
        self._up = self._landed = None


def _roomy(nbytes: int) -> int:
    """A power of two: a prompt a little longer than the last needs no new buffer."""
    return max(4096, 1 << (nbytes - 1).bit_length())
