"""Where experts are brought ahead of need, and what that takes and saves, over a link and from a disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.experts.disk_tier import DiskTier
from engine.experts.latency import LatencyModel
from engine.experts.vram_cache import VramCounters

_MEASURED_RECORDS = 64
"""Records that must have been read before what a disk has done says what it can do."""
_ASSUMED_BYTES_PER_S = 1e9


class PrefetchTarget(Protocol):
    """A cache of experts that takes some before they are asked for: slots in RAM over disk, or in VRAM over RAM."""

    @property
    def backlog_bytes(self) -> int:
        """What is on its way already."""
        ...

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of `experts` that are neither there nor on their way, in the same order.  Counts as no use."""
        ...

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Begins to bring experts, in this order, as far as there are free slots or dead ones.

        Args:
            dead: (layer, expert) that may leave for them, read only as far as it is needed.

        Returns:
            How many have been begun: the first ones of those that were absent.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefetchTimes:
    """What it takes to bring an expert, and what it saves if it is there.

    Attributes:
        record_nbytes: bytes of an expert.
        arrival_s: seconds that one expert takes from the moment when those before it have arrived.
        miss_s: what a step loses for one more expert that is not there.
        hit_s: what it takes if it is there.
        late_saves: whether an expert that is still on its way is waited for, so that having begun early has helped;
            if not, it is computed elsewhere as if nothing had been begun.
        urgent_share: of the experts that are not there, how many are brought at once because of that: those a
            prefetch can get in the way of.
    """

    record_nbytes: int
    arrival_s: float
    miss_s: float
    hit_s: float
    late_saves: bool
    urgent_share: float

    def saved_s(self, ahead_of: int, time_left_s: float, backlog_bytes: int = 0) -> float:
        """What a prefetch saves if its expert is wanted.

        Args:
            ahead_of: prefetches that go before it.
            time_left_s: until the layer comes.
        """
        arrives_s = (ahead_of + 1 + backlog_bytes / self.record_nbytes) * self.arrival_s
        late_s = max(0.0, arrives_s - time_left_s)
        if not self.late_saves:
            return self.miss_s - self.hit_s if late_s == 0 else 0.0
        return max(0.0, self.miss_s - self.hit_s - late_s)

    def room(self, time_left_s: float, backlog_bytes: int = 0) -> int:
        """How many prefetches, one after the other, save anything: `saved_s` is not 0 for them."""
        if self.miss_s <= self.hit_s:
            return 0
        if self.arrival_s <= 0:
            return 2**31
        bearable_s = time_left_s + (self.miss_s - self.hit_s if self.late_saves else 0.0)
        count = bearable_s / self.arrival_s - backlog_bytes / self.record_nbytes
        return max(0, math.ceil(count) - 1 if self.late_saves else math.floor(count + 1e-9))


def over_link(latency: LatencyModel, counters: Sequence[VramCounters]) -> PrefetchTimes:
    """For slots on a device over records in RAM.

    An expert that is not there is computed on the CPU or fetched, and both are done at once: with a share f of them
    fetched, one more of them takes max((1 - f) cpu_lat, f (trans_lat + gpu_lat)).

    Args:
        counters: of the devices' caches, which say how misses have been served so far.
    """
    hit_s = latency.gpu_s(1)
    fetched_s = latency.transfer_s + hit_s
    fetched_so_far = sum(each.fetched for each in counters)
    served = fetched_so_far + sum(each.on_cpu for each in counters)
    fetched = fetched_so_far / served if served else float(not latency.prefers_cpu(1))
    return PrefetchTimes(
        record_nbytes=latency.record_nbytes,
        arrival_s=latency.transfer_s,
        miss_s=max((1 - fetched) * latency.cpu_s(1), fetched * fetched_s),
        hit_s=hit_s,
        late_saves=False,
        urgent_share=fetched,
    )


def over_disk(disk: DiskTier, record_nbytes: int) -> PrefetchTimes:
    """For slots in RAM over a bank on disk, of which a step waits for every expert that is not there."""
    read_bytes, busy_s = disk.bytes_read, disk.busy_s
    is_measured = busy_s > 0 and read_bytes >= _MEASURED_RECORDS * record_nbytes
    rate = read_bytes / busy_s if is_measured else _ASSUMED_BYTES_PER_S
    arrival_s = record_nbytes / rate
    return PrefetchTimes(
        record_nbytes=record_nbytes,
        arrival_s=arrival_s,
        miss_s=arrival_s,
        hit_s=0.0,
        late_saves=True,
        urgent_share=1.0,
    )
