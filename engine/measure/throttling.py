"""Detects throttling: runs the same small task before and after; a hot laptop takes longer for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from engine.measure.ram import torch_threads

_WIDTH = 1024
_REPEATS = 9


class Throttling(Protocol):
    """A task that takes longer when the machine slows down."""

    def speed(self) -> float:
        """Seconds that the task takes now."""


class WholeMachine:
    """A matrix product on all cores, for some milliseconds."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def speed(self) -> float:
        """See `Throttling`."""
        left = torch.full((_WIDTH, _WIDTH), 0.01)
        seconds = []
        with torch_threads(self._threads), torch.inference_mode():
            for _ in range(_REPEATS + 1):
                started_s = time.perf_counter()
                torch.mm(left, left)
                seconds.append(time.perf_counter() - started_s)
        return min(seconds[1:])  # slower runs were disturbed by something else
