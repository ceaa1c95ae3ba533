"""Whole-layer prefetch: copies all experts of the next layer over the link while this layer computes.

The baseline for on-demand caching (DuoServe, section V: "LFP").  It does not depend on the routing, so it waits only
for the link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.common.errors import EngineError
from engine.devices.device import Device, Direction, Event
from engine.devices.failures import as_engine_error
from engine.devices.memory_budget import MemoryCategory
from engine.experts.executor import ExpertExecutor
from engine.experts.record_source import Arrivals, RecordSource
from engine.experts.slot_segments import KernelMaker, Segment
from engine.formats.layouts import RecordLayout
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


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

    Raises:
        DeviceMemoryError: two layers do not fit.
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

        Raises:
            EngineError: the device failed, or a record could not be read.
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
        """Starts copying those of `experts` that are missing in the half: in this order if in RAM, else as they arrive.

        Raises:
            EngineError: the device failed, or a record could not be read.
        """
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
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device.

        Raises:
            EngineError: a kernel or a copy failed, or a record could not be read.
        """
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
