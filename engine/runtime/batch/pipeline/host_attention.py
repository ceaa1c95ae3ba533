"""Attention on the CPU alongside the device: states come to RAM, hidden states go back (MoE-Lightning, 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch

from engine.common import clock
from engine.common.costs import Cost, CostModel
from engine.common.falls import passed_over
from engine.devices.device import Device, Direction, Event, Stream
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.native.paged_attention import Pieces
from engine.runtime.batch.pipeline.layer_run import AttentionCall
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

Attend = Callable[[Any, Pieces, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Module, rows, queries, keys and values [T, heads, dim] in RAM -> [T, heads, value_dim]."""


class _TransferBuffers:
    """Transfer buffers of one micro-batch: on the host, and on the device for the attention output."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: torch.Tensor | None = None
        self._back: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None

    def states(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory for states."""
        if self._host is None or self._host.nbytes < like.nbytes:
            self._release_host()
            self._host = self._device.host_memory.allocate(like.nbytes)
        return self._host[: like.nbytes].view(like.dtype).view(like.shape)

    def attended(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(host memory, device memory) of `nbytes` bytes.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        if self._back is None or self._landed is None or self._back.nbytes < nbytes:
            self._release_back()
            self._landed = self._device.memory.allocate(nbytes, MemoryCategory.ACTIVATIONS)
            self._back = self._device.host_memory.allocate(nbytes)
        return self._back[:nbytes], self._landed[:nbytes]

    def release(self) -> None:
        """Frees everything."""
        self._release_host()
        self._release_back()

    def _release_host(self) -> None:
        if self._host is not None:
            self._device.host_memory.release(self._host)
        self._host = None

    def _release_back(self) -> None:
        if self._landed is not None:
            self._device.memory.release(self._landed)
        if self._back is not None:
            self._device.host_memory.release(self._back)
        self._landed = self._back = None


class AttendedAhead:
    """The attention output of a micro-batch, still being computed.

    Args:
        future: resolves to the event after which `landed` is on the device.
    """

    def __init__(self, device: Device, future: Future[Event], landed: torch.Tensor) -> None:
        self._device, self._future, self._landed = device, future, landed

    def take(self) -> torch.Tensor:
        """[1, T, heads, value_dim] on the device; waits until it is there.

        Raises:
            EngineError: the device failed, or there was no memory for attention.
        """
        event = self._future.result()
        self._device.compute_stream.wait(event)
        if not self._device.compute_follows_caller:
            event.wait()
        return self._landed[None]


class HostAttention:
    """A thread that computes attention, one micro-batch after the other.

    Args:
        attend: computes attention; only called by that thread.
        work: bytes and flops of that.
        costs: that is told how long it took.
    """

    def __init__(
        self, device: Device, attend: Attend, work: Callable[[Any, Pieces], tuple[float, float]], costs: CostModel
    ) -> None:
        self._device, self._attend, self._work, self._costs = device, attend, work, costs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch attention")
        self._places: dict[int, _TransferBuffers] = {}
        self._under_way: list[Future[Event]] = []

    def begin(
        self, call: AttentionCall, pieces: Pieces, number: int, back: Stream, value_dim: int, layer: int
    ) -> AttendedAhead:
        """Copies a micro-batch's states to RAM and queues its attention.

        Args:
            number: number of the micro-batch; each number may be in flight once.
            back: the stream that copies the output back.
            value_dim: of a head.

        Raises:
            DeviceMemoryError: the device has no room for the output.
        """
        device = self._device
        parts = [states[0].transpose(0, 1) for states in (call.queries, call.keys, call.values)]
        tokens, dtype = parts[0].shape[0], parts[0].dtype
        packed = torch.cat([part.reshape(tokens, -1) for part in parts], dim=1)
        place = self._places.setdefault(number, _TransferBuffers(device))
        states = place.states(packed)
        shape = (tokens, parts[0].shape[1], value_dim)
        nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        outgoing, landed = (memory.view(dtype).view(shape) for memory in place.attended(nbytes))
        if device.compute_follows_caller:
            device.small_copy_stream.wait(device.compute_stream.record())
        label = lanes.HIDDEN, layer, -1, 1
        sent = device.small_copy_stream.copy(states, packed, label, direction=Direction.D2H)
        widths = [part.shape[1] * part.shape[2] for part in parts]

        def attend() -> float:
            begun_s = perf_counter()
            queries, keys, values = (
                _computable(piece.view(part.shape))
                for piece, part in zip(torch.split(states, widths, 1), parts, strict=True)
            )
            with torch.inference_mode():
                outgoing.copy_(self._attend(call.module, pieces, queries, keys, values))
            took_s, (nbytes, flops) = perf_counter() - begun_s, self._work(call.module, pieces)
            if device.meter is not None:
                took_s = device.meter.processor_s(nbytes, flops, took_s)
            if self._costs.knows(Cost.CPU_ATTENTION):
                self._costs.observe(Cost.CPU_ATTENTION, nbytes, took_s)
            return took_s

        def come_back() -> Event:
            return back.copy(landed, outgoing, (lanes.RESULTS, layer, -1, 1), direction=Direction.H2D)

        def work() -> Event:
            sent.wait()
            begun_ns = clock.now_ns()
            attend()
            if RECORDER.on:
                RECORDER.span(lanes.CPU_ATTENTION, lanes.ATTENTION, begun_ns, clock.now_ns(), layer)
            return come_back()

        if device.meter is None:
            future = self._thread.submit(work)
        else:  # it is charged to the thread's own queue, and computed at once
            future = Future()
            with device.meter.clock.stopped():
                took_s = attend()
            back.wait(device.meter.beside(sent, took_s))
            future.set_result(come_back())
        self._under_way.append(future)
        return AttendedAhead(device, future, landed)

    def settle(self) -> None:
        """Waits until no work is left, whether it succeeds or fails."""
        for future in self._under_way:
            with passed_over("Attention under way was given up"):
                future.result().wait()
        self._under_way = []

    def forget_ended(self) -> None:
        """Drops completed work, so that `settle` does not wait for it."""
        self._under_way = [future for future in self._under_way if not future.done()]

    def close(self) -> None:
        """Ends the thread and frees the buffers.  Safe to call twice."""
        self.settle()
        self._thread.shutdown()
        for place in self._places.values():
            place.release()
        self._places = {}


def _computable(states: torch.Tensor) -> torch.Tensor:
    return states if states.dtype in (torch.bfloat16, torch.float32) else states.float()
