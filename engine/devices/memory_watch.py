"""Keeps a device's budget within what other programs leave of its memory, as its driver reports it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.devices.memory_budget import MemoryBudget

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
CALM_LOOKS = 3
"""Looks in a row that must find memory free before it is used again."""
_MOST_CALM_LOOKS = 96
_SETTLING_LOOKS = 5
"""A system takes its time to move back what there is room for again."""
_SOON_S = 60.0
"""A program that comes back within this time after memory was used again is waited for twice as long."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a driver says of a device's memory.

    Attributes:
        free: bytes that nobody uses.
        spilled: bytes of ours that lie in RAM, as the system moved them there.
    """

    free: int
    spilled: int = 0


class MemoryWatch:
    """Lowers a budget at once where other programs take memory, and raises it calmly when they leave it.

    If less than a quarter of the reserve is free, or something of ours was moved to RAM, the budget falls so far that
    half of the reserve becomes free.  If more than all of the reserve was free for several looks in a row, what is
    above it may be used, up to what was planned with.  In between nothing changes.

    Args:
        budget: the device's; what it has now is the most that it will have.
        room: asks the driver.
        reserve: bytes that were left to others when the budget was planned.
        enforce: told each new budget.

    Attributes:
        reserve: as above.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        room: Callable[[], Room],
        reserve: int,
        enforce: Callable[[int], None] = lambda _total: None,
    ) -> None:
        self._budget, self._room, self._enforce = budget, room, enforce
        self.reserve = reserve
        self._most = self._ours = budget.total
        self._looked_s = self._raised_s = float("-inf")
        self._calm, self._needed = 0, CALM_LOOKS
        self._seen_free = 0
        self._has_spilled = False
        self._settling = 0

    @property
    def free(self) -> int:
        """Bytes that nobody uses now.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._room().free

    @property
    def note(self) -> str:
        """One sentence while others hold memory that was planned with; else empty."""
        if self._ours >= self._most:
            return ""
        if self._has_spilled:
            return (
                f"The system moved memory of {self._budget.device} to RAM, which is slow, so the model keeps fewer "
                "experts there: close other programs that use the card."
            )
        return (
            f"{self._budget.device} has less memory left than was planned with, as other programs seem to use it, so "
            "the model keeps fewer experts there: close them for more speed."
        )

    def look(self, now_s: float) -> None:
        """Asks the driver, every few seconds at most, and changes the budget if need be.

        Args:
            now_s: of a clock that never goes back, in seconds.

        Raises:
            RuntimeError: the device has failed.
        """
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._settling = max(0, self._settling - 1)
        self._follow(now_s, may_rise=True)

    def look_again(self, now_s: float) -> None:
        """The same at once, after the device has refused memory: the budget falls, or stays."""
        self._follow(now_s, may_rise=False)

    def _follow(self, now_s: float, *, may_rise: bool) -> None:
        room, used = self._room(), self._budget.use().used
        spilled = 0 if self._settling else room.spilled
        if spilled or room.free < self.reserve // 4:
            self._lower(used - max(0, self.reserve // 2 - room.free) - spilled, spilled, now_s)
        elif not may_rise:
            return
        elif not room.spilled and room.free > self.reserve and self._budget.total == self._ours < self._most:
            self._seen_free = min(self._seen_free, room.free) if self._calm else room.free
            self._calm += 1
            if self._calm >= self._needed:
                self._raise(used + self._seen_free - self.reserve, now_s)
        else:
            self._calm = 0

    def _lower(self, total: int, spilled: int, now_s: float) -> None:
        self._calm = 0
        total = max(0, total)
        if total >= self._budget.total:
            return
        if now_s < self._raised_s + _SOON_S:
            self._needed = min(2 * self._needed, _MOST_CALM_LOOKS)
            self._raised_s = float("-inf")
        elif self._budget.total == self._most:
            self._needed = CALM_LOOKS
        was_said = self.note
        self._has_spilled = spilled > 0 or (self._has_spilled and bool(was_said))
        if spilled:
            self._settling = _SETTLING_LOOKS
        self._limit(total)
        if not was_said:
            _log.warning("%s", self.note)

    def _raise(self, total: int, now_s: float) -> None:
        self._calm = 0
        total = min(self._most, total)
        if total > self._budget.total:
            self._raised_s = now_s
            self._limit(total)

    def _limit(self, total: int) -> None:
        self._ours = total
        self._budget.limit(total)
        self._enforce(total)
