"""Read bandwidth of RAM, the physical limit of decoding on the CPU, and throughput of large matrix products and large
reads on the CPU and on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.experts.record import allocate_records
from engine.formats.layouts import RecordLayout
from engine.hardware.measured import Arithmetic, RamRead
from engine.kernels.native.library import load_kernels
from engine.measure.run import NotMeasuredError, Run, counted

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
    """Seconds that the device is busy with `work`.

    Raises:
        EngineError: the device failed.
    """

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
