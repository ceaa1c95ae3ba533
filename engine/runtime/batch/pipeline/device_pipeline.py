"""Runs a model's layers on a device under a schedule: implements the schedule's steps.

Where a schedule attends on the CPU, states come to RAM and hidden states go back (MoE-Lightning, 4.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch

from engine.common import clock
from engine.common.costs import Cost, CostModel
from engine.common.errors import EngineError
from engine.common.falls import FALLS, passed_over
from engine.devices.device import Device, Direction, Event, Stream
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory, with_room
from engine.experts.activations import Buffer
from engine.kernels.native.library import load_kernels
from engine.kernels.native.paged_attention import Pieces
from engine.planner.schedules import Schedule
from engine.runtime.batch.layers import DecoderLayers, MicroBatch
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.device_attention import CacheAhead, SharedAttention, StayingPages
from engine.runtime.batch.pipeline.layer_experts import LayerExperts, SharedLayerExperts
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun, with_matrices
from engine.runtime.batch.pipeline.paged import PlacedRows, work_of
from engine.runtime.load.timed_card import LAUNCHES
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

T = TypeVar("T")

KEPT_PAGES = "Keeping keys and values on the card"
"""What gives way where there is no room for them."""

AttendedAhead = Callable[[], torch.Tensor]
"""The attention output of a micro-batch, still being computed: [1, T, heads, value_dim] once it is on the device.

Raises:
    EngineError: the device failed, or there was no memory for attention.
"""


class DevicePipeline:
    """Sweeps of one model on one device.  For a single thread; between two layers others may use the model.

    Args:
        states: the pages of the model's attention modules.
        resident: see `LayerExperts`.

    Raises:
        LookupError: the model's experts are neither loaded to a single device nor shared by several, layer by layer.
        DeviceMemoryError: a device has no room for two layers.
    """

    def __init__(
        self, loaded: LoadedModel, layers: DecoderLayers, states: PagedStates, resident: float | None = None
    ) -> None:
        if loaded.devices is None:
            raise LookupError("the model is on no device")
        if any(loaded.devices.layers.of_layer):
            raise LookupError(
                "the cards share layers: a layer's experts come over one link, with --sharing experts over all"
            )
        self._layers, self._states = layers, states
        self._modules = [with_matrices(layers[index]) for index in range(len(layers))]
        self._held = loaded.devices.experts
        self.device: Device = loaded.devices.devices[0]
        config = loaded.model.config.get_text_config(decoder=True)
        self.experts_per_token: int = getattr(config, "num_experts_per_tok", None) or 1
        self.experts = SharedLayerExperts(self._held, layers, self.experts_per_token, resident)
        self._costs = self.experts.costs[0]
        self._device_attention = SharedAttention(self._held, self.experts.give_back_of, self.experts.costs)
        self._attention = HostAttention(self.device, states, self._costs, is_native=loaded.kernels is not None)

    @property
    def keeps_pages(self) -> bool:
        """Whether some keys and values are on the device, so that attention has to be computed there."""
        return bool(self._device_attention.staying.count)

    def keep_pages(self, share: float, among: int, staged: int) -> None:
        """Keeps a share of the first `among` pages of each layer on the device, as long as there is memory for them.

        Args:
            staged: pages of a micro-batch that come from RAM.
        """
        try:
            layers = [layer for layer, _ in self._states.layers]
            self._device_attention.keep(layers, StayingPages(share, among), staged)
        except DeviceMemoryError:
            why = "the graphics card has no room for the share that was planned"
            FALLS.say(KEPT_PAGES, "keys and values in RAM", why)
        else:
            FALLS.is_over(KEPT_PAGES)

    def leave_pages(self) -> None:
        """Takes all keys and values back to RAM, so that attention may be computed anywhere.

        Raises:
            EngineError: the device failed.
        """
        self._device_attention.leave()

    def attend_now(self, module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention on the device outside of a schedule, see `PagedStates.elsewhere`."""
        assert self._states.pieces is not None
        cache = self._fetched(module, self._states.pieces, RECORDER.layer)
        attended = self.attend_there(RECORDER.layer, AttentionCall(module, queries, keys, values), cache)
        self._device_attention.finish()
        return attended

    def sweep(self, batches: Sequence[MicroBatch], schedule: Schedule) -> Generator[None, None, None]:
        """Takes all micro-batches through all layers; yields after each layer, when others may use the model.

        Raises:
            EngineError: the device failed, or a record could not be read; no work is left in flight.
        """
        self.experts.each(lambda card: card.begin(whole=schedule.whole_layers))
        layers = [_Layer(self, index, batches) for index in range(len(self._layers))]
        assert schedule.order is not None, schedule.name
        order = schedule.order(layers)
        try:
            for index in range(len(self._layers)):
                next(order)
                if index == len(self._layers) - 1:
                    self._device_attention.finish()
                    self._observe_layer(layers[0], batches[0].hidden.shape[1])
                self._attention.forget_ended()
                self.experts.each(partial(LayerExperts.leave, index=index))
                yield
        except BaseException:  # includes closing the generator early
            for layer in layers:
                layer.runs.clear()
            self._abort()
            raise

    def begin(self, index: int, batch: MicroBatch) -> LayerRun:
        RECORDER.layer = index
        if (meter := self.device.meter) is not None:  # the library computes the layer on the host's tensors
            dense = [each for each in self._layers[index].parameters() if each.numel()]
            nbytes, weights = sum(each.nbytes for each in dense), sum(each.numel() for each in dense)
            flops = 2.0 * weights * batch.hidden.shape[1]
            self.device.compute_stream.submit(lambda: meter.kernel(nbytes, flops, LAUNCHES))
        forward = partial(self._layers.run, index, batch.hidden, batch.recording)
        return LayerRun(forward, self._modules[index], self._states)

    def _observe_layer(self, layer: _Layer, rows: int) -> None:
        """One layer of each sweep says what all but attention and experts takes."""
        took_s = 0.0
        for begun, ended in layer.marks:
            if isinstance(begun, float):
                took_s += ended - begun
            elif begun.done() and ended.done():
                took_s += ended.ended_s - begun.ended_s
        if layer.marks:
            self._costs.observe(Cost.CARD_LAYER, rows, took_s)

    def marked(self, layer: _Layer, number: int, step: Callable[[], T]) -> T:
        """A step of one that is looked at."""
        if not layer.is_first or number or not self._costs.knows(Cost.CARD_LAYER):
            return step()
        mark = self.device.compute_stream.record if self.device.compute_follows_caller else clock.now
        begun = mark()
        found = step()
        layer.marks.append((begun, mark()))
        return found

    def attend(self, call: AttentionCall, pieces: Pieces, number: int, index: int, *, behind: bool) -> AttendedAhead:
        back = self.device.h2d_stream if behind else self.device.small_copy_stream
        return with_room(partial(self._attention.begin, call, pieces, number, back, index), self.experts.give_back)

    def fetch_cache(self, index: int, pieces: Pieces) -> list[CacheAhead]:
        module = next(module for module in self._layers[index].modules() if id(module) in self._states.shapes)
        return self._fetched(module, pieces, index)

    def _fetched(self, module: Any, pieces: Pieces, index: int) -> list[CacheAhead]:
        layer, terms = self._states.layer_of(module)[0], self._states.terms_of(module)
        return self._device_attention.fetch(layer, terms, pieces, index)

    def attend_there(self, index: int, call: AttentionCall, cache: Sequence[CacheAhead]) -> torch.Tensor:
        return self._device_attention.attend(call, cache, self._states.terms_of(call.module), index)

    def close(self) -> None:
        """Frees all memory.  Safe to call twice."""
        self._attention.close()
        self._device_attention.close()
        self.experts.each(LayerExperts.close)

    def _abort(self) -> None:
        self._attention.settle()
        self._device_attention.settle()
        for device in self._held.devices:
            with contextlib.suppress(EngineError):
                device.recover()
        self.experts.forget()


