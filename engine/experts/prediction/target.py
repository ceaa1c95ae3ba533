"""Where experts are brought ahead of need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
