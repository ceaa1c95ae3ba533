"""A device's memory: how much of it may be used, and who uses it, to the byte."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_down, rounded_up
from engine.devices.failures import is_out_of_memory


class MemoryCategory(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    EXPERTS = "experts"
    STAGING = "staging"
    KV = "kv"
    ACTIVATIONS = "activations"


class DeviceMemoryError(EngineError):
    """A device has not so much memory left.

    Attributes:
        asked: bytes.  free: bytes that its budget still allows; if they are enough, others have taken the memory.
    """

    def __init__(self, device: str, category: MemoryCategory, asked: int, free: int) -> None:
        if asked > free:
            left, more = rounded_down(free), rounded_up(asked)
            why = f"{device} has {left} of its memory left, and {more} more are needed for {category}"
            remedy = "allow it more with --vram, or choose a shorter context or a smaller model"
        else:
            why = f"{device} refused {about(asked)} for {category} that its budget allows"
            remedy = "close other programs that use its memory, or allow the model less with --vram"
        super().__init__(ErrorCode.NOT_ENOUGH_MEMORY, f"{why}: {remedy}.")
        self.asked = asked
        self.free = free


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A budget at one moment, in bytes; `peak` is the most that was ever used at once."""

    total: int
    by_category: Mapping[MemoryCategory, int]
    peak: int

    @property
    def used(self) -> int:
        """Bytes of all categories."""
        return sum(self.by_category.values())


class Reservation:
    """Bytes counted for memory that others allocate, such as the library's KV cache."""

    def __init__(self, budget: MemoryBudget, category: MemoryCategory) -> None:
        self._budget = budget
        self.category = category
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Counts `nbytes` from now on instead.

        Raises:
            DeviceMemoryError: that is more than there is; what was counted before stays counted.
        """
        self._budget._resize(self, nbytes)

    def release(self) -> None:
        """Counts nothing from now on."""
        self.resize(0)


class MemoryBudget:
    """Counts what a device's memory is used for and refuses what goes beyond.  Thread-safe.

    What is counted is what was asked for; alignment and the allocator's own rounding come on top.

    Args:
        device: its name, for messages.
        total: bytes that may be used.
        allocator: gives page-aligned bytes on the device; raises MemoryError or torch.OutOfMemoryError.
    """

    def __init__(self, device: str, total: int, allocator: Callable[[int], torch.Tensor]) -> None:
        self._device = device
        self._total = total
        self._allocator = allocator
        self._lock = threading.Lock()
        self._used = dict.fromkeys(MemoryCategory, 0)
        self._sum = 0
        self._peak = 0
        # By address.  Holding the tensor here is what keeps its address from being given to another.
        self._allocated: dict[int, tuple[torch.Tensor, MemoryCategory]] = {}

    @property
    def total(self) -> int:
        """Bytes that may be used."""
        return self._total

    @property
    def free(self) -> int:
        """Bytes that may still be allocated; 0 if more is used than the budget has meanwhile become."""
        with self._lock:
            return self._free()

    @property
    def excess(self) -> int:
        """Bytes that have to be given back for the budget to hold again, after it was made smaller."""
        with self._lock:
            return max(0, self._sum - self._total)

    def use(self) -> MemoryUse:
        """The budget as it is now; its figures belong together."""
        with self._lock:
            return MemoryUse(self._total, dict(self._used), self._peak)

    def limit(self, total: int) -> None:
        """Changes the budget.  It may become less than what is used: see `excess`."""
        if total < 0:
            raise ValueError(f"a budget of {total} bytes")
        with self._lock:
            self._total = total

    def allocate(self, nbytes: int, category: MemoryCategory) -> torch.Tensor:
        """Page-aligned bytes [nbytes] on the device, not initialised, which stay until `release`.

        Raises:
            DeviceMemoryError: beyond the budget, or the device itself has no more; nothing is counted then.
        """
        self._take(nbytes, category)
        try:
            memory = self._allocator(nbytes)
        except BaseException as error:
            with self._lock:
                self._count(-nbytes, category)
                free = self._free()
            if is_out_of_memory(error):
                raise DeviceMemoryError(self._device, category, nbytes, free) from None
            raise
        with self._lock:
            self._allocated[_address(memory)] = (memory, category)
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Gives back what `allocate` gave (or any view of it); it is freed when the last tensor that uses it is.

        Raises:
            ValueError: it is not from here, or was given back before.
        """
        with self._lock:
            found = self._allocated.pop(_address(memory), None)
            if found is None:
                raise ValueError(f"memory that {self._device} has not allocated, or that was released before")
            whole, category = found
            self._count(-whole.nbytes, category)

    def reserve(self, nbytes: int, category: MemoryCategory) -> Reservation:
        """Counts memory that others allocate.

        Raises:
            DeviceMemoryError: beyond the budget.
        """
        reservation = Reservation(self, category)
        reservation.resize(nbytes)
        return reservation

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in memory that was allocated here."""
        return _address(tensor) in self._allocated

    def _take(self, nbytes: int, category: MemoryCategory) -> None:
        if nbytes < 0:
            raise ValueError(f"an allocation of {nbytes} bytes")
        with self._lock:
            if nbytes > self._free():
                raise DeviceMemoryError(self._device, category, nbytes, self._free())
            self._count(nbytes, category)

    def _resize(self, reservation: Reservation, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"a reservation of {nbytes} bytes")
        with self._lock:
            more = nbytes - reservation.nbytes
            if more > 0 and more > self._free():
                raise DeviceMemoryError(self._device, reservation.category, more, self._free())
            self._count(more, reservation.category)
            reservation.nbytes = nbytes

    def _free(self) -> int:
        return max(0, self._total - self._sum)

    def _count(self, nbytes: int, category: MemoryCategory) -> None:
        self._used[category] += nbytes
        self._sum += nbytes
        self._peak = max(self._peak, self._sum)


def _address(tensor: torch.Tensor) -> int:
    """Of the whole memory that `tensor` is a view of."""
    return tensor.untyped_storage().data_ptr()
