"""Access to a layer's records in RAM, for the CPU's kernel and for copies to a device.

Either all of them are in RAM, or they are read on demand into slots of a `RamTier` over disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Event
from engine.kernels.interface import ExpertKernel, LayerRecords


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
        return self._records[self.rows[expert]]

    def until(self, expert: int, copied: Event) -> None:
        """Keeps the record after its release until this copy of it has ended."""

    def release(self, experts: Iterable[int] | None = None) -> None:
        """Releases these experts, or all.  Idempotent."""


class RecordSource:
    """One layer's records; of this class if all of them are in RAM and stay there."""

    has_all = True

    def __init__(self, bank: LayerRecords, kernel: ExpertKernel) -> None:
        self._records, self.kernel = bank.records, kernel
        self.num_experts = bank.num_experts

    @property
    def lendable(self) -> int:
        return 2**31

    def acquire(self, experts: Sequence[int], *, waits: bool = True) -> Held:  # noqa: ARG002
        """Pins these distinct experts, and starts reading missing ones.  May pin none; see `RamTier.acquire`."""
        return Held(self._records, {expert: expert for expert in experts})

    def hold_present(self, experts: Sequence[int]) -> Held:
        """Pins those of them that are in RAM now, without counting a use, so eviction order does not change."""
        return self.acquire(experts)

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:  # noqa: ARG002
        """Starts reading missing experts; see `RamTier.prefetch`."""
        return 0

    def wait_for_copies(self) -> bool:
        """Waits until a copy that holds a record has ended; False if there is none."""
        return False


class _PartHeld(Held):
    """Records that a layer holds, by the numbers of a part of it."""

    def __init__(self, whole: Held, first: int) -> None:
        self._whole, self._first = whole, first
        self.rows = {expert - first: row for expert, row in whole.rows.items()}
        self.arriving = {expert - first: arrival for expert, arrival in whole.arriving.items()}
        self.left = [expert - first for expert in whole.left]

    def record(self, expert: int) -> torch.Tensor:
        return self._whole.record(self._first + expert)

    def until(self, expert: int, copied: Event) -> None:
        self._whole.until(self._first + expert, copied)

    def release(self, experts: Iterable[int] | None = None) -> None:
        self._whole.release(None if experts is None else [self._first + expert for expert in experts])


class PartOfRecords(RecordSource):
    """Some of a layer's records as if they were a layer."""

    def __init__(self, whole: RecordSource, own: range) -> None:
        self._whole, self._first = whole, own.start
        self.kernel, self.has_all, self.num_experts = whole.kernel, whole.has_all, len(own)

    @property
    def lendable(self) -> int:
        return self._whole.lendable

    def acquire(self, experts: Sequence[int], *, waits: bool = True) -> Held:
        return _PartHeld(self._whole.acquire(self._in_whole(experts), waits=waits), self._first)

    def hold_present(self, experts: Sequence[int]) -> Held:
        return _PartHeld(self._whole.hold_present(self._in_whole(experts)), self._first)

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:  # noqa: ARG002
        """See `RecordSource.prefetch`; what is dead is by the numbers of a card."""
        return self._whole.prefetch(self._in_whole(experts))

    def wait_for_copies(self) -> bool:
        return self._whole.wait_for_copies()

    def _in_whole(self, experts: Iterable[int]) -> list[int]:
        return [self._first + expert for expert in experts]


class Arrivals:
    """Iterates over distinct experts of a layer as batches (holder, experts in RAM): first those in RAM, then the
    others as they arrive, as many at a time as RAM has slots for.  Each batch is released when the loop continues.

    Args:
        before_waiting: called before each wait for a read.

    Attributes:
        left: experts not requested yet, for lack of a slot.
        read: experts that had to be read.
    """

    def __init__(
        self,
        source: RecordSource,
        experts: Sequence[int],
        before_waiting: Callable[[], object] | None = None,
    ) -> None:
        self.left, self.read = experts, list[int]()
        self._source, self._before_waiting = source, before_waiting
        self._held: list[Held] = []

    def release(self) -> None:
        for held in self._held:
            held.release()

    def __iter__(self) -> Iterator[tuple[Held, list[int]]]:
        source = self._source
        arrived: SimpleQueue[tuple[int, Held]] = SimpleQueue()
        coming, room = 0, len(self.left)
        while self.left or coming:
            if self.left:
                # While reads are in flight, request no more than have been released since.
                asked = self.left[:room] if coming else self.left
                held = source.acquire(asked, waits=not coming)
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
                    if not source.wait_for_copies():
                        why = "All slots for experts in RAM are in use and none is being released."
                        raise EngineError(ErrorCode.INTERNAL, why)
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
