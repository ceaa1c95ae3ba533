"""Slots that experts pass through: each is computed once it has arrived, and then others take its place.

A group of experts is computed by one launch while the next group arrives (DuoServe, section IV), and once a layer's
last group is on its way, the first experts of the layer after it follow, while attention computes.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.common.errors import EngineError
from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.tier import TierCounters
from engine.experts.record_source import Held
from engine.experts.slot_segments import Segment
from engine.formats.layouts import RecordLayout
from engine.telemetry import lanes


@dataclass(frozen=True, slots=True)
class Staged:
    """An expert in a slot, once `copied` is done."""

    slot: int
    copied: Event


class Staging:
    """A ring of slots.  They are given out in turn, and computed in the order in which they were given out.

    Args:
        layer_numbers: decoder layer of each layer, for the timeline.
        counters: experts that are brought ahead are counted as prefetches, once each: when their copy begins, whatever
            becomes of them.

    Attributes:
        segment: the slots.
        most_together: experts of a group, at most half of the slots.
    """

    def __init__(
        self, device: Device, layout: RecordLayout, count: int, layer_numbers: Sequence[int], counters: TierCounters
    ) -> None:
        self.segment = Segment(device, layout, count, 0, MemoryCategory.STAGING)
        self.most_together = max(1, count // 2)
        self._h2d, self._numbers, self._counters = device.h2d_stream, layer_numbers, counters
        self._nbytes = layout.nbytes
        self._last_use: list[Event | None] = [None] * count
        self._coming: list[Event] = []  # they end in order
        self._waited: Event | None = None
        self._in_use: set[int] = set()
        self._next = 0
        self._ahead: dict[int, Staged] = {}
        self._ahead_of: int | None = None

    @property
    def free(self) -> int:
        """Slots that may be given out: the computation of their experts has been submitted, or nobody claimed them."""
        return len(self._last_use) - len(self._in_use) + len(self._ahead)

    @property
    def arriving(self) -> int:
        # Asking one costs a call of the driver: half of those that may have ended are ruled out each time.
        del self._coming[: bisect_left(self._coming, True, key=lambda copied: not copied.done())]
        return len(self._coming)

    def bring(self, layer: int, expert: int, held: Held) -> Staged:
        """Starts copying an expert to the next free slot, behind the last use of that.  There must be one."""
        slot = self._vacant()
        last_use = self._last_use[slot]
        if last_use is not None and last_use is not self._waited:
            self._h2d.wait(last_use)
            self._waited = last_use  # later copies are behind it, too
        label = lanes.FETCH, self._numbers[layer], expert, 1
        copied = self._h2d.copy(self.segment.records.records[slot], held.record(expert), label, direction=Direction.H2D)
        held.until(expert, copied)
        self._in_use.add(slot)
        self._coming.append(copied)
        if len(self._coming) > 2 * len(self._last_use):
            _ = self.arriving  # nobody else may ask
        return Staged(slot, copied)

    def used(self, slot: int, last_use: Event) -> None:
        self._in_use.discard(slot)
        self._last_use[slot] = last_use

    def bring_ahead(self, layer: int, experts: Iterable[int], held: Held) -> None:
        """Starts copying experts of a layer that has not begun, as far as slots are free."""
        self._drop(list(self._ahead))
        self._ahead_of = layer
        for expert in islice(experts, self.free):
            self._ahead[expert] = self.bring(layer, expert, held)
            self._counters.prefetched += 1
            self._counters.prefetched_bytes += self._nbytes

    def ahead(self, layer: int) -> Mapping[int, Staged]:
        """Experts of a layer that were brought ahead, in the order of their copies."""
        return self._ahead if layer == self._ahead_of else {}

    def claim(self, layer: int, experts: Iterable[int]) -> dict[int, Staged]:
        """Those of `experts` that were brought ahead: the caller computes them, in the order of their copies."""
        wanted = set(experts)
        claimed = {expert: staged for expert, staged in self.ahead(layer).items() if expert in wanted}
        for expert in claimed:
            del self._ahead[expert]
        self._counters.prefetches_used += len(claimed)
        return claimed

    def forget_uses(self) -> None:
        self._drop(list(self._ahead))
        self._last_use = [None] * len(self._last_use)
        self._coming.clear()
        self._waited = None
        self._in_use.clear()

    def close(self) -> None:
        """Waits for what still arrives, needed or not, and frees the memory.  No computation may be in flight."""
        for copied in self._coming:
            with contextlib.suppress(EngineError):  # the device may have failed or been closed
                copied.wait()
        self.segment.release()

    def _vacant(self) -> int:
        if len(self._in_use) == len(self._last_use):
            self._drop(list(self._ahead)[:1])
        count, slot = len(self._last_use), self._next
        while slot in self._in_use:
            slot = (slot + 1) % count
        self._next = (slot + 1) % count
        return slot

    def _drop(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self._in_use.discard(self._ahead.pop(expert).slot)
            self._counters.prefetches_wasted += 1
