"""Experts in RAM over experts on disk: slots within a budget, filled by reads that overlap with computation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_down, rounded_up
from engine.devices.host_memory import available_ram
from engine.experts.bank import BankLayer
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Slot
from engine.experts.cache.tier import ADAPTIVE, CacheSnapshot, Purpose, TierCounters
from engine.experts.disk_tier import DiskTier, Read
from engine.experts.record import CAN_GIVE_BACK
from engine.experts.slot_group import least_nbytes, make_groups, share_slots

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


_log = logging.getLogger(__name__)


@dataclass
class Acquired:
    """Experts of one layer, pinned in their slots until released.

    Attributes:
        slots: expert -> its slot.
        arriving: those still being read -> a future that is done when they have arrived.
        left: experts that got no slot because all are in use; release the others, then acquire these.
    """

    layer: int
    slots: dict[int, Slot] = field(default_factory=dict)
    arriving: dict[int, Future[None]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    def wait(self) -> None:
        """Blocks until all of them have arrived.

        Raises:
            EngineError: one could not be read; the others have arrived or still will.
        """
        for arrival in self.arriving.values():
            arrival.result()


class RamTier:
    """A budget of RAM for the records of a bank on disk.  Safe to use from several threads.

    Args:
        disk: source of the records; it must stay open until this tier is closed, and is closed by its owner.
        budget: bytes for records.
        at_least: experts of one layer that must fit at once (the number a token is routed to).
        policy: one of `engine.experts.cache.policies`, or `auto` for the one with the best hit rate.
        popularity: uses of each `key_of(layer, expert)` in a calibration, for the static policy.
        pressure: adapts the budget to the memory that other programs need; `None` keeps it fixed.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`; the message gives the minimum.
    """

    def __init__(
        self,
        disk: DiskTier,
        budget: int,
        *,
        at_least: int = 1,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        seed: int = 0,
        pressure: RamPressure | None = None,
    ) -> None:
        self._disk = disk
        self._at_least = at_least
        self._pressure = pressure
        self._stride = max((layer.num_experts for layer in disk.table.layers), default=1)
        self._refused: str | None = None
        self._lowered: str | None = None
        self._counters = TierCounters()
        self._groups, had = make_groups(disk.table, budget, at_least, self._counters, policy, popularity, seed)
        if had != budget:
            self._refused = f"Only {about(had)} of RAM was available for experts: more are read from disk."
        self._distinct = list(dict.fromkeys(self._groups))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrivals: dict[Key, Future[None]] = {}
        self._closed = False

    def __enter__(self) -> RamTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, at most the budget."""
        return sum(group.nbytes for group in self._distinct)

    @property
    def note(self) -> str | None:
        """A sentence for the user while there is less RAM for experts than planned."""
        return self._lowered or self._refused

    @property
    def counters(self) -> TierCounters:
        """A copy of the counters: hits + late + misses is the number of experts acquired."""
        with self._lock:
            return replace(self._counters)

    @property
    def backlog_bytes(self) -> int:
        """Bytes of the reads in flight."""
        return sum(group.tier.backlog_bytes for group in self._distinct)

    def capacity(self, layer: int) -> int:
        """Current number of slots for this layer and those that share its pool."""
        self._check_open()
        return self._groups[layer].pool.capacity

    def key_of(self, layer: int, expert: int) -> Key:
        return layer * self._stride + expert

    def slots(self, layer: int) -> BankLayer:
        """The slots for this layer's experts, as a layer that kernels index by slot.

        Includes all slots that there can ever be; `capacity` of them are in use.
        """
        return self._groups[layer].slots

    def resident(self, layer: int) -> dict[int, Slot]:
        """The layer's experts in RAM now; they may be evicted at any time unless acquired."""
        with self._lock:
            return self._groups[layer].tier.residents(layer)

    @property
    def filled_nbytes(self) -> int:
        """Bytes of the slots with a resident or arriving expert."""
        with self._lock:
            return sum(group.filled_nbytes for group in self._distinct)

    def snapshots(self) -> list[CacheSnapshot]:
        """The state of each layout's slots, taken atomically."""
        with self._lock:
            return [group.tier.snapshot() for group in self._distinct]

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither resident nor arriving, in the same order.  Not counted as a use."""
        with self._lock:
            self._check_open()
            return self._groups[layer].tier.absent(layer, experts)

    def acquire(self, layer: int, experts: Sequence[int]) -> Acquired:
        """Pins each of these (distinct) experts in a slot until `release`.

        Reads of missing ones start at once.  If all slots are in use, some or all experts are `left`.  Blocks only if
        no expert can get a slot before a read in flight ends.

        Raises:
            EngineError: `INTERNAL`, the tier is closed.
        """
        if self._pressure is not None and self._pressure.is_due:
            self.trim()
        with self._changed:
            self._check_open()
            group, first = self._groups[layer], layer * self._stride
            if group.tier.sampler is not None:
                group.tier.observe(layer, [first + expert for expert in experts])
            acquired, reads = self._grant(layer, experts)
            while not acquired.slots and acquired.left and group.pool.arriving:
                self._changed.wait()
                self._check_open()
                acquired, reads = self._grant(layer, experts)
        if reads:
            self._follow(reads)
        return acquired

    def hold(self, layer: int, experts: Iterable[int]) -> Acquired:
        """Pins those of these experts that are in RAM now until `release`.  Not counted as a use."""
        with self._lock:
            self._check_open()
            return Acquired(layer, self._groups[layer].tier.hold(layer, experts))

    def acquire_ahead(self, layer: int, experts: Sequence[int]) -> Acquired:
        """As `acquire`, but never blocks and may pin none, for callers with other experts to compute meanwhile."""
        with self._lock:
            self._check_open()
            acquired, reads = self._grant(layer, experts)
        if reads:
            self._follow(reads)
        return acquired

    def release(self, acquired: Acquired) -> None:
        """Unpins these experts, whether they have arrived or not.  Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._groups[acquired.layer].tier.release(acquired.layer, acquired.slots)
            acquired.slots = {}
            self._changed.notify_all()

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Starts reading experts that may be needed, into free slots and those of `dead` experts.

        Args:
            dead: (layer, expert) pairs that are not expected to be needed and may be evicted.

        Returns:
            How many reads were started; experts without a slot are skipped.
        """
        reads: list[Read] = []
        with self._lock:
            self._check_open()
            tier, evictable = self._groups[layer].tier, iter(dead)
            for expert in experts:
                if not tier.absent(layer, [expert]):
                    continue
                copy = tier.prefetch(layer, expert, self._disk, evictable)
                if copy is None:
                    break
                self._arrivals[copy.key] = Future()
                reads.append(copy.handle)
        failed = sum(read.done() and read.exception() is not None for read in reads)
        self._follow(reads)
        return len(reads) - failed

    def resize(self, budget: int) -> int:
        """Changes the budget.  Shrinking evicts by policy and returns the memory to the system at once.

        Experts that are pinned or in flight keep their slots, so the budget may not be reached until a later call.
        It is raised to the minimum that a step needs.

        Returns:
            Bytes of all slots now.
        """
        with self._changed:
            self._check_open()
            table = self._disk.table
            budget = max(budget, least_nbytes(table, self._at_least))
            for layout, count in share_slots(table, budget, self._at_least).items():
                group = next(group for group in self._distinct if group.slots.layout == layout)
                group.resize(count)
            self._changed.notify_all()
            return self.nbytes

    def trim(self) -> None:
        """Adapts the budget to the machine's available RAM; `acquire` calls it periodically."""
        if self._pressure is None or not CAN_GIVE_BACK:
            return
        before = self.nbytes
        wanted = self._pressure.advise(before, self.filled_nbytes)
        if wanted is None:
            return
        now, budget = self.resize(wanted), self._pressure.budget
        self._lowered = None
        if now < budget - budget // 32:
            self._lowered = (
                f"Other programs need RAM: {rounded_down(now)} of the {rounded_up(budget)} meant for experts are "
                "used, and more experts are read from disk."
            )
        if now < before:
            _log.warning("%s", self._lowered)

    def close(self) -> None:
        """Waits for reads in flight, then frees the memory.  Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._arrivals:
                self._changed.wait()
            self._groups, self._distinct = [], []

    def _grant(self, layer: int, experts: Sequence[int]) -> tuple[Acquired, list[Read]]:
        """Pins as many experts as have or get a slot.  Residents are pinned first, so that no miss evicts them."""
        tier, counters, acquired = self._groups[layer].tier, self._counters, Acquired(layer)
        first, pool = layer * self._stride, tier.pool_of[layer]
        missing = []
        for expert, slot in zip(experts, tier.look_up(layer, [first + one for one in experts]), strict=True):
            key = first + expert
            if slot is not None:
                counters.hits += 1
            elif (slot := pool.arriving.get(key)) is not None:
                counters.late += 1
                acquired.arriving[expert] = self._arrivals[key]
                self._disk.hurry(tier.copies[key].handle)
                pool.pin(key)
                if key in tier.predicted:
                    tier.count_needed(key)
            else:
                missing.append(expert)
                continue
            acquired.slots[expert] = slot
        reads: list[Read] = []
        for expert in missing:
            copy = tier.bring(layer, expert, self._disk, Purpose.FETCH, only_if_admitted=False)
            if copy is None:
                acquired.left.append(expert)
                continue
            pool.pin(copy.key)
            counters.misses += 1
            acquired.slots[expert] = copy.slot
            acquired.arriving[expert] = self._arrivals[copy.key] = Future()
            reads.append(copy.handle)
        return acquired, reads

    def _follow(self, reads: list[Read]) -> None:
        """Call without the lock: the callback of a finished read runs at once, on this thread."""
        for read in reads:
            read.add_done_callback(self._arrived)

    def _arrived(self, read: Future[None]) -> None:
        assert isinstance(read, Read)
        error = read.exception()
        with self._changed:
            tier = self._groups[read.layer].tier
            copy = tier.copies[tier.key_of(read.layer, read.expert)]
            tier.end(copy, succeeded=error is None)
            arrival = self._arrivals.pop(copy.key)
            self._changed.notify_all()
        if error is None:
            arrival.set_result(None)
        else:
            arrival.set_exception(error)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(ErrorCode.INTERNAL, "An expert was requested after the model had been closed.")
