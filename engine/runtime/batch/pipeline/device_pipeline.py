"""The layers of a model on a device, by a schedule: who has which layer's experts, and what a schedule's steps do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError
from engine.errors import EngineError
from engine.experts.dispatch import BANK_LAYER, compute_experts, interrupted_by_experts
from engine.experts.dispatcher import HybridExperts, Misses
from engine.experts.whole_layer import LayerBuffers
from engine.kernels.native.library import load_kernels
from engine.kernels.native.paged_attention import Pieces
from engine.runtime.batch.layers import DecoderLayers, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.host_attention import AttendedAhead, HostAttention
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun, ask
from engine.runtime.batch.pipeline.schedules import ORDERS, Schedule
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.recorder import RECORDER


class Batch(Protocol):
    """Rows that go through a layer at once, as `packed_sweep` has them."""

    pieces: Pieces
    recording: Recording
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Site:
    """An experts module and its number among those of the buffers."""

    number: int
    experts: HybridExperts


class DevicePipeline:
    """Sweeps of one model on one device.  By one thread; between two layers anybody may use the model.

    The buffers take the memory of expert caches, which have it back at the end.

    Args:
        states: the pages of the model's attention modules.

    Raises:
        LookupError: the model's experts are not brought to a single device, a layer at a time.
        DeviceMemoryError: the device has no room for two layers.
    """

    def __init__(self, loaded: LoadedModel, layers: DecoderLayers, states: PagedStates) -> None:
        if loaded.devices is None or len(loaded.devices.devices) != 1:
            raise LookupError("the model is not on one device")
        self._layers, self._states = layers, states
        self._held = loaded.devices.experts
        self.device: Device = loaded.devices.devices[0]
        self._sites, self._first_of = _sites_of(layers)
        modules = [site.experts for site in self._sites.values()]
        layouts = {experts.cache.layout for experts in modules}
        if len(layouts) != 1 or any(experts.mode is not Misses.MIXED for experts in modules):
            raise LookupError("its layers' experts are not alike")
        layout, most = layouts.pop(), max(experts.source.num_experts for experts in modules)
        missing = 2 * most * layout.nbytes - self.device.memory.free
        if missing > 0:
            self._held.give_back(0, missing)
        try:
            self._buffers = LayerBuffers(self.device, layout, [experts.source for experts in modules])
        except DeviceMemoryError:
            self._held.take_back()
            raise
        self._buffers.layer_numbers = [index for index, number in enumerate(self._first_of) if number is not None]
        self.experts = most
        # Another pool than the model's: that is busy with the layers of the next micro-batch meanwhile.
        self._kernels = load_kernels(torch.get_num_threads()) if loaded.kernels is not None else None
        self._attention = HostAttention(self.device, self._attend)

    def run(self, index: int, batches: Sequence[Batch], schedule: Schedule) -> None:
        """Takes all micro-batches through a layer.

        Raises:
            EngineError: the device failed, or a record could not be read; nothing is under way then.
        """
        RECORDER.layer = index
        try:
            with self._interrupting():
                ORDERS[schedule](_Layer(self, index, batches))
            self._attention.forget_ended()
        except BaseException:
            self._give_up()
            raise

    def begin(self, index: int, batch: Batch) -> LayerRun:
        """See `LayerWork.begin`."""
        return LayerRun(lambda: self._layers.run(index, batch.hidden, batch.recording))

    def attend(self, call: AttentionCall, pieces: Pieces, number: int, index: int, *, behind: bool) -> AttendedAhead:
        """See `LayerWork.attend_on_cpu`."""
        back = self.device.h2d_stream if behind else self.device.small_copy_stream
        value_dim = self._states.shapes[id(call.module)].value_dim
        try:
            return self._attention.begin(call, pieces, number, back, value_dim, index)
        except DeviceMemoryError as refused:
            if not self._held.give_back(0, refused.asked):
                raise
        return self._attention.begin(call, pieces, number, back, value_dim, index)

    def compute(self, call: ExpertsCall) -> torch.Tensor:
        """What a layer's experts make of a micro-batch, once all of them are there."""
        site = self._sites.get(id(call.module))
        if site is None or not call.index.numel():
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        half = self._buffers.load(site.number)
        result, end = self._buffers.compute(half, site.experts.make_kernel, call.hidden, call.index, call.weights)
        if not self.device.compute_follows_caller:
            end.wait()
        return result

    def bring_page(self, index: int, page: int, pages: int) -> None:
        """Begins to bring one of so many pages of the experts that come after those of this layer."""
        own = self._first_of[index]
        if own is not None:
            self._buffers.load(own)
        number = self._next(index)
        if number == own:
            return
        half, count = self._buffers.begin(number), self._buffers.experts_of(number)
        self._buffers.bring(half, range(page * count // pages, (page + 1) * count // pages))

    def close(self) -> None:
        """Gives all memory back.  Harmless if repeated."""
        self._attention.close()
        self._buffers.close()
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
        self._held.take_back()

    def _next(self, index: int) -> int:
        cycle = (*self._first_of[index + 1 :], *self._first_of[: index + 1])
        return next(number for number in cycle if number is not None)

    def _attend(
        self, module: Any, pieces: Pieces, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return self._states.attend_rows(self._kernels, module, pieces, queries, keys, values)

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        """Layers stop where they attend and where they want experts."""
        self._states.elsewhere = lambda module, queries, keys, values: ask(AttentionCall(module, queries, keys, values))
        try:
            with interrupted_by_experts(
                lambda module, hidden, index, weights: ask(ExpertsCall(module, hidden, index, weights))
            ):
                yield
        finally:
            self._states.elsewhere = None

    def _give_up(self) -> None:
        self._attention.settle()
        with contextlib.suppress(EngineError):
            self.device.recover()
        self._buffers.forget()


class _Layer:
    """See `LayerWork`."""

    def __init__(self, pipeline: DevicePipeline, index: int, batches: Sequence[Batch]) -> None:
        self._pipeline, self._index, self._batches = pipeline, index, batches
        self.count = len(batches)

    def begin(self, number: int) -> LayerRun:
        return self._pipeline.begin(self._index, self._batches[number])

    def attend_on_cpu(self, number: int, run: LayerRun, *, behind_weights: bool = False) -> AttendedAhead:
        call = run.call
        assert isinstance(call, AttentionCall)
        pieces = self._batches[number].pieces
        return self._pipeline.attend(call, pieces, number, self._index, behind=behind_weights)

    def finish(self, number: int, run: LayerRun) -> None:
        while run.call is not None:
            if isinstance(run.call, ExpertsCall):
                run.answer(self._pipeline.compute(run.call))
            else:
                run.answer(self.attend_on_cpu(number, run).take())
        self._batches[number].hidden = run.result

    def bring_page(self, page: int, pages: int) -> None:
        self._pipeline.bring_page(self._index, page, pages)


def _sites_of(layers: DecoderLayers) -> tuple[dict[int, _Site], list[int | None]]:
    """(experts modules by identity, number of each layer's experts if it has any)."""
    sites: dict[int, _Site] = {}
    first_of: list[int | None] = []
    for index in range(len(layers)):
        found = [
            (module, module.__dict__[BANK_LAYER][1])
            for module in layers[index].modules()
            if BANK_LAYER in module.__dict__
        ]
        first_of.append(len(sites) if found else None)
        if len(found) > 1:
            raise LookupError("a layer has several sets of experts")
        for module, experts in found:
            if not isinstance(experts, HybridExperts):
                raise LookupError("its experts are not brought to a device")
            sites[id(module)] = _Site(len(sites), experts)
    if not sites:
        raise LookupError("it has no experts")
    return sites, first_of
