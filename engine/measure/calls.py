"""Fixed times of the engine's own calls, with experts so small that reading them takes next to nothing.

They are what a token costs beyond its weights: of large models a few percent, of small ones nearly all of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine.devices.device import Device
from engine.experts.activations import Activations
from engine.experts.dispatcher import HybridExperts
from engine.experts.latency import LatencyModel
from engine.experts.misses import Fetched, OnCpu
from engine.experts.record import allocate_records
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import VramCache
from engine.hardware.measured import CallTime
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.library import NativeKernels, load_kernels
from engine.measure.arithmetic import (
    ExpertShape,
    expert_layout,
    expert_module,
    layer_in,
    seconds_here,
    seconds_on,
    torch_threads,
)
from engine.measure.run import NotMeasuredError, Run, counted

_TINY = ExpertShape(64, 32)
_EXPERTS = 64
_USED = 4
"""Experts of a token."""
_CALLS = 24
"""Calls in a row: so many layers' worth, as in a step."""


@dataclass(frozen=True)
class NativeCalls:
    """One call into the native kernels, by threads."""

    threads_of: Callable[[int], tuple[int, ...]]
    repeats: int
    estimated_s: float
    name: str = "calls on the processor"

    def __call__(self, run: Run) -> None:
        records = layer_in(_TINY, "bf16", _room())
        hidden = torch.full((1, _TINY.hidden), 0.01, dtype=torch.bfloat16)
        weights, chosen = torch.ones(1, 1), [torch.tensor([[expert]]) for expert in range(_CALLS)]
        for threads in self.threads_of(run.threads):
            native = load_kernels(threads)
            if native is None:
                raise NotMeasuredError("the native kernels are not built here")
            try:
                with torch_threads(threads):
                    kernel = _kernel(records, native)

                    def calls(kernel: ExpertKernel = kernel) -> None:
                        for index in chosen:
                            kernel(hidden, index, weights)

                    name = f"a native call, {counted(threads, 'thread')}"
                    seconds = run.steady(name, lambda: seconds_here(calls), self.repeats) / _CALLS
            finally:
                native.close()
            run.found(CallTime("cpu", "native_s", threads, seconds))


@dataclass(frozen=True)
class SharedLayer:
    """A layer whose experts the device and the CPU share: without experts, with some on the device, or on the CPU."""

    repeats: int
    estimated_s: float
    name: str = "sharing experts with the graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        threads = max(1, run.threads - 1)  # one core is the driver's, or computes for an emulated device
        native = load_kernels(threads)
        own = load_kernels(1) if device.torch_device.type == "cpu" else None
        try:
            with torch_threads(threads):
                self._measure(run, device, native, own)
        finally:
            for kernels in (native, own):
                if kernels is not None:
                    kernels.close()

    def _measure(self, run: Run, device: Device, native: NativeKernels | None, own: NativeKernels | None) -> None:
        shared = _Shared(device, native, own)
        try:
            took = {
                what: run.steady(f"an expert layer, {what}", partial(shared.seconds, choose), self.repeats)
                for what, choose in (
                    ("no expert", shared.none),
                    ("on the graphics card", shared.residents),
                    ("one on the processor", lambda: shared.absent(1)),
                    ("all on the processor", lambda: shared.absent(_USED)),
                )
            }
            router_s = run.steady("a router, graphics card", shared.router_seconds, self.repeats)
            single_s = run.steady("an expert alone, graphics card", shared.single_seconds, self.repeats)
        finally:
            shared.close()
        layer_s, one_s = took["no expert"], took["one on the processor"]
        each_s = max(0.0, took["all on the processor"] - one_s) / (_USED - 1)
        name = device.name.partition("#")[0]
        for what, seconds in (
            ("router_s", router_s),
            ("layer_s", layer_s),
            ("card_s", max(0.0, took["on the graphics card"] - layer_s)),
            ("host_s", max(0.0, one_s - each_s - layer_s)),
            ("host_expert_s", each_s),
            ("single_s", single_s),
        ):
            run.found(CallTime(name, what, 0, seconds))


