"""Work that a device is made to repeat: what is launched meanwhile is kept, and later launched again at one stroke.

The rules are CUDA's.  What is repeated reads and writes the very memory that it did at first; numbers that Python knew
then are part of it; nothing may be waited for and nothing read back while it is captured.
"""

from __future__ import annotations

from typing import Protocol


class CaptureError(Exception):
    """What was done while work was captured cannot be repeated; says what it was."""


class Graph(Protocol):
    """Work that can be repeated."""

    def replay(self) -> None:
        """Does the work again, in order with what the caller has launched and will launch."""


class Capture(Protocol):
    """Captures pieces of one step, which share memory and are only repeated in the order in which they came.

    Not for several threads; what other threads launch meanwhile is not captured.
    """

    @property
    def nbytes(self) -> int:
        """Device memory that the pieces captured so far hold on to."""

    def begin(self) -> None:
        """From now on what this thread launches is captured."""

    def end(self) -> Graph:
        """Ends a piece, which has been done once by the time the caller's next work runs.

        Raises:
            CaptureError, RuntimeError: something in it cannot be captured.
        """

    def abandon(self) -> None:
        """Drops the piece under way, if there is one: what is launched from now on runs as ever."""

    def close(self) -> None:
        """Frees the memory; the pieces are of no use afterwards.  Harmless if repeated."""