class _Layer:
    """See `LayerWork`: one layer's work on a device.

    Attributes:
        is_first: of all layers.
        runs: micro-batches that are inside the layer.
        attended, caches: what is on its way for them.
        marks: before and after each step of the first of them, where it is looked at.
    """

    def __init__(self, pipeline: DevicePipeline, index: int, batches: Sequence[MicroBatch]) -> None:
        self.pipeline, self._index, self._batches = pipeline, index, batches
        self.is_first = not index
        self.runs: dict[int, LayerRun] = {}
        self.marks: list[tuple[Any, Any]] = []
        self.attended: dict[int, AttendedAhead] = {}
        self.caches: dict[int, list[CacheAhead]] = {}

    @property
    def count(self) -> int:
        return len(self._batches)

    def begin(self, number: int) -> None:
        begin = partial(self.pipeline.begin, self._index, self._batches[number])
        self.runs[number] = self.pipeline.marked(self, number, begin)

    def attend_in_ram(self, number: int, *, behind_weights: bool = False) -> None:
        call = self.runs[number].call
        if isinstance(call, AttentionCall):
            pieces = self._batches[number].pieces
            self.attended[number] = self.pipeline.attend(call, pieces, number, self._index, behind=behind_weights)

    def take_attended(self, number: int) -> None:
        if number in self.attended:
            self._answer(number, self.attended.pop(number)())

    def fetch_cache(self, number: int) -> None:
        self.caches[number] = self.pipeline.fetch_cache(self._index, self._batches[number].pieces)

    def attend_on_device(self, number: int) -> None:
        run, cache = self.runs[number], self.caches.pop(number)
        if isinstance(run.call, AttentionCall):
            self._answer(number, self.pipeline.attend_there(self._index, run.call, cache))

    def bring_page(self, page: int, pages: int) -> None:
        self.pipeline.experts.each(lambda card: card.bring_page(self._index, page, pages))

    def bring_layer(self) -> None:
        self.pipeline.experts.each(lambda card: card.bring_layer(self._index))

    def bring_hot(self, *, of_next: bool = False) -> None:
        self.pipeline.experts.each(lambda card: card.bring_hot(self._index, of_next=of_next))

    def bring_wanted(self) -> None:
        self.pipeline.experts.bring_wanted(list(self._expert_calls(self.runs).values()))

    def compute_together(self, numbers: Sequence[int]) -> None:
        calls = self._expert_calls(numbers)
        if calls:
            results = self.pipeline.experts.compute_together(list(calls.values()))
            for number, result in zip(calls, results, strict=True):
                self.runs[number].answer(result)

    def compute_in_ram(self, number: int) -> None:
        run = self.runs[number]
        while isinstance(run.call, ExpertsCall):
            run.answer(self.pipeline.experts.compute_in_ram(run.call))

    def finish(self, number: int) -> None:
        RECORDER.layer = self._index
        run = self.runs[number]
        while run.call is not None:
            if isinstance(run.call, ExpertsCall):
                self._answer(number, self.pipeline.experts.compute(run.call))
            else:
                self.attend_in_ram(number)
                self.take_attended(number)
        self._batches[number].hidden = self.runs.pop(number).result

    def _answer(self, number: int, given: torch.Tensor) -> None:
        self.pipeline.marked(self, number, partial(self.runs[number].answer, given))

    def _expert_calls(self, numbers: Iterable[int]) -> dict[int, ExpertsCall]:
        """The calls of those that need experts."""
        calls = {number: self.runs[number].call for number in sorted(numbers)}
        return {number: call for number, call in calls.items() if isinstance(call, ExpertsCall)}


