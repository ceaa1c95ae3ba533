"""Copies of activations between a device and the CPU, on a stream of their own so they never queue behind weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_BUNDLES = 16
"""Sets of shapes whose views are cached: decode steps repeat their shapes, prompts rarely do."""
_ROOMY_SHARE = 8
"""Buffers are larger than needed only up to one part in so many of a device's free memory: another has to fit, too."""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Tensors of given shapes, packed back to back on the device and on the host."""

    packed: torch.Tensor
    pieces: list[torch.Tensor]
    landed: torch.Tensor
    landed_pieces: list[torch.Tensor]


class Activations:
    """Buffers of one device, shared by all its layers in turn.  Not thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._down: dict[str, torch.Tensor] = {}
        self._up: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        self._going_up: Event | None = None
        self._read: Event | None = None
        self._rows: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None
        self._landed_bundle: torch.Tensor | None = None
        self._bundles: dict[object, _Bundle] = {}

    def to_host(self, tensor: torch.Tensor, name: str, *, is_computed: bool = False) -> torch.Tensor:
        """Copies `tensor` to the CPU once it is computed.  The result is valid until the next call with this name.

        Args:
            is_computed: the host knows that it is: the copy does not wait for what the device was given since.

        Raises:
            EngineError: the device failed.
        """
        device, host = self.device, self.device.host_memory
        is_computed &= tensor.is_contiguous()
        tensor = tensor.contiguous()
        buffer = self._down.get(name)
        if buffer is None or buffer.nbytes < tensor.nbytes:
            if buffer is not None:
                host.release(buffer)
            buffer = self._down[name] = host.allocate(_roomy(tensor.nbytes))
        target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if device.compute_follows_caller and not is_computed:
            device.small_copy_stream.wait(device.compute_stream.record())
        self._copy(target, tensor, Direction.D2H, lanes.HIDDEN).wait()
        return target

    def bundle_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `to_host`, for several tensors in one copy, which pays the link's latency once.

        Raises:
            EngineError: the device failed.
        """
        device = self.device
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        bundle = self._bundles.get(signature)
        if bundle is None:
            bundle = self._new_bundle(tensors)
            kept = self._bundles if len(self._bundles) < _BUNDLES else {}
            self._bundles = {**kept, signature: bundle}
        for tensor, piece in zip(tensors, bundle.pieces, strict=True):
            piece.copy_(tensor)
        if device.compute_follows_caller:
            ready = device.compute_stream.record()
            if RECORDER.on and (queued := RECORDER.queued) is not None:
                queued.routed(ready, device.index)
            device.small_copy_stream.wait(ready)
        self._copy(bundle.landed, bundle.packed, Direction.D2H, lanes.ROUTING).wait()
        return bundle.landed_pieces

    def outgoing(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory to fill for `to_device`; waits until its previous content has been copied to the device.

        Raises:
            DeviceMemoryError: it does not fit on the device.
            EngineError: the device failed.
        """
        device, needed = self.device, math.prod(shape) * dtype.itemsize
        if self._going_up is not None:
            self._going_up.wait()
        if self._up is None or self._landed is None or self._up.nbytes < needed:
            device.compute_stream.synchronize()
            self._release_up()
            self._landed = self._room(needed)
            self._up = device.host_memory.allocate(self._landed.nbytes)
        return self._up[:needed].view(dtype).view(shape)

    def to_device(self, outgoing: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Copies `outgoing` to the device: the target tensor, and the event of the copy.

        The target is valid until the next call, whose copy waits for the event given to `read_until`.

        Raises:
            EngineError: the device has been closed.
        """
        assert self._landed is not None
        stream = self.device.small_copy_stream
        landed = _as(self._landed, outgoing)
        if self._read is not None:
            stream.wait(self._read)
            self._read = None
        self._going_up = self._copy(landed, outgoing, Direction.H2D, lanes.RESULTS)
        return landed, self._going_up

    def read_until(self, event: Event) -> None:
        """The last result of `to_device` may be read until this event."""
        self._read = event

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory for the compute stream, reused by each layer.

        Raises:
            DeviceMemoryError: it does not fit on the device.
        """
        needed = math.prod(shape) * dtype.itemsize
        if self._rows is None or self._rows.nbytes < needed:
            self.device.compute_stream.synchronize()
            self._release_rows()
            self._rows = self._room(needed)
        return self._rows[:needed].view(dtype).view(shape)

    def _room(self, needed: int) -> torch.Tensor:
        """Device memory of so many bytes, or some more if there is plenty.

        Raises:
            DeviceMemoryError: it does not fit on the device.
        """
        memory, roomy = self.device.memory, _roomy(needed)
        if roomy <= memory.free // _ROOMY_SHARE:
            with contextlib.suppress(DeviceMemoryError):
                return memory.allocate(roomy, MemoryCategory.ACTIVATIONS)
        return memory.allocate(needed, MemoryCategory.ACTIVATIONS)

    @property
    def nbytes(self) -> int:
        """Device memory that `shrink` would free."""
        return sum(buffer.nbytes for buffer in (self._landed, self._rows) if buffer is not None)

    def shrink(self) -> int:
        """Frees the device's buffers until the next step needs some, perhaps smaller ones; returns the bytes freed.

        Raises:
            EngineError: the device failed.
        """
        freed = self.nbytes
        if freed:
            if self._going_up is not None:
                self._going_up.wait()
            self.device.compute_stream.synchronize()
            self.forget_uses()
            self._release_up()
            self._release_rows()
        return freed

    def forget_uses(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._going_up = self._read = None

    def close(self) -> None:
        """Frees the buffers, which must no longer be in use.  Idempotent."""
        for buffer in self._down.values():
            self.device.host_memory.release(buffer)
        self._down = {}
        self._release_bundles()
        self._release_up()
        self._release_rows()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, direction: Direction, name: int) -> Event:
        return self.device.small_copy_stream.copy(target, source, (name, None, -1, 1), direction=direction)

    def _new_bundle(self, tensors: Sequence[torch.Tensor]) -> _Bundle:
        sizes = [_aligned(tensor.nbytes) for tensor in tensors]
        needed = sum(sizes)
        if self._packed is None or self._landed_bundle is None or self._packed.nbytes < needed:
            self._release_bundles()
            self._packed = torch.empty(_roomy(needed), dtype=torch.uint8, device=self.device.torch_device)
            self._landed_bundle = self.device.host_memory.allocate(_roomy(needed))
        packed, landed = self._packed[:needed], self._landed_bundle[:needed]
        pieces, landed_pieces = (
            [_as(piece, tensor) for tensor, piece in zip(tensors, torch.split(whole, sizes), strict=True)]
            for whole in (packed, landed)
        )
        return _Bundle(packed, pieces, landed, landed_pieces)

    def _release_bundles(self) -> None:
        if self._landed_bundle is not None:
            self.device.host_memory.release(self._landed_bundle)
        self._bundles, self._packed, self._landed_bundle = {}, None, None

    def _release_up(self) -> None:
        if self._landed is not None:
            self.device.memory.release(self._landed)
        if self._up is not None:
            self.device.host_memory.release(self._up)
        self._up = self._landed = None

    def _release_rows(self) -> None:
        if self._rows is not None:
            self.device.memory.release(self._rows)
        self._rows = None


def _as(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _roomy(nbytes: int) -> int:
    """Rounds up to a power of two or to whole MiB, so that a slightly longer prompt needs no new buffer."""
    return max(4096, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20
