"""Read bandwidth of RAM: the physical limit that decoding on the CPU runs against."""

from __future__ import annotations

import statistics
import time

import torch

_BYTES = 768 * 2**20
"""Far more than any cache that a PC has, so that the sum below reads RAM."""


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes per second that torch's current number of threads can read from RAM (median of `repeats`)."""
    block = torch.ones(_BYTES // 8, dtype=torch.int64)
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        block.sum()
        rates.append(_BYTES / (time.perf_counter() - started))
    return statistics.median(rates)
