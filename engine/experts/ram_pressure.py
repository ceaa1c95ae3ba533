"""When a cache in RAM should become smaller, because other programs need the memory, and when it may grow again."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.devices.host_memory import available_ram

_MOST_RESERVED = 512 * 2**20
_RESERVED_SHARE = 20
_LOOK_S = 0.25
"""Asking the system takes about 0.1 ms: less often than steps come, more often than memory runs out."""
_PATIENCE_S = 10.0
"""After shrinking: whoever took the memory may want more of it."""
_STEP_SHARE = 32
"""A change by less than one part in so many is not worth it."""


class RamPressure:
    """Watches what the machine has left.

    Args:
        budget: bytes that the cache may take while there is enough for all.
        reserve: bytes to leave to others; `None` is a twentieth of what is free now, at most 512 MiB.
        available: bytes that may be allocated now.
        clock: seconds.
    """

    def __init__(
        self,
        budget: int,
        reserve: int | None = None,
        available: Callable[[], int] = available_ram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self._available, self._clock = available, clock
        self.reserve = min(available() // _RESERVED_SHARE, _MOST_RESERVED) if reserve is None else reserve
        self._look_at_s = clock()
        self._grow_at_s = self._look_at_s

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._clock() >= self._look_at_s

    def advise(self, allowed: int, filled: int) -> int | None:
        """The bytes that the cache should allow itself from now on, if that changes; `None` too if it is not due.

        Args:
            allowed: bytes that it allows itself now.
            filled: bytes of these that it has taken.
        """
        now_s = self._clock()
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        free = self._available()
        if free < self.reserve:
            self._grow_at_s = now_s + _PATIENCE_S
            # A little more than is missing, or the next look would find the same.
            return max(0, min(allowed, filled - (self.reserve - free) - self.reserve // 8))
        # What it allows itself but has not taken is counted as free, and will not be.
        spare = free - max(allowed - filled, 0) - 2 * self.reserve
        wanted = min(self.budget, allowed + spare // 2)
        if now_s < self._grow_at_s or wanted - allowed < self.budget // _STEP_SHARE:
            return None
        return wanted
