"""Read bandwidth of RAM, the physical limit of decoding on the CPU, and throughput of large matrix products and large
reads on the CPU and on the device.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.experts.activations import Activations
from engine.experts.dispatch import StandardExperts
from engine.experts.dispatcher import HybridExperts
from engine.experts.latency import LatencyModel
from engine.experts.misses import Fetched, OnCpu
from engine.experts.record import allocate_records
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import VramCache
from engine.formats import tiled_format
from engine.formats.tiles import Pairing, RecordLayout
from engine.hardware.measured import Arithmetic, CallTime, ExpertTime, RamRead
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.library import NativeKernels, load_kernels
from engine.measure.run import NotMeasuredError, Run, counted

_AT_ONCE = 8
"""Experts per call: about as many as most models route a token to."""
_MOST_EXPERTS = 2048
_FEWEST = 2
"""Experts in memory at least, so that none is read again while still cached."""
NARROWEST = 256
"""Smallest inner width that still stands for the expert."""
_TILE = 32
"""Widths are multiples of this in quantised records."""
_DEVICE_BYTES = 2**29
"""Bytes of weights on a device: more than its caches hold."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Widths of an expert with a gate."""

    hidden: int
    inner: int


@dataclass(frozen=True)
class CpuExperts:
    """On the CPU: every token count with all threads, and one token with every thread count."""

    shapes: tuple[ExpertShape, ...]
    precisions: tuple[str, ...]
    tokens: tuple[int, ...]
    threads_of: Callable[[int], tuple[int, ...]]
    repeats: int
    estimated_s: float
    name: str = "experts on the processor"

    def __call__(self, run: Run) -> None:
        room = allocate_records(max(1, run.cold_bytes // 4096), RecordLayout((), 4096), torch.device("cpu")).view(-1)
        room.fill_(60)  # small numbers, both as weights and as scales
        for threads in self.threads_of(run.threads):
            native = load_kernels(threads)
            try:
                with torch_threads(threads):
                    self._measure(run, room, native, threads, self.tokens if threads == run.threads else (1,))
            finally:
                if native is not None:
                    native.close()

    def _measure(
        self, run: Run, room: torch.Tensor, native: NativeKernels | None, threads: int, all_tokens: tuple[int, ...]
    ) -> None:
        kinds = [
            (part, precision, layer_in(part, precision, room))
            for shape, precision in itertools.product(self.shapes, self.precisions)
            for part in (_fitting(shape, precision, room.nbytes),)
        ]
        kernels = [choose_kernel(expert_module(shape), layer, native) for shape, _, layer in kinds]
        # Single tokens first: plans need them most, should the time run out.
        for tokens, ((shape, precision, layer), kernel) in itertools.product(
            all_tokens, list(zip(kinds, kernels, strict=True))
        ):
            assert kernel is not None
            calls = _Calls(kernel, shape, layer.num_experts, tokens, layer.device)
            name = (
                f"{shape.hidden} x {shape.inner} {precision}, {counted(tokens, 'token')}, {counted(threads, 'thread')}"
            )
            seconds = run.steady(name, partial(seconds_here, calls), self.repeats) / calls.experts
            nbytes = layer.layout.nbytes
            run.found(ExpertTime("cpu", shape.hidden, shape.inner, precision, tokens, threads, nbytes, seconds))


@dataclass(frozen=True)
class CardExpertTimes:
    """On the device, with weights already there."""

    shapes: tuple[ExpertShape, ...]
    precisions: tuple[str, ...]
    tokens: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "experts on the graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        nbytes = min(_DEVICE_BYTES, device.memory.free // 2)
        memory = device.memory.allocate(nbytes, MemoryCategory.STAGING)
        try:
            memory.fill_(60)
            for shape, precision in itertools.product(self.shapes, self.precisions):
                if expert_layout(shape, precision).nbytes > nbytes:
                    continue
                layer = layer_in(shape, precision, memory)
                kernel = choose_kernel(expert_module(shape), layer, None)
                assert kernel is not None
                for tokens in self.tokens:
                    calls = _Calls(kernel, shape, layer.num_experts, tokens, device.torch_device)
                    name = f"{shape.hidden} x {shape.inner} {precision}, {counted(tokens, 'token')}, graphics card"
                    seconds = run.steady(name, partial(seconds_on, device, calls), self.repeats)
                    run.found(
                        ExpertTime(
                            device.name.partition("#")[0],
                            shape.hidden,
                            shape.inner,
                            precision,
                            tokens,
                            0,
                            layer.layout.nbytes,
                            seconds / calls.experts,
                        )
                    )
        finally:
            device.memory.release(memory)


class _Calls:
    """Calls a kernel with different experts each time, each routed all tokens."""

    def __init__(self, kernel: ExpertKernel, shape: ExpertShape, held: int, tokens: int, place: torch.device) -> None:
        self.experts = min(_AT_ONCE, held)
        self._kernel = kernel
        self._x = torch.full((tokens, shape.hidden), 0.01, dtype=torch.bfloat16, device=place)
        self._weights = torch.full((tokens, self.experts), 1 / self.experts, device=place)
        order = torch.randperm(held, generator=torch.Generator().manual_seed(1)).repeat(2)
        self._indices = itertools.cycle(
            [
                order[begin : begin + self.experts].expand(tokens, -1).contiguous().to(place)
                for begin in range(0, held, self.experts)
            ]
        )

    def __call__(self) -> None:
        self._kernel(self._x, next(self._indices), self._weights)


def _fitting(shape: ExpertShape, precision: str, room_bytes: int) -> ExpertShape:
    """The expert, its inner width reduced until several of them fit into memory.

    A narrower part reads the same rows of gate and up and equally long blocks of down; the result is reported for the
    part: its widths, its bytes, its seconds.

    Raises:
        NotMeasuredError: not even a reduced one fits.
    """
    part = shape
    while _FEWEST * expert_layout(part, precision).nbytes > room_bytes:
        part = ExpertShape(shape.hidden, part.inner // 2 // _TILE * _TILE)
        if part.inner < NARROWEST:
            raise NotMeasuredError("too little free RAM for one expert")
    return part


def expert_module(shape: ExpertShape) -> StandardExperts:
    """A module that only defines the computation: it has no weights."""
    with torch.device("meta"):
        return StandardExperts(1, shape.hidden, shape.inner, torch.nn.SiLU())


def expert_layout(shape: ExpertShape, precision: str) -> RecordLayout:
    """How an expert's record is laid out."""
    shapes = {name: (tuple(p.shape[1:]), torch.bfloat16) for name, p in expert_module(shape).named_parameters()}
    plain = RecordLayout.of(shapes, transposed=False)
    of_all = tiled_format(precision)
    return plain if of_all is None else RecordLayout.in_tiles(plain, lambda _: of_all, Pairing.HALVES)


def layer_in(shape: ExpertShape, precision: str, room: torch.Tensor) -> LayerRecords:
    """As many experts as fit into the memory, up to a limit."""
    layout = expert_layout(shape, precision)
    count = min(room.nbytes // layout.nbytes, _MOST_EXPERTS)
    return LayerRecords("measured", layout, room[: count * layout.nbytes].view(count, layout.nbytes))


_BYTES = 768 * 2**20
"""Far more than any PC's caches, so that reading it reads RAM."""


@dataclass(frozen=True)
class RamBandwidth:
    """By thread count, chosen by `threads_of` from the number of cores."""

    threads_of: Callable[[int], tuple[int, ...]]
    repeats: int
    estimated_s: float
    name: str = "RAM"

    def __call__(self, run: Run) -> None:
        block = cold_memory(max(run.cold_bytes, 2**20))
        for threads in self.threads_of(run.threads):
            with torch_threads(threads), MemoryReader() as reader:
                name = f"RAM, {counted(threads, 'thread')}"
                seconds = run.steady(name, partial(reader.seconds, block), self.repeats)
            run.found(RamRead(threads, block.nbytes / seconds))


def cold_memory(nbytes: int = _BYTES) -> torch.Tensor:
    """Bytes in memory of the kind that experts' weights have; all of it is there."""
    block = allocate_records(max(1, nbytes // 4096), RecordLayout((), 4096), torch.device("cpu")).view(-1)
    return block.fill_(1)


class MemoryReader:
    """Reads memory as fast as torch's current number of threads can: no kernel reads its weights faster.

    Reads with the kernels' own threads, so that a rate measured in turn with them is their limit; by torch's operators
    where there are no native kernels.
    """

    def __init__(self) -> None:
        self._native = load_kernels(torch.get_num_threads())

    def __enter__(self) -> MemoryReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._native is not None:
            self._native.close()

    def seconds(self, block: torch.Tensor) -> float:
        """Seconds to read a contiguous tensor of whole 8 bytes."""
        started_s = time.perf_counter()
        if self._native is not None:
            self._native.read_memory(self._native.pool, block.data_ptr(), block.nbytes)
        else:
            block.view(-1).view(torch.int64).sum()
        return max(time.perf_counter() - started_s, 1e-9)


def spread_of(values: list[float]) -> float:
    """Largest over smallest, less 1: 0.1 for values within 10% of each other."""
    return max(values) / min(values) - 1


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Makes torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_CPU = torch.device("cpu")
_WIDTHS = (512, 1024, 2048, 4096, 8192)
_LONG_ENOUGH_S = 0.03
"""A product that takes this long keeps every core busy and hides its launch overhead."""
_READ_BYTES = (2**24, 2**29)


@dataclass(frozen=True)
class CpuArithmetic:
    """16-bit matrix products on all cores."""

    repeats: int
    estimated_s: float
    name: str = "processor"

    def __call__(self, run: Run) -> None:
        with torch_threads(run.threads):
            flops = matrix_rate(run, "processor", _CPU, seconds_here, self.repeats)
        run.found(Arithmetic("cpu", run.threads, flops, 0.0))


@dataclass(frozen=True)
class DeviceArithmetic:
    """16-bit matrix products on the device, and the bandwidth of its own memory."""

    repeats: int
    estimated_s: float
    name: str = "graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()

        def timed(work: Callable[[], object]) -> float:
            return seconds_on(device, work)

        flops = matrix_rate(run, "graphics card", device.torch_device, timed, self.repeats)
        low, high = _READ_BYTES
        nbytes = min(high, device.memory.free // 2)
        if nbytes < low:
            raise NotMeasuredError(f"{device.name} has too little free memory")
        memory = device.memory.allocate(nbytes, MemoryCategory.STAGING)
        try:
            memory.fill_(1)  # untouched memory is not mapped yet
            block = memory[: nbytes // 8 * 8].view(torch.int64)
            read = run.steady("memory of the graphics card", lambda: timed(block.sum), self.repeats)
            run.found(Arithmetic(device.name.partition("#")[0], 0, flops, block.nbytes / read))
        finally:
            device.memory.release(memory)


def matrix_rate(
    run: Run, name: str, place: torch.device, timed: Callable[[Callable[[], object]], float], repeats: int
) -> float:
    """16-bit operations per second of square products, wide enough to keep the device busy."""
    width, seconds = 0, 0.0
    for width in _WIDTHS:
        run.check()
        left = torch.full((width, width), 0.01, dtype=torch.bfloat16, device=place)
        out = torch.empty_like(left)

        def product(left: torch.Tensor = left, out: torch.Tensor = out) -> object:
            return torch.mm(left, left, out=out)

        timed(product)
        seconds = timed(product)
        if seconds >= _LONG_ENOUGH_S:
            break
    seconds = run.steady(f"matrix products, {name}", lambda: timed(product), repeats)
    return float(2 * width**3 / seconds)


def seconds_on(device: Device, work: Callable[[], object]) -> float:
    """Seconds that the device is busy with `work`."""

    def without_gradients() -> None:
        with torch.inference_mode():
            work()

    event = device.compute_stream.submit(without_gradients)
    event.wait()
    return max(event.ended_s - event.started_s, 1e-9)


def seconds_here(work: Callable[[], object]) -> float:
    """Seconds of `work` on the CPU."""
    started_s = time.perf_counter()
    with torch.inference_mode():
        work()
    return max(time.perf_counter() - started_s, 1e-9)


_TINY = ExpertShape(64, 32)
_EXPERTS = 64
_USED = 4
"""Experts of a token."""
_CALLS = 24
"""Calls in a row: so many layers' worth, as in a step."""


@dataclass(frozen=True)
class NativeCalls:
    """One call into the native kernels, by threads, with experts so small that reading them takes next to nothing: what
    a token costs beyond its weights, of large models a few percent, of small ones nearly all of it."""

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
