"""Experts in RAM over experts on disk: slots within a budget, filled by reads that overlap with computation."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about, rounded_down, rounded_up
from engine.devices.device import Event
from engine.devices.host_memory import available_ram
from engine.experts.cache.policies import Key, Slot
from engine.experts.cache.tier import ADAPTIVE, CacheSnapshot, Purpose, Tier, TierCounters
from engine.experts.direct_file import bytes_of
from engine.experts.disk_tier import DiskTier, Read
from engine.experts.record import RecordMemory, RecordTable
from engine.experts.record_source import Held, RecordSource
from engine.formats.tiles import RecordLayout
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.paged_attention import CAN_DISCARD

_log = logging.getLogger(__name__)

_MOST_RESERVED = 512 * 2**20
_RESERVED_SHARE = 20
_LOOK_S = 0.25
"""Querying the system takes about 0.1 ms, too long for every step; memory does not run out faster than this."""
_PATIENCE_S = 10.0
"""Delay before growing again after a shrink, as the other program may need more memory."""
_STEP_SHARE = 32
"""Growth of less than one part in so many of the budget is not worth it."""
_LENT_SHARE = 4
"""Non-urgent copies to devices may hold one slot in so many: steps need the others."""


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
        return self._clock() >= self._look_at_s

    def advise(self, allowed: int, filled: int) -> int | None:
        """The new limit of the cache in bytes; `None` if it does not change or the next check is not due."""
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


class _Slots:
    """The slots shared by all layers with records of one layout, and the `Copier` from disk to them.

    Attributes:
        slots: the memory, as a layer that kernels index by slot, used or not.
        tier: manages the slots; pool: its only pool.
    """

    def __init__(
        self, table: RecordTable, layout: RecordLayout, count: int, most: int, counters: TierCounters, policy: str
    ) -> None:
        self._memory = RecordMemory(most, layout.nbytes)
        self.slots = LayerRecords("slots", layout, self._memory.records)
        self._unused = list(range(most - 1, count - 1, -1))
        layers, experts = len(table.layers), max(layer.num_experts for layer in table.layers)
        self.tier = Tier(self, layers, experts, layout.nbytes, policy, counters=counters)
        sharing = [index for index, layer in enumerate(table.layers) if layer.layout == layout]
        self.pool = self.tier.open_pool(sharing, range(count), count)
        self.tier.renew_sampler()

    @property
    def nbytes(self) -> int:
        return self.pool.capacity * self.slots.layout.nbytes

    def start(self, layer: int, expert: int, slot: Slot, source: DiskTier, purpose: Purpose) -> Read:
        target = self.slots.records[slot]
        try:
            return source.read(layer, expert, target, urgent=purpose is Purpose.FETCH)
        except EngineError as error:
            read = Read(layer, expert, bytes_of(target))
            read.set_exception(error)
            return read

    def resize(self, count: int) -> None:
        """Adds slots, or evicts by policy and returns their memory to the system; fewer than asked for while too many
        are pinned or in flight."""
        before = self.pool.capacity
        if count > before:
            more = [self._unused.pop() for _ in range(min(count - before, len(self._unused)))]
            self.pool.grow(more[::-1])
        elif count < before:
            removed = self._move_down(self.pool.shrink(before - count))
            self._unused += removed
            self._unused.sort(reverse=True)  # lowest slots are reused first, which keeps free memory contiguous
            self._memory.give_back(removed)
        if self.pool.capacity != before:
            self.tier.renew_sampler()

    def _move_down(self, removed: list[Slot]) -> list[Slot]:
        """Compacts: moves unpinned experts from the highest slots into these, as only whole huge pages can be freed."""
        limit, pool, records = self.pool.capacity, self.pool, self.slots.records
        high = [(key, slot) for key, slot in pool.residents.items() if slot >= limit and not pool.is_used(key)]
        low = [slot for slot in removed if slot < limit]
        removed = [slot for slot in removed if slot >= limit]
        for key, slot in high[: len(low)]:
            place = low.pop()
            records[place].copy_(records[slot])
            removed.append(pool.move(key, place))
        return removed + low


def share_slots(table: RecordTable, budget: int, at_least: int) -> dict[RecordLayout, int]:
    """Divides `budget` bytes into slots of each layout, in proportion to its records and never more than those."""
    least = _least_nbytes(table, at_least)
    if least > budget:
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"The experts of one step need {rounded_up(least)} of RAM, more than the {rounded_down(budget)} that are "
            "left for them: raise the RAM budget or choose a smaller model.",
        )
    # Proportional above the floor.  Rounding remainders carry over to later layouts, so the smallest come last.
    spare, wanted = budget - least, table.nbytes - least
    shares: dict[RecordLayout, int] = {}
    for layout, (experts, most) in sorted(table.experts.items(), key=lambda each: -each[0].nbytes):
        floor = min(at_least, most)
        more = (experts - floor) * layout.nbytes
        extra = min(spare * more // max(wanted, 1), more) // layout.nbytes
        shares[layout] = floor + extra
        spare -= extra * layout.nbytes
        wanted -= more
    return shares


def _least_nbytes(table: RecordTable, at_least: int) -> int:
    return sum(min(at_least, most) * layout.nbytes for layout, (_, most) in table.experts.items())


class HeldInSlots(Held):
    def __init__(self, tier: RamTier, layer: int) -> None:
        # Looked up for every step: a reference kept elsewhere would keep the memory alive after the tier is closed.
        super().__init__(tier.slots(layer).records, {})
        self.rows: dict[int, Slot] = {}
        self.arriving: dict[int, Future[None]] = {}
        self.left: list[int] = []
        self.layer, self._tier = layer, tier
        self._released, self._copies = set[int](), dict[int, list[Event]]()

    def until(self, expert: int, copied: Event) -> None:
        self._copies.setdefault(expert, []).append(copied)

    def release(self, experts: Iterable[int] | None = None) -> None:
        wanted = self.rows if experts is None else self.rows.keys() & set(experts)
        released = [expert for expert in wanted if expert not in self._released]
        self._released.update(released)
        if released:
            self._tier.release(self.layer, released, self._copies)


class RamTier:
    """A budget of RAM for experts on disk.  Safe to use from several threads.

    A slot is not reused while a copy to a device still reads it: copies end long after the step that started them.

    Args:
        disk: source of the records; closed with this tier.
        budget: bytes for records.
        at_least: experts of one layer that must fit at once (the number a token is routed to).
        policy: one of `engine.experts.cache.policies`, or `auto` for the one with the best hit rate.
        pressure: adapts the budget to the memory that other programs need; `None` keeps it fixed.

    Attributes:
        lent: slots that copies to devices hold after their step: layer, expert and the copies.
    """

    def __init__(
        self,
        disk: DiskTier,
        budget: int,
        *,
        at_least: int = 1,
        policy: str = ADAPTIVE,
        pressure: RamPressure | None = None,
    ) -> None:
        self.disk, self._at_least, self._pressure = disk, at_least, pressure
        self._stride = max((layer.num_experts for layer in disk.table.layers), default=1)
        self._lowered = ""
        self._counters = TierCounters()
        self._groups, had = self._allocate(budget, policy)
        self._refused = ""
        if had != budget:
            self._refused = f"Only {about(had)} of RAM was available for experts: more are read from disk."
        self._of_layer = [self._groups[layer.layout] for layer in disk.table.layers]
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrivals: dict[Key, Future[None]] = {}
        self.lent: list[tuple[int, int, list[Event]]] = []
        self._prompt_layer, self._done_with = -1, list[tuple[int, int]]()
        self._closed = False

    def __enter__(self) -> RamTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, budget: int, policy: str) -> tuple[dict[RecordLayout, _Slots], int]:
        """The slots of every layout, halving the budget while the system refuses it, and the budget used."""
        table = self.disk.table
        most = {layout: experts for layout, (experts, _) in table.experts.items()} if CAN_DISCARD else {}
        while True:
            shares = share_slots(table, budget, self._at_least)
            try:
                return {
                    layout: _Slots(table, layout, count, most.get(layout, count), self._counters, policy)
                    for layout, count in shares.items()
                }, budget
            except (MemoryError, RuntimeError) as error:
                _log.warning("%d bytes of RAM for experts were refused (%s); trying with less", budget, error)
                if most:
                    most = {}  # first give up room to grow: some systems count address space as memory
                else:
                    budget = min(budget, table.nbytes) // 2

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups.values())

    @property
    def note(self) -> str:
        return " ".join(filter(None, (self.disk.note, self._lowered or self._refused)))

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            return replace(self._counters)

    @property
    def backlog_bytes(self) -> int:
        return sum(group.tier.backlog_bytes for group in self._groups.values())

    def capacity(self, layer: int) -> int:
        self._check_open()
        return self._of_layer[layer].pool.capacity

    def slots(self, layer: int) -> LayerRecords:
        """The slots for this layer's experts, as a layer that kernels index by slot.

        Includes all slots that there can ever be; `capacity` of them are in use.
        """
        return self._of_layer[layer].slots

    def source(self, layer: int, kernel: ExpertKernel) -> RecordSource:
        return _InTier(self, layer, kernel)

    def resident(self, layer: int) -> dict[int, Slot]:
        """The layer's experts in RAM now; they may be evicted at any time unless acquired."""
        with self._lock:
            return self._of_layer[layer].tier.residents(layer)

    @property
    def filled_nbytes(self) -> int:
        with self._lock:
            return sum(group.tier.filled * group.slots.layout.nbytes for group in self._groups.values())

    def snapshots(self) -> list[CacheSnapshot]:
        with self._lock:
            return [group.tier.snapshot() for group in self._groups.values()]

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither resident nor arriving, in the same order.  Not counted as a use."""
        with self._lock:
            self._check_open()
            return self._of_layer[layer].tier.absent(layer, experts)

    def acquire(self, layer: int, experts: Sequence[int], *, waits: bool = True) -> HeldInSlots:
        """Pins each of these (distinct) experts in a slot until it is released.

        Reads of missing ones start at once.  If all slots are in use, some or all experts are `left`.  Blocks only if
        no expert can get a slot before a read in flight ends, and not at all for callers with other experts to compute
        meanwhile, which have asked for all before (`waits`).
        """
        self.settle()
        if waits and self._pressure is not None and self._pressure.is_due:
            self.trim()
        with self._changed:
            self._check_open()
            group, first = self._of_layer[layer], layer * self._stride
            if waits and group.tier.sampler is not None:
                group.tier.observe(layer, [first + expert for expert in experts])
            held, reads = self._grant(layer, experts)
            while waits and not held.rows and held.left and group.pool.arriving:
                self._changed.wait()
                self._check_open()
                held, reads = self._grant(layer, experts)
        if reads:
            self._follow(reads)
        return held

    def hold(self, layer: int, experts: Iterable[int]) -> HeldInSlots:
        """Pins those of these experts that are in RAM now.  Not counted as a use, so eviction order does not change."""
        with self._lock:
            self._check_open()
            held = HeldInSlots(self, layer)
            held.rows.update(self._of_layer[layer].tier.hold(layer, experts))
            return held

    def release(self, layer: int, experts: Iterable[int], copies: Mapping[int, list[Event]]) -> None:
        """Unpins these experts, whether they have arrived or not, at once or when `copies` of them have ended."""
        with self._changed:
            self.lent += [(layer, expert, copies[expert]) for expert in experts if expert in copies]
            self._unpin(layer, [expert for expert in experts if expert not in copies])

    def settle(self) -> None:
        if not self.lent:
            return
        with self._changed:
            ended = [each for each in self.lent if all(copy.done() for copy in each[2])]
            self.lent = [each for each in self.lent if not any(each is one for one in ended)]
            for layer, expert, _ in ended:
                self._unpin(layer, [expert])

    def wait_for_copies(self) -> bool:
        """Waits until the oldest slots that copies hold are released; False if there are none."""
        with self._lock:
            copies = self.lent[0][2] if self.lent else []
        for copy in copies:
            with contextlib.suppress(EngineError):  # a copy that failed has ended too
                copy.wait()
        self.settle()
        return bool(copies)

    def lendable(self, layer: int) -> int:
        return self.capacity(layer) // _LENT_SHARE - len(self.lent)

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Starts reading experts that may be needed, into free slots and those of `dead` experts.

        Args:
            dead: (layer, expert) pairs that are not expected to be needed and may be evicted.
        """
        reads: list[Read] = []
        with self._lock:
            self._check_open()
            tier, evictable = self._of_layer[layer].tier, iter(dead)
            for expert in experts:
                if not tier.absent(layer, [expert]):
                    continue
                copy = tier.prefetch(layer, expert, self.disk, evictable)
                if copy is None:
                    break
                self._arrivals[copy.key] = Future()
                reads.append(copy.handle)
        failed = sum(read.done() and read.exception() is not None for read in reads)
        self._follow(reads)
        return len(reads) - failed

    def begun(self, layer: int, wanted: int, read: Iterable[int]) -> None:
        """A prompt has asked for all experts of a layer: reads its next layer before that is routed, since most of
        its experts will be needed anyway.

        Otherwise the disk would idle during attention, between the last read of one layer and the first of the next.
        Experts are read in file order, into free slots and slots of experts that were read for this prompt and have
        been computed: none is needed again in it.  Experts that were in RAM before stay there for decoding.
        """
        if layer <= self._prompt_layer:
            self._done_with = []
        self._prompt_layer, following, layers = layer, layer + 1, self.disk.table.layers
        # Urgent reads go first, so wasted ones delay no step, but they do use disk bandwidth.
        if following < len(layers) and 3 * wanted >= 2 * layers[layer].num_experts:
            evictable = iter(self._done_with)
            self.prefetch(following, range(layers[following].num_experts), evictable)
            self._done_with = list(evictable)
        self._done_with += [(layer, expert) for expert in read]

    def resize(self, budget: int) -> int:
        """Changes the budget.  Shrinking evicts by policy and returns the memory to the system at once.

        Experts that are pinned or in flight keep their slots, so the budget may not be reached until a later call.
        It is raised to the minimum that a step needs.
        """
        with self._changed:
            self._check_open()
            table = self.disk.table
            budget = max(budget, _least_nbytes(table, self._at_least))
            for layout, count in share_slots(table, budget, self._at_least).items():
                self._groups[layout].resize(count)
            self._changed.notify_all()
            return self.nbytes

    def trim(self) -> None:
        if self._pressure is None or not CAN_DISCARD:
            return
        before = self.nbytes
        wanted = self._pressure.advise(before, self.filled_nbytes)
        if wanted is None:
            return
        now, budget = self.resize(wanted), self._pressure.budget
        self._lowered = ""
        if now < budget - budget // 32:
            self._lowered = (
                f"Other programs need RAM: {rounded_down(now)} of the {rounded_up(budget)} meant for experts are "
                "used, and more experts are read from disk."
            )
        if now < before:
            _log.warning("%s", self._lowered)

    def close(self) -> None:
        self.disk.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._arrivals:
                self._changed.wait()
            self._groups, self._of_layer = {}, []

    def _unpin(self, layer: int, experts: Iterable[int]) -> None:
        if not self._closed:
            self._of_layer[layer].tier.release(layer, experts)
            self._changed.notify_all()

    def _grant(self, layer: int, experts: Sequence[int]) -> tuple[HeldInSlots, list[Read]]:
        """Pins as many experts as have or get a slot.  Residents are pinned first, so that no miss evicts them."""
        tier, counters, held = self._of_layer[layer].tier, self._counters, HeldInSlots(self, layer)
        first, pool = layer * self._stride, tier.pool_of[layer]
        missing = []
        for expert, slot in zip(experts, tier.look_up(layer, [first + one for one in experts]), strict=True):
            key = first + expert
            if slot is not None:
                counters.hits += 1
            elif (slot := pool.arriving.get(key)) is not None:
                counters.late += 1
                held.arriving[expert] = self._arrivals[key]
                self.disk.hurry(tier.copies[key].handle)
                pool.pin(key)
                if key in tier.predicted:
                    tier.count_needed(key)
            else:
                missing.append(expert)
                continue
            held.rows[expert] = slot
        reads: list[Read] = []
        for expert in missing:
            copy = tier.bring(layer, expert, self.disk, Purpose.FETCH, only_if_admitted=False)
            if copy is None:
                held.left.append(expert)
                continue
            pool.pin(copy.key)
            counters.misses += 1
            held.rows[expert] = copy.slot
            held.arriving[expert] = self._arrivals[copy.key] = Future()
            reads.append(copy.handle)
        return held, reads

    def _follow(self, reads: list[Read]) -> None:
        """Call without the lock: the callback of a finished read runs at once, on this thread."""
        for read in reads:
            read.add_done_callback(self._arrived)

    def _arrived(self, read: Future[None]) -> None:
        assert isinstance(read, Read)
        error = read.exception()
        with self._changed:
            tier = self._of_layer[read.layer].tier
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


class _InTier(RecordSource):
    has_all = False

    def __init__(self, tier: RamTier, layer: int, kernel: ExpertKernel) -> None:
        self._tier, self._layer, self.kernel = tier, layer, kernel
        self.num_experts = tier.disk.table.layers[layer].num_experts

    @property
    def lendable(self) -> int:
        return self._tier.lendable(self._layer)

    def acquire(self, experts: Sequence[int], *, waits: bool = True) -> Held:
        return self._tier.acquire(self._layer, experts, waits=waits)

    def hold_present(self, experts: Sequence[int]) -> Held:
        return self._tier.hold(self._layer, experts)

    def prefetch(self, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        return self._tier.prefetch(self._layer, experts, dead)

    def wait_for_copies(self) -> bool:
        return self._tier.wait_for_copies()
