"""The layers of a model on a device, by a schedule: who has which layer's experts, and what a schedule's steps do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.devices.device import Device, Event
from engine.devices.memory_budget import DeviceMemoryError
from engine.errors import EngineError
from engine.experts.dispatch import BANK_LAYER, compute_experts, interrupted_by_experts
from engine.experts.dispatcher import HybridExperts, Misses
from engine.experts.partial_sums import PartialSums
from engine.experts.prediction.batch_correlation import BatchCorrelation
from engine.experts.routing import Routing
from engine.experts.whole_layer import LayerBuffers
from engine.kernels.native.library import load_kernels
from engine.kernels.native.paged_attention import Pieces
from engine.runtime.batch.layers import DecoderLayers, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.device_attention import CacheAhead, DeviceAttention
from engine.runtime.batch.pipeline.host_attention import AttendedAhead, HostAttention
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun, ask
from engine.runtime.batch.pipeline.schedules import ORDERS, Schedule
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
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
        self._whole = True
        self._routing: tuple[ExpertsCall, Routing] | None = None
        # Another pool than the model's: that is busy with the layers of the next micro-batch meanwhile.
        self._kernels = load_kernels(torch.get_num_threads()) if loaded.kernels is not None else None
        self._attention = HostAttention(self.device, self._attend)
        self._device_attention = DeviceAttention(self.device, self._held.kernels)
        self._uses = BatchCorrelation(len(modules), most)
        config = loaded.model.config.get_text_config(decoder=True)
        self.experts_per_token: int = getattr(config, "num_experts_per_tok", None) or 1

    def sweep(self, batches: Sequence[Batch], schedule: Schedule) -> Generator[None, None, None]:
        """Takes all micro-batches through all layers; stops behind each, where anybody may use the model.

        Raises:
            EngineError: the device failed, or a record could not be read; nothing is under way then.
        """
        self._whole = schedule not in (Schedule.HOT_ONLY, Schedule.KLOTSKI)
        order = ORDERS[schedule]([_Layer(self, index, batches) for index in range(len(self._layers))])
        try:
            for index in range(len(self._layers)):
                with self._interrupting():
                    next(order)
                if index == len(self._layers) - 1:
                    self._device_attention.finish()
                self._attention.forget_ended()
                self._routing = None
                yield
        except BaseException:  # also of somebody who wants no more of it
            order.close()
            self._give_up()
            raise

    def begin(self, index: int, batch: Batch) -> LayerRun:
        """See `LayerWork.begin`."""
        RECORDER.layer = index
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

    def fetch_cache(self, index: int, pieces: Pieces) -> CacheAhead:
        """See `LayerWork.fetch_cache`."""
        module = next(module for module in self._layers[index].modules() if id(module) in self._states.shapes)
        layer = self._states.layer_of(module)[0]
        try:
            return self._device_attention.fetch(layer, pieces)
        except DeviceMemoryError as refused:
            if not self._held.give_back(0, refused.asked):
                raise
        return self._device_attention.fetch(layer, pieces)

    def attend_there(self, index: int, call: AttentionCall, cache: CacheAhead) -> torch.Tensor:
        """See `LayerWork.attend_on_device`."""
        return self._device_attention.attend(call, cache, self._states.terms_of(call.module), index)

    def compute(self, call: ExpertsCall) -> torch.Tensor:
        """What a layer's experts make of a micro-batch, once all of them are there."""
        site = self._sites.get(id(call.module))
        if site is None or not call.index.numel():
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        half = self._buffers.load(site.number) if self._whole else self._buffers.begin(site.number)
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

    def bring_hot(self, index: int, *, of_next: bool) -> None:
        """See `LayerWork.bring_hot`."""
        number = self._next(index) if of_next else self._first_of[index]
        if number is not None:
            half = self._buffers.begin(number)
            self._buffers.bring(half, self._uses.hot(number, self.experts_per_token))

    def bring_wanted(self, calls: Sequence[ExpertsCall]) -> None:
        """See `LayerWork.bring_wanted`."""
        for number, routing in self._routings(calls):
            wanted = sorted(routing.experts, key=lambda expert: -routing.tokens(expert))
            self._buffers.bring(self._buffers.begin(number), wanted)

    def compute_together(self, calls: Sequence[ExpertsCall]) -> list[torch.Tensor]:
        """What their experts make of each of these, all of one layer."""
        ((number, routing),) = self._routings(calls)
        site = self._sites[id(calls[0].module)]
        hidden, weights = (torch.cat([getattr(call, name) for call in calls]) for name in ("hidden", "weights"))
        shape = (weights.numel(), hidden.shape[1])
        try:
            rows = self._held.activations[0].rows(shape, hidden.dtype)
        except DeviceMemoryError as refused:
            if not self._held.give_back(0, refused.asked):
                raise
            rows = self._held.activations[0].rows(shape, hidden.dtype)
        sums, compute = PartialSums(hidden, weights, routing, rows), self.device.compute_stream
        half = self._buffers.begin(number)
        kernel = half.segment.kernel(site.experts.make_kernel)
        for expert, arrived in half.copied.items():
            if expert in routing.visits:
                compute.wait(arrived)
                self._record(compute.submit(sums.on_device(kernel, {expert: expert})), expert)
        half.last_use = end = compute.submit(sums.finish())
        if not self.device.compute_follows_caller:
            end.wait()
        return list(torch.split(sums.result, [len(call.hidden) for call in calls]))

    def close(self) -> None:
        """Gives all memory back.  Harmless if repeated."""
        self._attention.close()
        self._device_attention.close()
        self._buffers.close()
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
        self._held.take_back()

    def _routings(self, calls: Sequence[ExpertsCall]) -> list[tuple[int, Routing]]:
        """(number of the site, which tokens want which expert) of calls of one layer; none if there are no calls."""
        if not calls or id(calls[0].module) not in self._sites:
            return []
        number = self._sites[id(calls[0].module)].number
        if self._routing is None or self._routing[0] is not calls[0]:
            index = torch.cat([call.index for call in calls]).cpu()
            self._uses.observe(number, index.numpy())
            self._routing = calls[0], Routing(index, self._buffers.experts_of(number))
        return [(number, self._routing[1])]

    def _record(self, event: Event, expert: int) -> None:
        if RECORDER.on:
            RECORDER.event(event, lanes.GPU, lanes.EXPERTS, expert=expert, device=self.device.index)

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
        self._device_attention.settle()
        self._routing = None
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

    def fetch_cache(self, number: int) -> CacheAhead:
        return self._pipeline.fetch_cache(self._index, self._batches[number].pieces)

    def attend_on_device(self, run: LayerRun, cache: CacheAhead) -> None:
        assert isinstance(run.call, AttentionCall)
        run.answer(self._pipeline.attend_there(self._index, run.call, cache))

    def finish(self, number: int, run: LayerRun) -> None:
        RECORDER.layer = self._index
        while run.call is not None:
            if isinstance(run.call, ExpertsCall):
                run.answer(self._pipeline.compute(run.call))
            else:
                run.answer(self.attend_on_cpu(number, run).take())
        self._batches[number].hidden = run.result

    def bring_hot(self, *, of_next: bool = False) -> None:
        self._pipeline.bring_hot(self._index, of_next=of_next)

    def bring_wanted(self, runs: Sequence[LayerRun]) -> None:
        self._pipeline.bring_wanted(_expert_calls(runs))

    def compute_together(self, runs: Sequence[LayerRun]) -> None:
        if runs:
            results = self._pipeline.compute_together(_expert_calls(runs))
            for run, result in zip(runs, results, strict=True):
                run.answer(result)

    def bring_page(self, page: int, pages: int) -> None:
        self._pipeline.bring_page(self._index, page, pages)


def _expert_calls(runs: Sequence[LayerRun]) -> list[ExpertsCall]:
    return [run.call for run in runs if isinstance(run.call, ExpertsCall)]


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
