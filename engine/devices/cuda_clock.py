"""Converts the card's event times to the host's clock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

_ANCHOR_AGE_S = 10.0
"""CUDA reports elapsed times as float32 milliseconds, which lose microsecond precision after minutes."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event with a known time on the host's clock."""

    event: torch.cuda.Event
    at_s: float

    def host_s(self, event: torch.cuda.Event) -> float:
        """The time of `event` on `time.perf_counter`'s clock; it must be done, and later than the anchor."""
        return self.at_s + float(self.event.elapsed_time(event)) / 1e3


class CudaClock:
    """Anchors for one card, accurate to a few microseconds, on a stream without other work."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device, priority=-1)
        self._lock = threading.Lock()
        self._anchor = self._take()

    def anchor(self) -> Anchor:
        """An anchor recent enough for work submitted now.

        Raises:
            RuntimeError: the card has failed.
        """
        if time.perf_counter() - self._anchor.at_s > _ANCHOR_AGE_S:
            with self._lock:
                if time.perf_counter() - self._anchor.at_s > _ANCHOR_AGE_S:
                    self._anchor = self._take()
        return self._anchor

    def _take(self) -> Anchor:
        event = new_event()
        self._stream.synchronize()
        before_s = time.perf_counter()
        event.record(self._stream)
        event.synchronize()
        return Anchor(event, (before_s + time.perf_counter()) / 2)


def new_event() -> torch.cuda.Event:
    """An event with timing enabled."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream of the device; a lower number has precedence."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
