"""One direction of an emulated link: with the profile's bandwidth, one copy at a time.

Time follows a schedule of its own: a copy occupies the link from the moment when it was ready and the link was free, no
matter when its thread ran. So late wake-ups do not slow down the link, and queued copies get the whole bandwidth. Bytes
move late in their slot: reading before the event is done gives old bytes, as on a real device.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.devices.host_event import sleep_until

_CHUNK_S = 0.004
_CHUNK_BYTES = (256 * 2**10, 16 * 2**20)
_MOVING_BYTES_PER_S = 4e9
_WAKING_S = 250e-6


class ClosingError(Exception):
    """The device is closing: the copy was abandoned."""


@dataclass
class _Passage:
    """The big copy on the link, and its delay by small ones."""

    started_s: float
    held_up_s: float = 0.0


class Link:
    """Carries copies.

    A small, urgent copy overtakes a big one immediately; the big one ends later by its duration.

    Args:
        bytes_per_s: bandwidth.  latency_s: fixed cost of each copy.
        interrupted: whether copies must be abandoned.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, interrupted: Callable[[], bool]) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._interrupted = interrupted
        self._big_turn = threading.Lock()
        self._urgent_turn = threading.Lock()
        self._schedule = threading.Lock()
        self._passage: _Passage | None = None
        self._free_at_s = 0.0
        low, high = _CHUNK_BYTES
        self._chunk = int(min(max(bytes_per_s * _CHUNK_S, low), high))

    def carry(
        self, destination: torch.Tensor, source: torch.Tensor, ready_s: float, *, is_urgent: bool
    ) -> tuple[float, float]:
        """Copies, and returns (start, end) of the copy.

        Args:
            ready_s: when the copy only waited for the link.

        Raises:
            ClosingError: see above.
        """
        if is_urgent:
            with self._urgent_turn:
                return self._carry_urgent(destination, source, ready_s)
        with self._big_turn:
            return self._carry_big(destination, source, ready_s)

    def _carry_urgent(self, destination: torch.Tensor, source: torch.Tensor, ready_s: float) -> tuple[float, float]:
        needed_s = self._needed_s(source.nbytes)
        with self._schedule:
            passage = self._passage
            if passage is None:
                started_s = max(ready_s, self._free_at_s)
                self._free_at_s = started_s + needed_s
            else:
                # The big copy's schedule already extends the link's, so this only records when the next urgent copy may
                # start.
                started_s = max(ready_s, passage.started_s, self._free_at_s)
                self._free_at_s = started_s + needed_s
                passage.held_up_s += needed_s
        due_s = started_s + needed_s
        self._sleep_until(due_s - _allowance(source.nbytes))
        _move(destination, source)
        moved_s = time.perf_counter()
        self._sleep_until(due_s)
        return started_s, max(due_s, moved_s)

    def _carry_big(self, destination: torch.Tensor, source: torch.Tensor, ready_s: float) -> tuple[float, float]:
        with self._schedule:
            passage = self._passage = _Passage(max(ready_s, self._free_at_s))
        ended_s = passage.started_s
        try:
            carried = 0
            for into, out_of in _pieces(destination, source, self._chunk):
                carried += out_of.nbytes
                due_s = passage.started_s + self._needed_s(carried) + passage.held_up_s
                self._sleep_until(due_s - _allowance(out_of.nbytes))
                _move(into, out_of)
            moved_s = time.perf_counter()
            while True:
                ended_s = max(moved_s, passage.started_s + self._needed_s(source.nbytes) + passage.held_up_s)
                held_up_s = passage.held_up_s
                self._sleep_until(ended_s)
                with self._schedule:
                    if passage.held_up_s == held_up_s:
                        self._passage = None
                        self._free_at_s = max(self._free_at_s, ended_s)
                        return passage.started_s, ended_s
        finally:
            self._passage = None

    def _needed_s(self, nbytes: int) -> float:
        return self._latency_s + nbytes / self._bytes_per_s

    def _sleep_until(self, moment_s: float) -> None:
        if not sleep_until(moment_s, self._interrupted):
            raise ClosingError


def _allowance(nbytes: int) -> float:
    """Seconds before the end of its slot at which a chunk is moved, so that it arrives in time."""
    return _WAKING_S + nbytes / _MOVING_BYTES_PER_S


def _pieces(destination: torch.Tensor, source: torch.Tensor, chunk: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if source.nbytes <= chunk or not (destination.is_contiguous() and source.is_contiguous()):
        return [(destination, source)]
    # Flattened first: scalars cannot be viewed as bytes.
    into, out_of = (tensor.view(-1).view(torch.uint8) for tensor in (destination, source))
    starts = range(0, source.nbytes, chunk)
    return [(into[start : start + chunk], out_of[start : start + chunk]) for start in starts]


def _move(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Single-threaded copy without the GIL: torch's copy would start a thread pool per stream."""
    if destination.is_contiguous() and source.is_contiguous():
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        destination.copy_(source)
