"""Copies on their way into slots of a device: an expert is there when its copy's event is done, and not before."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from engine.common.errors import EngineError
from engine.devices.device import Device, Direction, Event
from engine.experts.cache.policies import Key
from engine.experts.cache.pool import Pool
from engine.experts.lookup import VramCounters
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)


class Purpose(Enum):
    """Why an expert is copied: it is computed at once, it has been missed, or somebody predicted it."""

    FETCH = lanes.FETCH
    POST_FETCH = lanes.POST_FETCH
    PREFETCH = lanes.PREFETCH


@dataclass(slots=True)
class _Flight:
    """A copy into a reserved slot."""

    key: Key
    pool: Pool
    event: Event
    purpose: Purpose
    cancelled: bool = False


class Flights:
    """Copies over the link to one device, in order.  Not for several threads.

    Attributes:
        predicted: keys that were prefetched and have not been a hit yet.
        name_of: a key's (layer of the decoder, expert), for a timeline.
    """

    def __init__(
        self, device: Device, record_nbytes: int, counters: VramCounters, name_of: Callable[[Key], tuple[int, int]]
    ) -> None:
        self.foretold: set[Key] = set()
        self.name_of = name_of
        self._device, self._record_nbytes, self._counters = device, record_nbytes, counters
        self._flights: deque[_Flight] = deque()
        self._last_use: Event | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def not_before(self, last_use: Event | None) -> None:
        """No slot is written to before this event: work submitted earlier may read what has left the cache since."""
        self._last_use = last_use

    def begin(self, pool: Pool, key: Key, target: torch.Tensor, source: torch.Tensor, purpose: Purpose) -> Event:
        """Begins the copy of an expert into the slot that was reserved for it.

        Raises:
            EngineError: the device has been closed; the slot is free again.
        """
        stream = self._device.h2d_stream
        try:
            if self._last_use is not None:
                stream.wait(self._last_use)
                self._last_use = None  # what comes after waits behind it all the same
            event = stream.copy(target, source, direction=Direction.H2D)
        except BaseException:
            pool.abandon(key)
            raise
        self._flights.append(_Flight(key, pool, event, purpose))
        if RECORDER.on:
            layer, expert = self.name_of(key)
            RECORDER.event(
                event, lanes.H2D, purpose.value, layer, expert, self._record_nbytes, device=self._device.index
            )
        if purpose is Purpose.PREFETCH:
            self.foretold.add(key)
            self._counters.prefetched += 1
        return event

    def settle(self) -> None:
        """Takes note of copies that have ended."""
        flights = self._flights
        if not flights:
            return
        stream = self._device.h2d_stream
        if stream.failure is not None:
            # A copy has failed, and with it all behind it.  Whoever computes from one hears of it by its event.
            _log.warning("experts could not be copied to %s: %s", self._device.name, stream.failure)
            stream.recover()
        while flights and flights[0].event.done():
            self._end(flights.popleft())

    def cancel(self) -> int:
        """Takes back what has not begun and nobody waits for; how many."""
        taken_back = 0
        for flight in self._flights:
            if flight.purpose is not Purpose.FETCH and not flight.cancelled and flight.event.cancel():
                flight.cancelled = True
                taken_back += 1
        return taken_back

    def wait(self) -> None:
        """Returns when nothing is on its way."""
        for flight in self._flights:
            with contextlib.suppress(EngineError):
                flight.event.wait()
        self.settle()

    def drain(self) -> None:
        """`cancel` and `wait`, on a device that may have failed or been closed."""
        self.cancel()
        while self._flights:
            with contextlib.suppress(EngineError):
                self._flights[0].event.wait()
            self._end(self._flights.popleft())

    def evicted(self, key: Key) -> None:
        """An expert has left."""
        self._counters.evictions += 1
        if key in self.foretold:
            self.foretold.discard(key)
            self._counters.prefetches_wasted += 1

    def _end(self, flight: _Flight) -> None:
        counters = self._counters
        if flight.event.done() and flight.event.failure is None:
            flight.pool.arrived(flight.key)
            if flight.purpose is Purpose.FETCH:
                counters.kept += 1
            elif flight.purpose is Purpose.POST_FETCH:
                counters.post_fetches += 1
                counters.post_fetched_bytes += self._record_nbytes
            else:
                counters.prefetched_bytes += self._record_nbytes
            return
        flight.pool.abandon(flight.key)
        if flight.purpose is Purpose.PREFETCH:
            self.foretold.discard(flight.key)
            counters.prefetches_wasted += 1
        counters.cancelled += flight.cancelled
        counters.failures += not flight.cancelled
