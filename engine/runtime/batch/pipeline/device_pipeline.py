"""The layers of a model on a device, by a schedule: who has which layer's experts, and what a schedule's steps do."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

import torch

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.dispatch import interrupted_by_experts
from engine.kernels.native.library import load_kernels
from engine.kernels.native.paged_attention import Pieces
from engine.runtime.batch.layers import DecoderLayers, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.device_attention import CacheAhead, DeviceAttention
from engine.runtime.batch.pipeline.host_attention import AttendedAhead, HostAttention
from engine.runtime.batch.pipeline.layer_experts import LayerExperts
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun, ask
from engine.runtime.batch.pipeline.parts import PartsTimer
from engine.runtime.batch.pipeline.schedules import ORDERS, Schedule
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.recorder import RECORDER


class Batch(Protocol):
    """Rows that go through a layer at once, as `packed_sweep` has them."""

    pieces: Pieces
    recording: Recording
    hidden: torch.Tensor


class DevicePipeline:
    """Sweeps of one model on one device.  By one thread; between two layers anybody may use the model.

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
        config = loaded.model.config.get_text_config(decoder=True)
        self.experts_per_token: int = getattr(config, "num_experts_per_tok", None) or 1
        self.experts = LayerExperts(self.device, self._held, layers, self.experts_per_token)
        self.timer: PartsTimer | None = None
        """Times the parts of sweeps in place of their schedules, if set."""
        # Another pool than the model's: that is busy with the layers of the next micro-batch meanwhile.
        self._kernels = load_kernels(torch.get_num_threads()) if loaded.kernels is not None else None
        self._attention = HostAttention(self.device, self._attend)
        self._device_attention = DeviceAttention(self.device, self._held.kernels)

    def sweep(self, batches: Sequence[Batch], schedule: Schedule) -> Generator[None, None, None]:
        """Takes all micro-batches through all layers; stops behind each, where anybody may use the model.

        Raises:
            EngineError: the device failed, or a record could not be read; nothing is under way then.
        """
        self.experts.whole = self.timer is not None or schedule not in (Schedule.HOT_ONLY, Schedule.KLOTSKI)
        layers = [_Layer(self, index, batches) for index in range(len(self._layers))]
        order = self.timer.order(layers) if self.timer is not None else ORDERS[schedule](layers)
        try:
            for index in range(len(self._layers)):
                with self._interrupting():
                    next(order)
                if index == len(self._layers) - 1:
                    self._device_attention.finish()
                self._attention.forget_ended()
                self.experts.leave(index)
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
            if not self.experts.give_back(refused.asked):
                raise
        return self._attention.begin(call, pieces, number, back, value_dim, index)

    def fetch_cache(self, index: int, pieces: Pieces) -> CacheAhead:
        """See `LayerWork.fetch_cache`."""
        module = next(module for module in self._layers[index].modules() if id(module) in self._states.shapes)
        layer = self._states.layer_of(module)[0]
        try:
            return self._device_attention.fetch(layer, pieces, index)
        except DeviceMemoryError as refused:
            if not self.experts.give_back(refused.asked):
                raise
        return self._device_attention.fetch(layer, pieces, index)

    def attend_there(self, index: int, call: AttentionCall, cache: CacheAhead) -> torch.Tensor:
        """See `LayerWork.attend_on_device`."""
        return self._device_attention.attend(call, cache, self._states.terms_of(call.module), index)

    def close(self) -> None:
        """Gives all memory back.  Harmless if repeated."""
        self._attention.close()
        self._device_attention.close()
        if self._kernels is not None:
            self._kernels.close()
            self._kernels = None
        self.experts.close()

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
        with contextlib.suppress(EngineError):
            self.device.recover()
        self.experts.forget()


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
                run.answer(self._pipeline.experts.compute(run.call))
            else:
                run.answer(self.attend_on_cpu(number, run).take())
        self._batches[number].hidden = run.result

    def bring_hot(self, *, of_next: bool = False) -> None:
        self._pipeline.experts.bring_hot(self._index, of_next=of_next)

    def bring_wanted(self, runs: Sequence[LayerRun]) -> None:
        self._pipeline.experts.bring_wanted(_expert_calls(runs))

    def compute_together(self, runs: Sequence[LayerRun]) -> None:
        if runs:
            results = self._pipeline.experts.compute_together(_expert_calls(runs))
            for run, result in zip(runs, results, strict=True):
                run.answer(result)

    def bring_page(self, page: int, pages: int) -> None:
        self._pipeline.experts.bring_page(self._index, page, pages)

    def load(self) -> bool:
        return self._pipeline.experts.load(self._index)

    def attended_there(self, call: AttentionCall, cache: CacheAhead) -> torch.Tensor:
        return self._pipeline.attend_there(self._index, call, cache)

    def computed(self, call: ExpertsCall) -> torch.Tensor:
        return self._pipeline.experts.compute(call)

    def computed_together(self, calls: Sequence[ExpertsCall]) -> int:
        self._pipeline.experts.compute_together(calls)
        return len({expert for call in calls for expert in call.index.flatten().tolist()})

    def end(self, number: int, run: LayerRun) -> None:
        self._batches[number].hidden = run.result


def _expert_calls(runs: Sequence[LayerRun]) -> list[ExpertsCall]:
    return [run.call for run in runs if isinstance(run.call, ExpertsCall)]
