"""Slots for records of one layout: a share of the RAM budget, and the tier that manages it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.bank import BankLayer
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Slot
from engine.experts.cache.tier import ADAPTIVE, Purpose, Tier, TierCounters
from engine.experts.direct_file import bytes_of
from engine.experts.disk_tier import DiskTier, Read
from engine.experts.record import CAN_GIVE_BACK, RecordLayout, RecordMemory, RecordTable

_log = logging.getLogger(__name__)


class SlotGroup:
    """The slots shared by all layers with records of one layout, and the `Copier` from disk to them.

    Args:
        layout: of the records; the layers of `table` with this layout share the slots.
        count: initial slots.
        most: maximum slots.
        counters: to update.

    Attributes:
        slots: the memory, as a layer that kernels index by slot, used or not.
        tier: manages the slots; pool: its only pool.

    Raises:
        MemoryError: the system refuses the allocation.
    """

    def __init__(
        self,
        table: RecordTable,
        layout: RecordLayout,
        count: int,
        most: int,
        counters: TierCounters,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        seed: int = 0,
    ) -> None:
        self._memory = RecordMemory(most, layout.nbytes)
        self.slots = BankLayer("slots", layout, self._memory.records)
        self._unused = list(range(most - 1, count - 1, -1))
        layers, experts = len(table.layers), max(layer.num_experts for layer in table.layers)
        self.tier = Tier(self, layers, experts, layout.nbytes, policy, popularity, seed, counters)
        sharing = [index for index, layer in enumerate(table.layers) if layer.layout == layout]
        self.pool = self.tier.open_pool(sharing, range(count), count)
        self.tier.renew_sampler()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.pool.capacity * self.slots.layout.nbytes

    @property
    def filled_nbytes(self) -> int:
        """Bytes of the slots with a resident or arriving expert; other slots use no memory yet."""
        return self.tier.filled * self.slots.layout.nbytes

    def start(self, layer: int, expert: int, slot: Slot, source: DiskTier, purpose: Purpose) -> Read:
        """See `engine.experts.cache.tier.Copier`; a read that cannot be started is returned as failed."""
        target = self.slots.records[slot]
        try:
            return source.read(layer, expert, target, urgent=purpose is Purpose.FETCH)
        except EngineError as error:
            read = Read(layer, expert, 1, bytes_of(target))
            read.set_exception(error)
            return read

    def resize(self, count: int) -> int:
        """Adds slots, or evicts by policy and returns their memory to the system.

        Returns:
            Number of slots now: more than requested while too many are pinned or in flight.
        """
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
        return self.pool.capacity

    def _move_down(self, removed: list[Slot]) -> list[Slot]:
        """Compacts: moves unpinned experts from the highest slots into these, as only whole huge pages can be freed.

        Returns:
            The slots that are free instead.
        """
        limit = self.pool.capacity
        high = [
            (key, slot) for key, slot in self.pool.residents.items() if slot >= limit and not self.pool.is_used(key)
        ]
        low = [slot for slot in removed if slot < limit]
        removed = [slot for slot in removed if slot >= limit]
        records = self.slots.records
        for key, slot in high[: len(low)]:
            place = low.pop()
            records[place].copy_(records[slot])
            removed.append(self.pool.move(key, place))
        return removed + low


def least_nbytes(table: RecordTable, at_least: int) -> int:
    """Minimum budget for `share_slots`."""
    return sum(min(at_least, most) * layout.nbytes for layout, (_, most) in table.experts.items())


def share_slots(table: RecordTable, budget: int, at_least: int) -> dict[RecordLayout, int]:
    """Divides `budget` bytes into slots of each layout, in proportion to its records and never more than those.

    Args:
        at_least: experts of one layer that must fit at once.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`; the message gives the minimum budget.
    """
    least = least_nbytes(table, at_least)
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


def make_groups(
    table: RecordTable,
    budget: int,
    at_least: int,
    counters: TierCounters,
    policy: str = ADAPTIVE,
    popularity: Mapping[Key, float] | None = None,
    seed: int = 0,
) -> tuple[list[SlotGroup], int]:
    """Allocates the slots of every layer, halving the budget while the system refuses it; returns the budget used.

    Raises:
        EngineError: as `share_slots`.
    """
    most = {layout: experts for layout, (experts, _) in table.experts.items()} if CAN_GIVE_BACK else {}
    while True:
        shares = share_slots(table, budget, at_least)
        try:
            groups = {
                layout: SlotGroup(table, layout, count, most.get(layout, count), counters, policy, popularity, seed)
                for layout, count in shares.items()
            }
        except (MemoryError, RuntimeError) as error:
            _log.warning("%d bytes of RAM for experts were refused (%s); trying with less", budget, error)
            if most:
                most = {}  # first give up room to grow: some systems count address space as memory
            else:
                budget = min(budget, table.nbytes) // 2
            continue
        return [groups[layer.layout] for layer in table.layers], budget
