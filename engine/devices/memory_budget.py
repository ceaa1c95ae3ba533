"""A device's memory budget and its use by category, to the byte."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_down, rounded_up
from engine.devices.failures import is_out_of_memory


class MemoryCategory(StrEnum):
    """Uses of memory."""

    WEIGHTS = "weights"
    EXPERTS = "experts"
    STAGING = "staging"
    KV = "kv"
    ACTIVATIONS = "activations"


class DeviceMemoryError(EngineError):
    """A device has too little memory left.

    Attributes:
        asked, free: bytes; if those suffice that its budget has left, other programs use the memory.
    """

    def __init__(self, device: str, category: MemoryCategory, asked: int, free: int) -> None:
        if asked > free:
            left, more = rounded_down(free), rounded_up(asked)
            why = f"{device} has {left} of memory left and needs {more} more for {category}"
            remedy = "allow it more with --vram, or choose a shorter context or a smaller model"
        else:
            why = f"{device} refused {about(asked)} for {category} that its budget allows"
            remedy = "close other programs that use its memory, or allow the model less with --vram"
        super().__init__(ErrorCode.NOT_ENOUGH_MEMORY, f"{why}: {remedy}.")
        self.asked, self.free = asked, free


_Result = TypeVar("_Result")


def with_room(work: Callable[[], _Result], give_back: Callable[[int], int]) -> _Result:
    """What `work` returns, and where a device has no room for it, once more with what `give_back` frees of it."""
    try:
        return work()
    except DeviceMemoryError as refused:
        if not give_back(refused.asked):
            raise
    return work()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A snapshot of a budget, in bytes; `peak` is the maximum use so far."""

    total: int
    by_category: Mapping[MemoryCategory, int]
    peak: int

    @property
    def used(self) -> int:
        return sum(self.by_category.values())


class Reservation:
    """Bytes counted for memory allocated elsewhere, such as the library's KV cache."""

    def __init__(self, budget: MemoryBudget, category: MemoryCategory) -> None:
        self._budget, self.category, self.nbytes = budget, category, 0

    def resize(self, nbytes: int) -> None:
        """Changes the reservation; if that does not fit, it raises `DeviceMemoryError` and is unchanged."""
        self._budget._take(nbytes - self.nbytes, self.category)
        self.nbytes = nbytes

    def release(self) -> None:
        """Ends the reservation."""
        self.resize(0)


class MemoryBudget:
    """Tracks a device's memory by category and enforces its budget.  Thread-safe.

    Counts requested bytes; alignment and the allocator's rounding come on top.

    Args:
        device: its name, for messages.
        total: the budget in bytes.
        allocator: returns page-aligned bytes on the device; raises MemoryError or torch.OutOfMemoryError.
    """

    def __init__(self, device: str, total: int, allocator: Callable[[int], torch.Tensor]) -> None:
        self.device, self.total, self._allocator = device, total, allocator
        self._lock = threading.Lock()
        self._used = dict.fromkeys(MemoryCategory, 0)
        self._sum = self._peak = 0
        # By address.  Holding the tensor keeps its address from being reused.
        self._allocated: dict[int, tuple[torch.Tensor, MemoryCategory]] = {}

    @property
    def free(self) -> int:
        """Bytes that may still be allocated; 0 if the budget was lowered below its use."""
        return max(0, self.total - self._sum)

    @property
    def excess(self) -> int:
        """Bytes over budget, after it was lowered."""
        return max(0, self._sum - self.total)

    def use(self) -> MemoryUse:
        """A consistent snapshot of the budget."""
        with self._lock:
            return MemoryUse(self.total, dict(self._used), self._peak)

    def limit(self, total: int) -> None:
        """Changes the budget.  It may be below the current use: see `excess`."""
        self.total = total

    def allocate(self, nbytes: int, category: MemoryCategory) -> torch.Tensor:
        """Page-aligned bytes [nbytes] on the device, not initialised, valid until `release`.

        Raises:
            DeviceMemoryError: over budget, or the device is out of memory; nothing is counted.
        """
        self._take(nbytes, category)
        try:
            memory = self._allocator(nbytes)
        except BaseException as error:
            self._take(-nbytes, category)
            if is_out_of_memory(error):
                raise DeviceMemoryError(self.device, category, nbytes, self.free) from None
            raise
        with self._lock:
            self._allocated[_address(memory)] = (memory, category)
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Releases memory from `allocate` (or any view of it); it is freed with the last tensor that uses it."""
        with self._lock:
            found = self._allocated.pop(_address(memory), None)
        if found is None:
            raise ValueError(f"memory not allocated by {self.device}, or already released")
        self._take(-found[0].nbytes, found[1])

    def reserve(self, nbytes: int, category: MemoryCategory) -> Reservation:
        """Counts memory allocated elsewhere; raises `DeviceMemoryError` if it is over budget."""
        reservation = Reservation(self, category)
        reservation.resize(nbytes)
        return reservation

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in memory allocated here."""
        return _address(tensor) in self._allocated

    def _take(self, nbytes: int, category: MemoryCategory) -> None:
        with self._lock:
            if nbytes > 0 and nbytes > self.free:
                raise DeviceMemoryError(self.device, category, nbytes, self.free)
            self._used[category] += nbytes
            self._sum += nbytes
            self._peak = max(self._peak, self._sum)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
    """Bytes of a device's memory that nobody uses, and of ours that lie in RAM, as the system moved them there."""

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
        self._calm, self._needed, self._seen_free, self._settling = 0, CALM_LOOKS, 0, 0
        self._has_spilled = False

    @property
    def free(self) -> int:
        """Bytes that nobody uses now.  Raises RuntimeError if the device has failed."""
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
        """Asks the driver, every few seconds of a clock that never goes back, and changes the budget if need be.

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
