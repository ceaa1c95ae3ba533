"""Read bandwidth of RAM, the physical limit of decoding on the CPU, and throughput of large matrix products and large
reads on the CPU and on the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.experts.dispatch import StandardExperts
from engine.experts.record import allocate_records
from engine.formats import tiled_format
from engine.formats.layouts import RecordLayout
from engine.formats.tiles import Pairing
from engine.hardware.measured import Arithmetic, ExpertTime, RamRead
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
