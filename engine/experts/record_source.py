"""Where a layer's records are in RAM, for the CPU's kernel and for copies to a device.

Either all of them are there, or they come into slots of a RAM tier over disk when they are wanted.  A slot that a copy
to a device still reads is given to nobody else: copies end long after the step that began them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Event
from engine.experts.bank import BankLayer
from engine.experts.cache.pool import Slot
from engine.experts.ram_tier import Acquired, RamTier
from engine.kernels.interface import ExpertKernel

_LENT_SHARE = 4
"""Copies that nobody waits for may keep one RAM slot in so many: steps need the others."""


class Held(Protocol):
    """Records of one layer that stay in RAM until they are released."""

    @property
    def rows(self) -> Mapping[int, int]:
        """Expert -> its row among the records that the CPU's kernel computes from."""

    @property
    def arriving(self) -> Mapping[int, Future[None]]:
        """Those that are still being read -> done when they are there; it raises EngineError if they cannot be read."""

    @property
    def left(self) -> Sequence[int]:
        """Those for which there was no room: release others, then acquire these."""

    def record(self, expert: int) -> torch.Tensor:
        """[record bytes], uint8."""

    def until(self, expert: int, copied: Event) -> None:
        """After its release the record still stays until this copy of it has ended."""

    def release(self, experts: Iterable[int] | None = None) -> None:
        """Lets these go, or all.  Harmless if repeated."""


class RecordSource(Protocol):
    """One layer's records."""

    @property
    def num_experts(self) -> int:
        """How many experts the layer has."""

    @property
    def kernel(self) -> ExpertKernel:
        """Computes from rows of `Held`: to it they are the experts."""

    @property
    def has_all(self) -> bool:
        """Whether all records are always in RAM."""

    @property
    def lendable(self) -> int:
        """How many records copies may keep that nobody waits for."""

    def acquire(self, experts: Sequence[int]) -> Held:
        """Holds these distinct experts, which begin to be read where they are not there.  None at all may be held.

        Raises:
            EngineError: the model has been closed.
        """

    def acquire_ahead(self, experts: Sequence[int]) -> Held:
        """As `acquire`, for somebody who has others to compute meanwhile: it never waits."""

    def hold_present(self, experts: Sequence[int]) -> Held:
        """Holds those of them that are in RAM now.  That is no use of them: what stays in RAM is decided as before."""

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Begins to read those that are not there; see `RamTier.prefetch`."""

    def wait_for_copies(self) -> bool:
        """Waits until a copy has ended that keeps a record; False if none does."""


class Arrivals:
    """Iterates over these distinct experts of a layer: (what holds them, those of them that are there), first all that
    are in RAM, then the others as they arrive, as many at a time as RAM has slots for.  Each is let go after its turn.

    Args:
        before_waiting: called before each wait for a read.
        make_room: called where all slots in RAM are in use by copies that nobody waits for.

    Attributes:
        left: those that have not been asked for, because there was no slot.
        read: those that were not there when they were asked for.
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
        """Lets all go that are still held: for whoever does not come to the end.  Harmless if repeated."""
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
                # Behind those that come, no more are asked for than have been let go since.
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
            raise EngineError(ErrorCode.INTERNAL, "All places for experts in RAM are taken and not given back.")


class _InRam:
    """All records, always."""

    arriving: Mapping[int, Future[None]] = {}
    left: Sequence[int] = ()

    def __init__(self, records: torch.Tensor, experts: Sequence[int]) -> None:
        self._records = records
        self.rows = {expert: expert for expert in experts}

    def record(self, expert: int) -> torch.Tensor:
        return self._records[expert]

    def until(self, expert: int, copied: Event) -> None:
        pass

    def release(self, experts: Iterable[int] | None = None) -> None:
        pass


class RamRecords:
    """All of a layer's records are in RAM and stay there.

    Args:
        bank: the records.
        kernel: the CPU's, bound to them.
    """

    has_all = True
    lendable = 2**31

    def __init__(self, bank: BankLayer, kernel: ExpertKernel) -> None:
        self._records = bank.records
        self.kernel = kernel
        self.num_experts = bank.num_experts

    def acquire(self, experts: Sequence[int]) -> Held:
        """See `RecordSource.acquire`."""
        return _InRam(self._records, experts)

    acquire_ahead = hold_present = acquire

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:  # noqa: ARG002
        """See `RecordSource.prefetch`."""
        return 0

    def wait_for_copies(self) -> bool:
        """See `RecordSource.wait_for_copies`."""
        return False


class LentSlots:
    """Slots of a RAM tier that copies to devices still read.  One for all layers and devices of a tier; thread-safe."""

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
        """Releases what no copy reads any more."""
        if not self._lent:
            return
        with self._lock:
            ended = [slots for slots, copies in self._lent if all(copy.done() for copy in copies)]
            self._lent = [(slots, copies) for slots, copies in self._lent if not any(slots is one for one in ended)]
        for slots in ended:
            self.tier.release(slots)

    def wait(self) -> bool:
        """Waits until the oldest is released; False if nothing is lent."""
        with self._lock:
            copies = self._lent[0][1] if self._lent else []
        for copy in copies:
            with contextlib.suppress(EngineError):  # a copy that failed has ended too
                copy.wait()
        self.settle()
        return bool(copies)


class _InSlots:
    """Experts in slots of a tier."""

    def __init__(self, lent: LentSlots, slots: torch.Tensor, acquired: Acquired) -> None:
        self._lent, self._slots, self._layer = lent, slots, acquired.layer
        self.rows: Mapping[int, Slot] = dict(acquired.slots)
        self.arriving: Mapping[int, Future[None]] = acquired.arriving
        self.left: Sequence[int] = acquired.left
        self._held = acquired.slots
        self._copies: dict[int, list[Event]] = {}

    def record(self, expert: int) -> torch.Tensor:
        return self._slots[self.rows[expert]]

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


class TierRecords:
    """A layer's records come into slots of a RAM tier over disk.

    Args:
        lent: of the tier, shared by all its layers.
        layer: index of the layer in the tier.
        num_experts: how many it has.
        kernel: the CPU's, bound to the tier's slots of this layer.
    """

    def __init__(self, lent: LentSlots, layer: int, num_experts: int, kernel: ExpertKernel) -> None:
        self._lent, self._tier, self._layer = lent, lent.tier, layer
        self.num_experts = num_experts
        self.kernel = kernel

    has_all = False

    @property
    def lendable(self) -> int:
        """See `RecordSource.lendable`."""
        return self._tier.capacity(self._layer) // _LENT_SHARE - len(self._lent)

    def acquire(self, experts: Sequence[int]) -> Held:
        """See `RecordSource.acquire`."""
        self._lent.settle()
        return self._in_slots(self._tier.acquire(self._layer, experts))

    def acquire_ahead(self, experts: Sequence[int]) -> Held:
        """See `RecordSource.acquire_ahead`."""
        self._lent.settle()
        return self._in_slots(self._tier.acquire_ahead(self._layer, experts))

    def hold_present(self, experts: Sequence[int]) -> Held:
        """See `RecordSource.hold_present`."""
        return self._in_slots(self._tier.hold(self._layer, experts))

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """See `RecordSource.prefetch`."""
        return self._tier.prefetch(self._layer, experts, dead)

    def wait_for_copies(self) -> bool:
        """See `RecordSource.wait_for_copies`."""
        return self._lent.wait()

    def _in_slots(self, acquired: Acquired) -> Held:
        # Asked for each time: the memory must not outlive the tier because a layer still knows it.
        return _InSlots(self._lent, self._tier.slots(self._layer).records, acquired)