class _Shared:
    """Experts of a layer in RAM, a part of them on a device, and a router before them."""

    def __init__(self, device: Device, native: NativeKernels | None, own: NativeKernels | None) -> None:
        place = device.torch_device
        self._device = device
        records = layer_in(_TINY, "bf16", _room())
        self._cache = VramCache(device, records.layout, layers=1, experts=_EXPERTS, slots=_EXPERTS // 2)
        self._activations = Activations(device)
        try:
            latency = LatencyModel("bf16", records.layout.nbytes, 1e-5, 0.0, 1e-5, 1, 0.0, 0.0, 1e9)
            source = RecordSource(records, _kernel(records, native))
            self._layer = HybridExperts(
                self._cache, 0, source, lambda held: _kernel(held, own), latency, self._activations, Fetched.name
            )
            self._hidden = torch.full((1, _TINY.hidden), 0.01, dtype=torch.bfloat16, device=place)
            self._router = torch.full((_EXPERTS, _TINY.hidden), 0.01, dtype=torch.bfloat16, device=place)
            self._weights = torch.full((1, _USED), 1 / _USED, device=place)
            self._draw = random.Random(1)
            for begin in range(0, _EXPERTS // 2, _USED):  # fills the slots
                self._step(range(begin, begin + _USED))
            self._layer.serve_by(OnCpu.name)
        except BaseException:
            self.close()
            raise

    def none(self) -> list[int]:
        """Ids that are no expert's."""
        return [_EXPERTS] * _USED

    def residents(self) -> list[int]:
        """Experts on the device."""
        there = sorted(self._cache.residents(0))
        if len(there) < _USED:
            raise NotMeasuredError(f"{self._device.name} has too little free memory")
        return self._draw.sample(there, _USED)

    def absent(self, count: int) -> list[int]:
        """So many experts that are not."""
        missing = sorted(set(range(_EXPERTS)) - self._cache.residents(0).keys())
        return [*self._draw.sample(missing, count), *[_EXPERTS] * (_USED - count)]

    def seconds(self, choose: Callable[[], list[int]]) -> float:
        """Of a layer with these experts."""
        took_s = 0.0
        for _ in range(_CALLS):
            experts = choose()
            begun_s = time.perf_counter()
            self._step(experts)
            took_s += time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        self._device.compute_stream.synchronize()
        return (took_s + time.perf_counter() - begun_s) / _CALLS

    def router_seconds(self) -> float:
        """Of a norm and a router in the library's operators."""
        begun_s = time.perf_counter()
        with torch.inference_mode():
            for _ in range(_CALLS):
                normed = functional.rms_norm(self._hidden.float(), self._hidden.shape[-1:]).to(self._hidden.dtype)
                shares = functional.linear(normed, self._router).float().softmax(-1)
                weights, _ = shares.topk(_USED)
                (weights / weights.sum(-1, keepdim=True)).to(self._hidden.dtype)
        self._device.compute_stream.synchronize()
        return (time.perf_counter() - begun_s) / _CALLS

    def single_seconds(self) -> float:
        """Of the device, for one expert in a call of its own."""
        there = self._cache.residents(0)
        segment, row = self._cache.locate(next(iter(there.values())))
        kernel = segment.kernel(self._layer.make_kernel)
        place = self._device.torch_device
        index, weight = torch.tensor([[row]], device=place), torch.ones(1, 1, device=place)
        return seconds_on(self._device, lambda: kernel(self._hidden, index, weight))

    def _step(self, experts: list[int] | range) -> None:
        index = torch.tensor([[*experts]], device=self._device.torch_device)
        with torch.inference_mode():
            self._layer(self._hidden, index, self._weights)

    def close(self) -> None:
        self._cache.close()
        self._activations.close()


def _room() -> torch.Tensor:
    layout = expert_layout(_TINY, "bf16")
    return allocate_records(_EXPERTS, layout, torch.device("cpu")).view(-1).fill_(60)


def _kernel(records: LayerRecords, native: NativeKernels | None) -> ExpertKernel:
    kernel = choose_kernel(expert_module(_TINY), records, native)
    assert kernel is not None
    return kernel
