"""How long loading a model will still take, as far as the phase that it is in tells."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.protocol import Progress

_LEAST_S = 1.0
"""Of a phase, before its rate is believed."""


class LoadingPace:
    """The progress that was told last, and the rate of its phase.

    Attributes:
        progress: None if nothing is loading, or it is not known how much there is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = (0.0, 0)
        self.progress: Progress | None = None

    def note(self, progress: Progress | None) -> None:
        """Takes in what the engine tells; None when loading ends."""
        before, self.progress = self.progress, progress if progress is not None and progress.total > 0 else None
        if self.progress is not None and (before is None or before.phase != self.progress.phase):
            self._since = self._clock(), self.progress.done

    @property
    def share(self) -> float | None:
        return None if self.progress is None else min(self.progress.done / self.progress.total, 1.0)

    @property
    def left_s(self) -> float | None:
        """Seconds left at the rate of this phase; None while it is too young to tell."""
        begun_s, begun = self._since
        if self.progress is None or self._clock() - begun_s < _LEAST_S or self.progress.done <= begun:
            return None
        rate = (self.progress.done - begun) / (self._clock() - begun_s)
        return max(0.0, (self.progress.total - self.progress.done) / rate)
