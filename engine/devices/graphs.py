"""Graphs: launches of a device, captured once and replayed as a whole.

The rules are CUDA's. A replay reads and writes the same memory as the capture; Python numbers are baked in; during a
capture nothing may be waited for or read back.
"""

from __future__ import annotations

from typing import Protocol


class CaptureError(Exception):
    """An operation during a capture cannot be replayed; the message names it."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Runs the work again, in order with the caller's launches."""


class Capture(Protocol):
    """Captures segments of one step, which share memory and must be replayed in order.

    Not thread-safe; launches of other threads are not captured.
    """

    @property
    def nbytes(self) -> int:
        """Device memory of the segments captured so far."""

    def begin(self) -> None:
        """Starts capturing this thread's launches."""

    def end(self) -> Graph:
        """Ends a segment, which will have run once before the caller's next work.

        Raises:
            CaptureError, RuntimeError: something in it cannot be captured.
        """

    def abandon(self) -> None:
        """Drops the current segment, if any; later launches run normally."""

    def close(self) -> None:
        """Frees the memory; the segments are unusable afterwards.  Idempotent."""
