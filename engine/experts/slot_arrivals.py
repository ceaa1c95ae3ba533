"""Copies of experts into the slots of a device: where one may go, and who leaves for it.

Not for several threads but through the cache's lock, which they all take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from engine.devices.device import Event
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Pool, Slot
from engine.experts.flights import Flights, Purpose
from engine.experts.lookup import Lookup
from engine.experts.record_source import Held, RecordSource
from engine.experts.slot_pools import SlotPools


class SlotArrivals:
    """Begins copies into the slots of one cache.  Safe to use from several threads.

    Args:
        lock: the cache's.
        most_in_flight: copies for later are not begun while so many are under way: later needs would wait for them.
    """

    def __init__(
        self,
        pools: SlotPools,
        flights: Flights,
        experts: int,
        lock: contextlib.AbstractContextManager[object],
        most_in_flight: int,
    ) -> None:
        self.most_in_flight = most_in_flight
        self._pools, self._flights, self._experts, self._lock = pools, flights, experts, lock

    def take_in(self, lookup: Lookup, expert: int, held: Held) -> tuple[Slot, Event] | None:
        """Begins to copy a miss to a slot where it can be computed as soon as the event is done, and then stays.

        Returns:
            None if the policy does not admit it: it is to be computed somewhere else.
        """
        with self._lock:
            pool, key = self._pools.of(lookup.layer), self._key_of(lookup.layer, expert)
            slot = self._reserve(pool, key)
            if slot is None:
                return None
            event = self._flights.begin(pool, key, self._pools.record(slot), held.record(expert), Purpose.FETCH)
            held.until(expert, event)
            pool.pin(key)
            lookup.taken_in.append(expert)
            return slot, event

    def post_fetch(self, layer: int, experts: Sequence[int], held: Held, most: int | None = None) -> int:
        """Begins to copy experts that may be needed again, as far as the policy admits them.

        Args:
            held: has them in RAM.
            most: copies that may be begun.

        Returns:
            How many were.
        """
        begun = 0
        with self._lock:
            self._flights.settle()
            pool = self._pools.of(layer)
            for expert in experts:
                if len(self._flights) >= self.most_in_flight or begun == most:
                    break
                key = self._key_of(layer, expert)
                slot = self._reserve(pool, key)
                if slot is None:
                    continue
                event = self._flights.begin(
                    pool, key, self._pools.record(slot), held.record(expert), Purpose.POST_FETCH
                )
                held.until(expert, event)
                begun += 1
        return begun

    def prefetch(self, layer: int, expert: int, dead: Iterable[tuple[int, int]], source: RecordSource) -> bool:
        """Begins to copy an absent expert that may be wanted, where that costs nobody a place and it is in RAM.

        Args:
            dead: (layer, expert) pairs that are not expected to be wanted, of which one may leave for it.
        """
        with self._lock:
            self._flights.settle()
            pool, key = self._pools.of(layer), self._key_of(layer, expert)
            if key in pool.residents or key in pool.arriving:
                return False
            if len(self._flights) >= self.most_in_flight or source.lendable <= 0:
                return False
            held = source.hold_present([expert])
            try:
                if expert not in held.rows or not (pool.free or self._evict_dead(pool, dead)):
                    return False
                placement = pool.reserve(key, only_if_admitted=False)
                if placement is None:
                    return False
                record = self._pools.record(placement.slot)
                event = self._flights.begin(pool, key, record, held.record(expert), Purpose.PREFETCH)
                held.until(expert, event)
            finally:
                held.release()
        return True

    def _reserve(self, pool: Pool, key: Key) -> Slot | None:
        """A slot for an expert that is absent, if the policy gives it one."""
        if pool.capacity == 0 or key in pool.residents or key in pool.arriving:
            return None
        placement = pool.reserve(key)
        if placement is None:
            return None
        if placement.evicted is not None:
            self._flights.evicted(placement.evicted)
        return placement.slot

    def _evict_dead(self, pool: Pool, dead: Iterable[tuple[int, int]]) -> bool:
        for layer, expert in dead:
            key = self._key_of(layer, expert)
            if self._pools.of(layer) is not pool or key not in pool.residents:
                continue
            with contextlib.suppress(ValueError):  # in use: whoever thought it dead was wrong
                pool.evict(key)
                self._flights.evicted(key)
                return True
        return False

    def _key_of(self, layer: int, expert: int) -> Key:
        return layer * self._experts + expert
