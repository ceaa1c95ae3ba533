"""Whole-layer prefetch: copies all experts of the next layer over the link while this layer computes.

The baseline for on-demand caching (DuoServe, section V: "LFP").  It does not depend on the routing, so it waits only
for the link.

Decoder layers that come from disk for each pass: while one is computed, the next is read, and the last one leaves.

Kernels keep the addresses of weights, so these stay where they are and their pages come and go: files are mapped, a
thread reads what is next, and what has been used is given back.  A layer that is needed out of turn is brought all the
same, and one that nobody brought is read by the system, page by page: nothing but the time depends on the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.common import clock
from engine.common.errors import CancelCheck, EngineError, RequestCancelled, never_cancelled
from engine.common.footprint import LAYERS_AT_ONCE
from engine.devices.device import Device, Direction, Event
from engine.devices.failures import as_engine_error
from engine.devices.memory_budget import MemoryCategory
from engine.experts.direct_file import DirectFile, unreadable
from engine.experts.executor import ExpertExecutor
from engine.experts.file_image import MappedFile
from engine.experts.record_source import Arrivals, RecordSource
from engine.experts.vram_cache import KernelMaker, Segment
from engine.formats.tiles import RecordLayout
from engine.hardware.surroundings import count_as_used
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

STANDS_IN = "stands_in"
"""Attribute of a function that takes the place of a layer's `forward` and uses none of its weights."""
_PAGE = 4096
_PIECE = 8 * 2**20
_CLOSE = 2**16
"""Bytes between tensors that are read with them."""


