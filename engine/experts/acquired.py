"""What a RAM tier gives out, and what it counts."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.experts.cache.pool import Slot


@dataclass
class RamCounters:
    """What the tier has done.  hits + late + misses is the number of experts that were given out.

    Attributes:
        hits: the expert was in RAM.
        late: it was on its way already, so somebody waited for the rest of that.
        misses: it had to be read.
        failures: reads that ended in an error.
        evictions: experts that left for others.
        prefetched, prefetches_used, prefetches_wasted: reads ahead of need; those whose expert was then wanted, and
            those whose expert left before it was.
        bytes_read: of records that arrived.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    failures: int = 0
    evictions: int = 0
    prefetched: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    bytes_read: int = 0


@dataclass
class Acquired:
    """Experts of one layer that stay in their slots until they are released.

    Attributes:
        slots: expert -> its slot.
        arriving: the experts among them whose bytes are not there yet -> done when they are.
        left: experts that got no slot because all are in use: release these, then acquire those.
    """

    layer: int
    slots: dict[int, Slot] = field(default_factory=dict)
    arriving: dict[int, Future[None]] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    def wait(self) -> None:
        """Returns when all of them are there.

        Raises:
            EngineError: one could not be read; the others are there or on their way all the same.
        """
        for arrival in self.arriving.values():
            arrival.result()
