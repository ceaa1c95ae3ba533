"""Decides when a cache in RAM should shrink because other programs need memory, and when it may grow again."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.devices.host_memory import available_ram

_MOST_RESERVED = 512 * 2**20
_RESERVED_SHARE = 20
_LOOK_S = 0.25
"""Querying the system takes about 0.1 ms, too long for every step; memory does not run out faster than this."""
_PATIENCE_S = 10.0
"""Delay before growing again after a shrink, as the other program may need more memory."""
_STEP_SHARE = 32
"""Growth of less than one part in so many of the budget is not worth it."""


class RamPressure:
    """Monitors the machine's available RAM.

    Args:
        budget: bytes that the cache may use while there is enough RAM.
        reserve: bytes to leave to other programs; `None` is a twentieth of what is free now, at most 512 MiB.
        available: returns the bytes that can be allocated now.
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
        """Whether the next check is due."""
        return self._clock() >= self._look_at_s

    def advise(self, allowed: int, filled: int) -> int | None:
        """The new limit of the cache in bytes; `None` if it does not change or the next check is not due.

        Args:
            allowed: current limit in bytes.
            filled: bytes of it in use.
        """
        now_s = self._clock()
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + _LOOK_S
        free = self._available()
        if free < self.reserve:
            self._grow_at_s = now_s + _PATIENCE_S
            # A little more than is missing, or the next check would find the same shortage.
            return max(0, min(allowed, filled - (self.reserve - free) - self.reserve // 8))
        # Memory allowed but not filled yet still counts as free, so subtract it.
        spare = free - max(allowed - filled, 0) - 2 * self.reserve
        wanted = min(self.budget, allowed + spare // 2)
        if now_s < self._grow_at_s or wanted - allowed < self.budget // _STEP_SHARE:
            return None
        return wanted