def _mapped(path: Path) -> MappedFile:
    try:
        file = DirectFile(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        mapped = MappedFile(file, is_held=False)
    except (OSError, ValueError) as error:
        file.close()
        raise unreadable(path, error if isinstance(error, OSError) else EOFError()) from error
    mapped.watch()
    return mapped


@dataclass(frozen=True, slots=True)
class _Range:
    file: MappedFile
    begin: int
    end: int


class LayerStream:
    """The layers of a model that are not held.

    Attributes:
        nbytes: of all of them; bytes_read: so far.
    """

    def __init__(self, layers: Mapping[int, Sequence[TensorEntry]], window: int) -> None:
        self.nbytes = sum(entry.nbytes for entries in layers.values() for entry in entries)
        self.window, self.bytes_read = window, 0
        self._cancelled: CancelCheck = never_cancelled
        self._files: dict[Path, MappedFile] = {}
        try:
            for path in sorted({entry.file for entries in layers.values() for entry in entries}):
                self._files[path] = _mapped(path)
        except BaseException:
            self._close_files()
            raise
        self._places = {(entry.file, entry.offset) for entries in layers.values() for entry in entries}
        self._ranges = {layer: self._pages_of(entries) for layer, entries in layers.items()}
        self._order = sorted(self._ranges)
        self._coming: dict[int, Future[None]] = {}  # layers that are there or being read
        self._wanted, self._used, self._last = set[int](), set[int](), -1
        self._pool, self._closed = ThreadPoolExecutor(1, "layers-from-disk"), False
        count_as_used(window)

    def view(self, entry: TensorEntry) -> torch.Tensor | None:
        """The bytes of a tensor that comes and goes, uint8; None for all others."""
        if (entry.file, entry.offset) not in self._places:
            return None
        memory = memoryview(self._files[entry.file].memory)
        return torch.frombuffer(memory[entry.offset : entry.offset + entry.nbytes], dtype=torch.uint8)

    def follow(self, modules: Sequence[Any]) -> None:
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._before, layer))

    def _before(self, layer: int, module: Any, _arguments: Any) -> None:
        if not getattr(module.forward, STANDS_IN, False):
            self.enter(layer)

    @contextmanager
    def until(self, cancelled: CancelCheck) -> Iterator[None]:
        """Inside, whoever waits for a layer is told once this comes true: `RequestCancelled`, out of the forward, whose
        cache must not be used afterwards."""
        before, self._cancelled = self._cancelled, cancelled
        try:
            yield
        finally:
            self._cancelled = before

    def enter(self, layer: int) -> None:
        """Until the weights of this layer are there; those of the layers before are given back."""
        for before in self._used - {layer}:
            self._give_back(before)
        if layer not in self._ranges:
            self._read_ahead()
            return
        if layer not in self._coming:  # not the one that follows
            self._give_back(*self._coming)
            self._begin(layer)
        self._used.add(layer)
        self._read_ahead()
        future = self._coming[layer]
        while not wait([future], 0.1).done:
            if self._cancelled():
                raise RequestCancelled
        failure = None if future.cancelled() else future.exception() or self._shortened(layer)
        if failure is not None:
            self._give_back(*self._coming)
            self._last = -1
            if isinstance(failure, OSError | EOFError):
                raise unreadable(self._ranges[layer][0].file.file.path, failure) from failure
            raise failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._give_back(*self._coming)
        self._close_files()
        count_as_used(-self.window)

    def _close_files(self) -> None:
        for mapped in self._files.values():
            mapped.file.close()

    def _pages_of(self, entries: Sequence[TensorEntry]) -> list[_Range]:
        found: list[_Range] = []
        for entry in sorted(entries, key=lambda each: (each.file, each.offset)):
            file, begin = self._files[entry.file], entry.offset // _PAGE * _PAGE
            end = min(-(-(entry.offset + entry.nbytes) // _PAGE) * _PAGE, -(-file.nbytes // _PAGE) * _PAGE)
            if found and found[-1].file is file and begin - found[-1].end <= _CLOSE:
                found[-1] = _Range(file, found[-1].begin, max(end, found[-1].end))
            else:
                found.append(_Range(file, begin, end))
        return found

    def _shortened(self, layer: int) -> EOFError | None:
        try:
            for each in {id(each.file): each.file for each in self._ranges[layer]}.values():
                each.check()
        except EOFError as error:
            return error
        return None

    def _begin(self, layer: int) -> None:
        self._wanted.add(layer)  # before the thread looks
        self._last, self._coming[layer] = layer, self._pool.submit(self._bring, layer)

    def _read_ahead(self) -> None:
        while self._last >= 0 and len(self._coming) < LAYERS_AT_ONCE:
            following = self._order[(self._order.index(self._last) + 1) % len(self._order)]
            if following in self._coming:
                break
            self._begin(following)

    def _give_back(self, *layers: int) -> None:
        for layer in layers:
            self._used.discard(layer)
            self._wanted.discard(layer)
            future = self._coming.pop(layer, None)
            if future is not None and not future.cancel():  # at once, or when it has stopped
                future.add_done_callback(lambda _, layer=layer: self._drop(layer))  # type: ignore[misc]

    def _drop(self, layer: int) -> None:
        for each in self._ranges[layer]:
            each.file.leave(each.begin, each.end)

    def _bring(self, layer: int) -> None:
        begun_ns = clock.now_ns()
        self._read(layer)
        if RECORDER.on:
            nbytes = sum(each.end - each.begin for each in self._ranges[layer])
            RECORDER.span(lanes.DISK, lanes.READ_AHEAD, begun_ns, clock.now_ns(), layer, nbytes=nbytes)

    def _read(self, layer: int) -> None:
        for each in self._ranges[layer]:
            for begin in range(each.begin, each.end, _PIECE):
                if self._closed or layer not in self._wanted:
                    return
                each.file.check()
                nbytes = min(_PIECE, each.end - begin)
                each.file.bring(begin, nbytes)
                self.bytes_read += nbytes


@dataclass
class Half:
    """One half of the double buffer: slots for one layer.

    Attributes:
        layer: index of the layer in it, or being copied to it.
        copied: event of each expert's copy, in copy order.
        last_use: end of the last computation from it.
    """

    segment: Segment
    layer: int | None = None
    copied: dict[int, Event] = field(default_factory=dict)
    last_use: Event | None = None


class LayerBuffers:
    """Double buffer of two layers on a device.  Not thread-safe.

    Args:
        sources: of all layers in call order; the first layer follows the last.
    """

    def __init__(self, device: Device, layout: RecordLayout, sources: Sequence[RecordSource]) -> None:
        self.device = device
        self.layer_numbers = list(range(len(sources)))
        """Decoder layer of each of its layers, for the timeline."""
        self.sources = sources
        experts = max(source.num_experts for source in sources)
        self._halves: list[Half] = []
        try:
            for _ in range(2):
                half = Half(Segment(device, layout, experts, 0, MemoryCategory.EXPERTS))
                self._halves.append(half)
                # A layer may have fewer experts, and kernels may multiply unused slots by 0: they must not hold NaN.
                half.segment.records.records.zero_()
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Device memory of both halves."""
        return sum(half.segment.records.records.nbytes for half in self._halves)

    def load(self, layer: int) -> Half:
        """The half that holds a layer, once `copied` is done; starts copying it if neither half does.

        Blocks for records that are not in RAM, reading as many at a time as RAM has slots for.
        """
        half = self.begin(layer)
        try:
            self.bring(half, range(self.experts_of(layer)))
        except BaseException:
            half.layer = None  # not all of its copies were started
            raise
        return half

    def begin(self, layer: int) -> Half:
        """The half that holds a layer, or is assigned to it; `bring` then copies missing experts."""
        for half in self._halves:
            if half.layer == layer:
                return half
        half = self._halves[0]
        self._halves.reverse()
        if half.last_use is not None:
            self.device.h2d_stream.wait(half.last_use)
            half.last_use = None
        half.layer, half.copied = layer, {}
        return half

    def bring(self, half: Half, experts: Sequence[int]) -> None:
        """Starts copying those of `experts` that the half lacks: in this order if in RAM, else as they arrive."""
        layer = half.layer
        assert layer is not None
        stream, copied = self.device.h2d_stream, half.copied
        slots = half.segment.records.records
        arrivals = Arrivals(self.sources[layer], [expert for expert in experts if expert not in copied])
        try:
            # Experts in RAM are copied while the others are read.
            for held, there in arrivals:
                for expert in there:
                    label = lanes.WHOLE_LAYER, self.layer_numbers[layer], expert, 1
                    event = stream.copy(slots[expert], held.record(expert), label, direction=Direction.H2D)
                    held.until(expert, event)
                    copied[expert] = event
        except BaseException:
            arrivals.release()
            raise

    def compute(
        self,
        half: Half,
        make_kernel: KernelMaker,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, Event]:
        """Submits the computation of a layer, after its copies.

        Tensor arguments as of `engine.kernels.interface.ExpertKernel`, on the device.

        Returns:
            The weighted sum, [T, H], and the event after which it is valid.
        """
        assert half.layer is not None
        experts, compute = self.experts_of(half.layer), self.device.compute_stream
        if RECORDER.on and (queued := RECORDER.queued) is not None:
            queued.routed(compute.record(), self.device.index)
        for event in list(half.copied.values())[-1:]:  # copies end in order
            compute.wait(event)
        result = torch.empty_like(hidden_states)
        kernel = half.segment.kernel(make_kernel)

        def work() -> None:
            # Slots beyond the layer's own experts may hold stale ones of another layer.
            ids = top_k_index.masked_fill(top_k_index >= experts, len(half.segment.slots))
            result.copy_(kernel(hidden_states, ids, top_k_weights))

        half.last_use = end = compute.submit(work, (lanes.EXPERTS, None, -1, experts))
        return result, end

    def experts_of(self, layer: int) -> int:
        """Number of experts in a layer."""
        return self.sources[layer].num_experts

    def forget(self) -> None:
        """Marks both halves empty after a failure, when the streams have recovered and contents are unknown."""
        for half in self._halves:
            half.layer, half.copied, half.last_use = None, {}, None

    def close(self) -> None:
        """Waits for copies and work in flight, then frees the memory.  Idempotent."""
        for half in self._halves:
            for event in half.copied.values():
                with contextlib.suppress(EngineError):
                    event.wait()
        with contextlib.suppress(EngineError):
            self.device.compute_stream.synchronize()
        while self._halves:
            self._halves.pop().segment.release()


class WholeLayerExperts(ExpertExecutor):
    """Computes one layer entirely on the device.

    Args:
        buffers: shared by all layers of the device, which are called one at a time, from one thread.
        layer: its index in the buffers.
        make_kernel: binds a kernel to slots; the same object for all layers that compute alike.
    """

    def __init__(self, buffers: LayerBuffers, layer: int, make_kernel: KernelMaker) -> None:
        super().__init__(buffers.sources[layer], layer)
        self._buffers, self._layer, self._make_kernel = buffers, layer, make_kernel
        self._next, self._device = (layer + 1) % len(buffers.sources), buffers.device

    def number_in_model(self, number: int) -> None:
        self._buffers.layer_numbers[self._layer] = number

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device."""
        if not top_k_index.numel():
            return torch.zeros_like(hidden_states)
        buffers = self._buffers
        try:
            half = buffers.load(self._layer)
            result, end = buffers.compute(half, self._make_kernel, hidden_states, top_k_index, top_k_weights)
            buffers.load(self._next)
            if not self._device.compute_follows_caller or end.failure is not None:
                end.wait()
        except BaseException as error:
            with contextlib.suppress(EngineError):
                self._device.recover()
            buffers.forget()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise as_engine_error(error, f"{self._device.name} experts") from None
        return result
