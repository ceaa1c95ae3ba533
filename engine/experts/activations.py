"""Copies of activations between a device and the CPU, on a stream of their own so they never queue behind weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_BUNDLES = 16
"""Sets of shapes whose views are cached: decode steps repeat their shapes, prompts rarely do."""
_ROOMY_SHARE = 8
"""Buffers are larger than needed only up to one part in so many of a device's free memory: another has to fit, too."""


class Buffer:
    """Memory that grows with what it is asked for; what it held is lost then."""

    def __init__(
        self, allocate: Callable[[int], torch.Tensor], release: Callable[[torch.Tensor], None] = lambda _memory: None
    ) -> None:
        self._allocate, self._release = allocate, release
        self._whole: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._whole is None else self._whole.nbytes

    def get(self, nbytes: int) -> torch.Tensor:
        """So many bytes from its beginning."""
        if self._whole is None or self._whole.nbytes < nbytes:
            self.free()
            self._whole = self._allocate(nbytes)
        return self._whole[:nbytes]

    def free(self) -> None:
        """Until it is asked again; it must no longer be in use.  Idempotent."""
        if self._whole is not None:
            self._release(self._whole)
            self._whole = None


class _Bundle(NamedTuple):
    """Tensors of given shapes, packed back to back on the device and on the host."""

    packed: torch.Tensor
    pieces: list[torch.Tensor]
    landed: torch.Tensor
    landed_pieces: list[torch.Tensor]


class Activations:
    """Buffers of one device, shared by all its layers in turn.  Not thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._down, self._up, self._landed_bundle = (self._on_host() for _ in range(3))
        self._landed, self._rows = (Buffer(self._room, device.memory.release) for _ in range(2))
        self._packed = Buffer(lambda n: torch.empty(_roomy(n), dtype=torch.uint8, device=device.torch_device))
        self._going_up: Event | None = None
        self._read: Event | None = None
        self._bundles: dict[object, _Bundle] = {}

    def _on_host(self) -> Buffer:
        host = self.device.host_memory
        return Buffer(lambda nbytes: host.allocate(_roomy(nbytes)), host.release)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies what the host knows to be computed to the CPU, where it is valid until the next call: the copy does
        not wait for what the device was given since."""
        device, is_there = self.device, tensor.is_contiguous()
        tensor = tensor.contiguous()
        target = _as(self._down.get(tensor.nbytes), tensor)
        if device.compute_follows_caller and not is_there:
            device.small_copy_stream.wait(device.compute_stream.record())
        self._copy(target, tensor, Direction.D2H, lanes.HIDDEN).wait()
        return target

    def bundle_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `to_host`, for several tensors in one copy, which pays the link's latency once."""
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
        """Host memory to fill for `to_device`; waits until its previous content has been copied to the device."""
        device, needed = self.device, math.prod(shape) * dtype.itemsize
        if self._going_up is not None:
            self._going_up.wait()
        if min(self._up.nbytes, self._landed.nbytes) < needed:
            device.compute_stream.synchronize()
            self._up.free()
            self._landed.get(needed)
            self._up.get(self._landed.nbytes)
        return self._up.get(needed).view(dtype).view(shape)

    def to_device(self, outgoing: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Copies `outgoing` to the device: the target tensor, and the event of the copy.

        The target is valid until the next call, whose copy waits for the event given to `read_until`.
        """
        stream = self.device.small_copy_stream
        landed = _as(self._landed.get(outgoing.nbytes), outgoing)
        if self._read is not None:
            stream.wait(self._read)
            self._read = None
        self._going_up = self._copy(landed, outgoing, Direction.H2D, lanes.RESULTS)
        return landed, self._going_up

    def read_until(self, event: Event) -> None:
        """The last result of `to_device` may be read until this event."""
        self._read = event

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory for the compute stream, reused by each layer."""
        needed = math.prod(shape) * dtype.itemsize
        if self._rows.nbytes < needed:
            self.device.compute_stream.synchronize()
        return self._rows.get(needed).view(dtype).view(shape)

    def _room(self, needed: int) -> torch.Tensor:
        """Device memory of so many bytes, or some more if there is plenty."""
        memory, roomy = self.device.memory, _roomy(needed)
        if roomy <= memory.free // _ROOMY_SHARE:
            with contextlib.suppress(DeviceMemoryError):
                return memory.allocate(roomy, MemoryCategory.ACTIVATIONS)
        return memory.allocate(needed, MemoryCategory.ACTIVATIONS)

    @property
    def nbytes(self) -> int:
        """Device memory that `shrink` would free."""
        return self._landed.nbytes + self._rows.nbytes

    def shrink(self) -> int:
        """Frees the device's buffers until the next step needs some, perhaps smaller ones; returns the bytes freed."""
        freed = self.nbytes
        if freed:
            if self._going_up is not None:
                self._going_up.wait()
            self.device.compute_stream.synchronize()
            self.forget_uses()
            for buffer in (self._up, self._landed, self._rows):
                buffer.free()
        return freed

    def forget_uses(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._going_up = self._read = None

    def close(self) -> None:
        """Frees the buffers, which must no longer be in use.  Idempotent."""
        self._bundles = {}
        for buffer in (self._down, self._up, self._landed, self._rows, self._packed, self._landed_bundle):
            buffer.free()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, direction: Direction, name: int) -> Event:
        return self.device.small_copy_stream.copy(target, source, (name, None, -1, 1), direction=direction)

    def _new_bundle(self, tensors: Sequence[torch.Tensor]) -> _Bundle:
        sizes = [_aligned(tensor.nbytes) for tensor in tensors]
        needed = sum(sizes)
        if min(self._packed.nbytes, self._landed_bundle.nbytes) < needed:
            self._bundles = {}  # of memory that goes
        packed, landed = self._packed.get(needed), self._landed_bundle.get(needed)
        pieces, landed_pieces = (
            [_as(piece, tensor) for tensor, piece in zip(tensors, torch.split(whole, sizes), strict=True)]
            for whole in (packed, landed)
        )
        return _Bundle(packed, pieces, landed, landed_pieces)


def _as(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _roomy(nbytes: int) -> int:
    """Rounds up to a power of two or to whole MiB, so that a slightly longer prompt needs no new buffer."""
    return max(4096, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20
