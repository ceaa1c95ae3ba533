"""Access to a layer's records in RAM, for the CPU's kernel and for copies to a device.

Either all of them are in RAM, or they are read on demand into slots of a RAM tier over disk.  A slot is not reused
while a copy to a device still reads it: copies end long after the step that started them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Event
from engine.experts.bank import BankLayer
from engine.experts.cache.pool import Slot
from engine.experts.ram_tier import Acquired, RamTier
from engine.kernels.interface import ExpertKernel

_LENT_SHARE = 4
"""Non-urgent copies may hold one RAM slot in so many: steps need the others."""


class Held:
    """Records of one layer, pinned in RAM until released; of this class if all of the layer's are there and stay.

    Attributes:
        rows: expert -> its row in the records of the CPU's kernel.
        arriving: experts still being read -> a future, done when they have arrived; EngineError if a read fails.
        left: experts that got no slot: release others, then acquire these.
    """

    def __init__(self, records: torch.Tensor, rows: Mapping[int, int]) -> None:
        self._records, self.rows = records, rows
        self.arriving: Mapping[int, Future[None]] = {}
        self.left: Sequence[int] = ()

    def record(self, expert: int) -> torch.Tensor:
        """[record bytes], uint8."""
        return self._records[self.rows[expert]]

    def until(self, expert: int, copied: Event) -> None:
        """Keeps the record after its release until this copy of it has ended."""

    def release(self, experts: Iterable[int] | None = None) -> None:
        """Releases these experts, or all.  Idempotent."""


class RecordSource:
    """One layer's records; of this class if all of them are in RAM and stay there.

    Args:
        bank: the records.
        kernel: the CPU's, which takes rows of `Held` as expert ids.

    Attributes:
        has_all: whether all records are always in RAM.
    """

    has_all = True

    def __init__(self, bank: BankLayer, kernel: ExpertKernel) -> None:
        self._records, self.kernel = bank.records, kernel
        self.num_experts = bank.num_experts

    @property
    def lendable(self) -> int:
        """How many more records non-urgent copies may hold."""
        return 2**31

    def acquire(self, experts: Sequence[int]) -> Held:
        """Pins these distinct experts, and starts reading missing ones.  May pin none of them.

        Raises:
            EngineError: the model has been closed.
        """
        return Held(self._records, {expert: expert for expert in experts})

    def acquire_ahead(self, experts: Sequence[int]) -> Held:
        """As `acquire`, but never blocks, for callers with other experts to compute meanwhile."""
        return self.acquire(experts)

    def hold_present(self, experts: Sequence[int]) -> Held:
        """Pins those of them that are in RAM now, without counting a use, so eviction order does not change."""
        return self.acquire(experts)

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:  # noqa: ARG002
        """Starts reading missing experts; see `RamTier.prefetch`."""
        return 0

    def wait_for_copies(self) -> bool:
        """Waits until a copy that holds a record has ended; False if there is none."""
        return False


class PartOfRecords(RecordSource):
    """Some of a layer's records, all of them in RAM, as if they were a layer.

    Args:
        kernel: the CPU's, of the whole layer.
        own: which they are.
    """

    def __init__(self, bank: BankLayer, kernel: ExpertKernel, own: range) -> None:
        super().__init__(bank, kernel)
        self.num_experts, self._first = len(own), own.start

    def acquire(self, experts: Sequence[int]) -> Held:
        return Held(self._records, {expert: self._first + expert for expert in experts})


class Arrivals:
    """Iterates over distinct experts of a layer as batches (holder, experts in RAM): first those in RAM, then the
    others as they arrive, as many at a time as RAM has slots for.  Each batch is released when the loop continues.

    Args:
        before_waiting: called before each wait for a read.
        make_room: called when non-urgent copies hold all slots in RAM.

    Attributes:
        left: experts not requested yet, for lack of a slot.
        read: experts that had to be read.
    """

    def __init__(
        self,
        source: RecordSource,
        experts: Sequence[int],
        before_waiting: Callable[[], object] | None = None,
        make_room: Callable[[], object] | None = None,
    ) -> None:
        self.left, self.read = experts, list[int]()
        self._source, self._before_waiting, self._make_room = source, before_waiting, make_room
        self._held: list[Held] = []

    def release(self) -> None:
        """Releases everything still held, if iteration was cut short.  Idempotent."""
        for held in self._held:
            held.release()

    def __iter__(self) -> Iterator[tuple[Held, list[int]]]:
        """
        Raises:
            EngineError: a record could not be read, or the model has been closed.
        """
        source = self._source
        arrived: SimpleQueue[tuple[int, Held]] = SimpleQueue()
        coming, room = 0, len(self.left)
        while self.left or coming:
            if self.left:
                # While reads are in flight, request no more than have been released since.
                asked = self.left[:room] if coming else self.left
                held = source.acquire_ahead(asked) if coming else source.acquire(asked)
                self._held.append(held)
                self.left = [*held.left, *self.left[len(asked) :]] if held.left or coming else ()
                for expert, arrival in held.arriving.items():
                    self.read.append(expert)
                    arrival.add_done_callback(lambda _, expert=expert, held=held: arrived.put((expert, held)))  # type: ignore[misc]
                coming += len(held.arriving)
                there = list(held.rows)
                if held.arriving:
                    there = [expert for expert in there if expert not in held.arriving]
                if there:
                    yield held, there
                    held.release(there)
                    room = len(there)
                    continue
                if not coming:
                    self._wait_for_room()
                    continue
            if self._before_waiting is not None:
                self._before_waiting()
            batch = [arrived.get()]
            while not arrived.empty():
                batch.append(arrived.get())
            coming, room = coming - len(batch), len(batch)
            by_holder: dict[Held, list[int]] = {}
            for expert, held in batch:
                held.arriving[expert].result()
                by_holder.setdefault(held, []).append(expert)
            for held, there in by_holder.items():
                there.sort()
                yield held, there
                held.release(there)

    def _wait_for_room(self) -> None:
        if self._make_room is not None:
            self._make_room()
        if not self._source.wait_for_copies():
            raise EngineError(ErrorCode.INTERNAL, "All slots for experts in RAM are in use and none is being released.")


class LentSlots:
    """Slots of a RAM tier pinned by copies to devices.  Shared by all layers and devices of a tier; thread-safe."""

    def __init__(self, tier: RamTier) -> None:
        self.tier = tier
        self._lock = threading.Lock()
        self._lent: list[tuple[Acquired, list[Event]]] = []

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, slots: Acquired, copies: list[Event]) -> None:
        """Releases these slots once the copies have ended."""
        with self._lock:
            self._lent.append((slots, copies))

    def settle(self) -> None:
        """Releases slots whose copies have all ended."""
        if not self._lent:
            return
        with self._lock:
            ended = [slots for slots, copies in self._lent if all(copy.done() for copy in copies)]
            self._lent = [(slots, copies) for slots, copies in self._lent if not any(slots is one for one in ended)]
        for slots in ended:
            self.tier.release(slots)

    def wait(self) -> bool:
        """Waits until the oldest slots are released; False if none are lent."""
        with self._lock:
            copies = self._lent[0][1] if self._lent else []
        for copy in copies:
            with contextlib.suppress(EngineError):  # a copy that failed has ended too
                copy.wait()
        self.settle()
        return bool(copies)


class _InSlots(Held):
    """Experts in slots of a tier."""

    def __init__(self, lent: LentSlots, slots: torch.Tensor, acquired: Acquired) -> None:
        super().__init__(slots, dict(acquired.slots))
        self.arriving, self.left = acquired.arriving, acquired.left
        self._lent, self._layer, self._held = lent, acquired.layer, acquired.slots
        self._copies: dict[int, list[Event]] = {}

    def until(self, expert: int, copied: Event) -> None:
        self._copies.setdefault(expert, []).append(copied)

    def release(self, experts: Iterable[int] | None = None) -> None:
        unread: dict[int, Slot] = {}
        for expert in list(self._held) if experts is None else experts:
            slot = self._held.pop(expert, None)
            if slot is None:
                continue
            copies = self._copies.pop(expert, None)
            if copies:
                self._lent.lend(Acquired(self._layer, {expert: slot}), copies)
            else:
                unread[expert] = slot
        if unread:
            self._lent.tier.release(Acquired(self._layer, unread))


class TierRecords(RecordSource):
    """A layer's records in slots of a RAM tier over disk.

    Args:
        lent: shared by all layers of the tier.
        layer: index of the layer in the tier.
        num_experts: how many it has.
        kernel: the CPU's, bound to the tier's slots of this layer.
    """

    has_all = False

    def __init__(self, lent: LentSlots, layer: int, num_experts: int, kernel: ExpertKernel) -> None:
        self._lent, self._tier, self._layer = lent, lent.tier, layer
        self.num_experts, self.kernel = num_experts, kernel

    @property
    def lendable(self) -> int:
        return self._tier.capacity(self._layer) // _LENT_SHARE - len(self._lent)

    def acquire(self, experts: Sequence[int]) -> Held:
        self._lent.settle()
        return self._in_slots(self._tier.acquire(self._layer, experts))

    def acquire_ahead(self, experts: Sequence[int]) -> Held:
        self._lent.settle()
        return self._in_slots(self._tier.acquire_ahead(self._layer, experts))

    def hold_present(self, experts: Sequence[int]) -> Held:
        return self._in_slots(self._tier.hold(self._layer, experts))

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        return self._tier.prefetch(self._layer, experts, dead)

    def wait_for_copies(self) -> bool:
        return self._lent.wait()

    def _in_slots(self, acquired: Acquired) -> Held:
        # Looked up on every call: a reference kept here would keep the memory alive after the tier is closed.
        return _InSlots(self._lent, self._tier.slots(self._layer).records, acquired)
