"""Read bandwidth of RAM: the physical limit of decoding on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.hardware.measured import RamRead
from engine.measure.run import Run, counted

_BYTES = 768 * 2**20
"""Far more than any PC's caches, so that the sum below reads RAM."""


@dataclass(frozen=True)
class RamBandwidth:
    """By thread count, chosen by `threads_of` from the number of cores."""

    threads_of: Callable[[int], tuple[int, ...]]
    repeats: int
    estimated_s: float
    name: str = "RAM"

    def __call__(self, run: Run) -> None:
        """See `Measurement`."""
        block = torch.ones(max(run.cold_bytes, 2**20) // 8, dtype=torch.int64)
        for threads in self.threads_of(run.threads):
            with torch_threads(threads):
                seconds = run.steady(
                    f"RAM, {counted(threads, 'thread')}", lambda: _seconds_to_read(block), self.repeats
                )
            run.found(RamRead(threads, block.nbytes / seconds))


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes per second that torch's current number of threads can read from RAM (median of `repeats`)."""
    block = torch.ones(_BYTES // 8, dtype=torch.int64)
    return statistics.median(block.nbytes / _seconds_to_read(block) for _ in range(repeats))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Makes torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds_to_read(block: torch.Tensor) -> float:
    started = time.perf_counter()
    block.sum()
    return time.perf_counter() - started
