"""Attention on the device: keys and values of each micro-batch come from RAM, new ones go back (FlexGen, S4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from engine.common.falls import passed_over
from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import PAGE_TOKENS, AttentionTerms, PagedLayer, Piece, Pieces, attend
from engine.kernels.reference import attend_in_torch
from engine.runtime.batch.pipeline.layer_run import AttentionCall
from engine.telemetry import lanes


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of some rows, in row order.

    Attributes:
        all: page numbers in RAM [P].
        pieces: the rows, with page numbers on the device.
        changed: positions in `all` of pages that get new tokens.
    """

    all: torch.Tensor
    pieces: Pieces
    changed: torch.Tensor


class _PageMemory:
    """Memory for the pages of one micro-batch: on the device, and a staging area in RAM."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def halves(self, nbytes: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device memory, host memory) of keys and of values.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        if any(held.nbytes < wanted for (held, _), wanted in zip(self._memory, nbytes, strict=False)):
            self.release()
        while len(self._memory) < len(nbytes):
            wanted = nbytes[len(self._memory)]
            landed = self._device.memory.allocate(wanted, MemoryCategory.KV)
            self._memory.append((landed, self._device.host_memory.allocate(wanted)))
        return [(held[:wanted], host[:wanted]) for (held, host), wanted in zip(self._memory, nbytes, strict=True)]

    def release(self) -> None:
        for landed, host in self._memory:
            self._device.memory.release(landed)
            self._device.host_memory.release(host)
        self._memory = []


@dataclass(frozen=True, slots=True)
class CacheAhead:
    """Keys and values of a micro-batch in transfer to the device."""

    layer: PagedLayer
    on_device: PagedLayer
    pages: _Pages
    arrived: Future[Event]


class DeviceAttention:
    """Computes attention on the device over pages in RAM.  The device has room for two micro-batches.

    Args:
        kernels: native kernels that compute for an emulated device.
    """

    def __init__(self, device: Device, kernels: NativeKernels | None) -> None:
        self._device, self._kernels = device, kernels
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch cache")
        self._places = [_PageMemory(device), _PageMemory(device)]
        self._under_way: list[Future[Event]] = []

    def fetch(self, layer: PagedLayer, pieces: Pieces, index: int) -> CacheAhead:
        """Copies the keys and values of these rows to the device, after all weights already queued.

        Args:
            index: index of the layer, for the timeline.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        pages = _pages_of(pieces)
        place = self._places.pop(0)
        self._places.append(place)
        count = len(pages.all)
        stores = (layer.keys, layer.values)
        memory = place.halves([store[:1].nbytes * count for store in stores])
        views = [
            [part.view(store.dtype).view(count, *store.shape[1:]) for part in parts]
            for store, parts in zip(stores, memory, strict=True)
        ]
        on_device = PagedLayer.of(layer.shape, layer.kv_type, views[0][0], views[1][0])
        stream, label = self._device.h2d_stream, (lanes.KEYS_VALUES, index, -1, 1)

        def work() -> Event:
            for store, (landed, gathered) in zip(stores, views, strict=True):
                torch.index_select(store, 0, pages.all, out=gathered)
                event = stream.copy(landed, gathered, label, direction=Direction.H2D)
            return event

        return CacheAhead(layer, on_device, pages, self._submit(work))

    def attend(self, call: AttentionCall, ahead: CacheAhead, terms: AttentionTerms, index: int) -> torch.Tensor:
        """[1, T, heads, value_dim] on the device; starts copying new keys and values back to RAM.

        Raises:
            EngineError: the device failed.
        """
        device, pages = self._device, ahead.pages
        compute, arrived = device.compute_stream, ahead.arrived.result()
        compute.wait(arrived)
        queries, keys, values = (
            states[0].transpose(0, 1).contiguous() for states in (call.queries, call.keys, call.values)
        )
        shape = ahead.on_device.shape
        result = queries.new_empty(len(queries), shape.heads, shape.value_dim)
        changed, packed = pages.changed.to(device.torch_device), list[torch.Tensor]()

        def work() -> None:
            if self._kernels is not None and queries.dtype in (torch.bfloat16, torch.float32):
                struct = ahead.on_device.struct(terms)
                result.copy_(attend(self._kernels, struct, pages.pieces, queries, keys, values))
            else:
                result.copy_(attend_in_torch(ahead.on_device, terms, pages.pieces, queries, keys, values))
            packed.extend(there.index_select(0, changed) for there in (ahead.on_device.keys, ahead.on_device.values))

        end = compute.submit(work, (lanes.ATTENTION, index, -1, 1))
        if not device.compute_follows_caller:
            end.wait()
        device.d2h_stream.wait(end)

        def store() -> Event:
            end.wait()
            numbers = pages.all[pages.changed]
            stores = (ahead.layer.keys, ahead.layer.values)
            for into, new in zip(stores, packed, strict=True):
                landed = torch.empty(new.shape, dtype=new.dtype)
                label = lanes.KEYS_VALUES, index, -1, 1
                event = device.d2h_stream.copy(landed, new, label, direction=Direction.D2H)
                event.wait()
                into.index_copy_(0, numbers, landed)
            return event

        self._submit(store)  # the same thread runs it before the next `fetch` into this place
        return result[None]

    def settle(self) -> None:
        """Waits until no work is left, whether it succeeds or fails."""
        for future in self._under_way:
            with passed_over("Attention under way was given up"):
                future.result().wait()
        self._under_way = []

    def finish(self) -> None:
        """Waits until all new keys and values are in RAM; rows must not advance before.

        Raises:
            EngineError: the device failed.
        """
        for future in self._under_way:
            future.result().wait()
        self._under_way = []

    def close(self) -> None:
        """Ends the thread and frees the memory.  Safe to call twice."""
        self.settle()
        self._thread.shutdown()
        for place in self._places:
            place.release()

    def _submit(self, work: Callable[[], Event]) -> Future[Event]:
        def run() -> Event:
            with torch.inference_mode():
                return work()

        future = self._thread.submit(run)
        self._under_way.append(future)
        return future


def _pages_of(pieces: Pieces) -> _Pages:
    numbers, moved, changed, begin = list[torch.Tensor](), list[Piece](), list[int](), 0
    for piece in pieces.pieces:
        count = -(-(piece.held + piece.tokens) // PAGE_TOKENS)
        numbers.append(piece.pages[:count])
        moved.append(Piece(torch.arange(begin, begin + count, dtype=torch.int32), piece.held, piece.tokens))
        changed += range(begin + piece.held // PAGE_TOKENS, begin + count)
        begin += count
    return _Pages(torch.cat(numbers).long(), Pieces(moved), torch.tensor(changed))
