"""A device's memory budget and its use by category, to the byte."""

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
    """Uses of memory."""

    WEIGHTS = "weights"
    EXPERTS = "experts"
    STAGING = "staging"
    KV = "kv"
    ACTIVATIONS = "activations"


class DeviceMemoryError(EngineError):
    """A device has too little memory left.

    Attributes:
        asked: requested bytes.  free: bytes left in its budget; if they suffice, other programs use the memory.
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
        self.asked = asked
        self.free = free


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A snapshot of a budget, in bytes; `peak` is the maximum use so far."""

    total: int
    by_category: Mapping[MemoryCategory, int]
    peak: int

    @property
    def used(self) -> int:
        """Total bytes of all categories."""
        return sum(self.by_category.values())


class Reservation:
    """Bytes counted for memory allocated elsewhere, such as the library's KV cache."""

    def __init__(self, budget: MemoryBudget, category: MemoryCategory) -> None:
        self._budget = budget
        self.category = category
        self.nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Changes the reservation to `nbytes`.

        Raises:
            DeviceMemoryError: it does not fit; the reservation is unchanged.
        """
        self._budget._resize(self, nbytes)

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

    Attributes:
        device: as above.
    """

    def __init__(self, device: str, total: int, allocator: Callable[[int], torch.Tensor]) -> None:
        self.device = device
        self._total = total
        self._allocator = allocator
        self._lock = threading.Lock()
        self._used = dict.fromkeys(MemoryCategory, 0)
        self._sum = 0
        self._peak = 0
        # By address.  Holding the tensor keeps its address from being reused.
        self._allocated: dict[int, tuple[torch.Tensor, MemoryCategory]] = {}

    @property
    def total(self) -> int:
        """The budget in bytes."""
        return self._total

    @property
    def free(self) -> int:
        """Bytes that may still be allocated; 0 if the budget was lowered below its use."""
        with self._lock:
            return self._free()

    @property
    def excess(self) -> int:
        """Bytes over budget, after it was lowered."""
        with self._lock:
            return max(0, self._sum - self._total)

    def use(self) -> MemoryUse:
        """A consistent snapshot of the budget."""
        with self._lock:
            return MemoryUse(self._total, dict(self._used), self._peak)

    def limit(self, total: int) -> None:
        """Changes the budget.  It may be below the current use: see `excess`."""
        if total < 0:
            raise ValueError(f"a budget of {total} bytes")
        with self._lock:
            self._total = total

    def allocate(self, nbytes: int, category: MemoryCategory) -> torch.Tensor:
        """Page-aligned bytes [nbytes] on the device, not initialised, valid until `release`.

        Raises:
            DeviceMemoryError: over budget, or the device is out of memory; nothing is counted.
        """
        self._take(nbytes, category)
        try:
            memory = self._allocator(nbytes)
        except BaseException as error:
            with self._lock:
                self._count(-nbytes, category)
                free = self._free()
            if is_out_of_memory(error):
                raise DeviceMemoryError(self.device, category, nbytes, free) from None
            raise
        with self._lock:
            self._allocated[_address(memory)] = (memory, category)
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """Releases memory from `allocate` (or any view of it); it is freed with the last tensor that uses it.

        Raises:
            ValueError: not allocated here, or already released.
        """
        with self._lock:
            found = self._allocated.pop(_address(memory), None)
            if found is None:
                raise ValueError(f"memory not allocated by {self.device}, or already released")
            whole, category = found
            self._count(-whole.nbytes, category)

    def reserve(self, nbytes: int, category: MemoryCategory) -> Reservation:
        """Counts memory allocated elsewhere.

        Raises:
            DeviceMemoryError: over budget.
        """
        reservation = Reservation(self, category)
        reservation.resize(nbytes)
        return reservation

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in memory allocated here."""
        return _address(tensor) in self._allocated

    def _take(self, nbytes: int, category: MemoryCategory) -> None:
        if nbytes < 0:
            raise ValueError(f"an allocation of {nbytes} bytes")
        with self._lock:
            if nbytes > self._free():
                raise DeviceMemoryError(self.device, category, nbytes, self._free())
            self._count(nbytes, category)

    def _resize(self, reservation: Reservation, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"a reservation of {nbytes} bytes")
        with self._lock:
            more = nbytes - reservation.nbytes
            if more > 0 and more > self._free():
                raise DeviceMemoryError(self.device, reservation.category, more, self._free())
            self._count(more, reservation.category)
            reservation.nbytes = nbytes

    def _free(self) -> int:
        return max(0, self._total - self._sum)

    def _count(self, nbytes: int, category: MemoryCategory) -> None:
        self._used[category] += nbytes
        self._sum += nbytes
        self._peak = max(self._peak, self._sum)


def _address(tensor: torch.Tensor) -> int:
    """Address of the storage of `tensor`."""
    return tensor.untyped_storage().data_ptr()