class HostAttention:
    """A thread that computes attention, one micro-batch after the other.

    Args:
        states: the pages of the model's attention modules.
        costs: that is told how long it took.
        is_native: whether native kernels compute.
    """

    def __init__(self, device: Device, states: PagedStates, costs: CostModel, *, is_native: bool) -> None:
        self._device, self._states, self._costs = device, states, costs
        # A separate pool: the model's own is busy with the next micro-batch's layers meanwhile.
        self._kernels = load_kernels(torch.get_num_threads()) if is_native else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch attention")
        self._buffers = dict[int, tuple[Buffer, Buffer, Buffer]]()
        """Of each micro-batch: for states and for the output on the host, and for the output on the device."""
        self._under_way: list[Future[Event]] = []

    def begin(self, call: AttentionCall, pieces: Pieces, number: int, back: Stream, layer: int) -> AttendedAhead:
        """Copies a micro-batch's states to RAM and queues its attention (MoE-Lightning, 4.1).

        Args:
            number: number of the micro-batch; each number may be in flight once.
            back: the stream that copies the output back.

        Raises:
            DeviceMemoryError: the device has no room for the output.
        """
        device = self._device
        parts = [states[0].transpose(0, 1) for states in (call.queries, call.keys, call.values)]
        tokens, dtype = parts[0].shape[0], parts[0].dtype
        packed = torch.cat([part.reshape(tokens, -1) for part in parts], dim=1)
        for_states, for_output, for_landed = self._buffers.setdefault(number, self._new_buffers())
        states = for_states.get(packed.nbytes).view(dtype).view(packed.shape)
        shape = (tokens, parts[0].shape[1], self._states.shapes[id(call.module)].value_dim)
        nbytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        landed, outgoing = (each.get(nbytes).view(dtype).view(shape) for each in (for_landed, for_output))
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
                outgoing.copy_(self._states.attend_rows(self._kernels, call.module, pieces, queries, keys, values))
            took_s, (paged, _) = perf_counter() - begun_s, self._states.layer_of(call.module)
            nbytes, flops = work_of(paged, self._states.terms_of(call.module), PlacedRows(pieces))
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

        def take() -> torch.Tensor:
            event = future.result()
            device.compute_stream.wait(event)
            if not device.compute_follows_caller:
                event.wait()
            return landed[None]

        return take

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
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.free()
        self._buffers = {}

    def _new_buffers(self) -> tuple[Buffer, Buffer, Buffer]:
        host, memory = self._device.host_memory, self._device.memory
        landed = Buffer(partial(memory.allocate, category=MemoryCategory.ACTIVATIONS), memory.release)
        return Buffer(host.allocate, host.release), Buffer(host.allocate, host.release), landed


def _computable(states: torch.Tensor) -> torch.Tensor:
    return states if states.dtype in (torch.bfloat16, torch.float32) else states.float()
