"""Resources that do one thing at a time, and the spans of their work.

Work is issued in program order, as into a device's streams: a span begins once its resource has finished all earlier
work and everything it waits for has ended.  Timelines are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.lanes import WORK

LANES = WORK
"""Lanes of a timeline.  `small_copy` copies small results to the card alongside `h2d`'s weights, on a second stream."""

_RESOURCE = {"cpu_experts": "cpu", "cpu_attention": "cpu"}


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one resource; times in seconds from the start.

    Attributes:
        lane: one of `LANES`.
        ready: when everything it waits for had ended; never after `start`.
        name: kind of work.
        layer, expert, step: indices; -1 where not applicable.
        count: experts computed or read together; rows of a phase.
        nbytes: size of a copy or a read.
        card: whose lane it is, where several have one each.
    """

    lane: str
    start: float
    end: float
    name: str
    layer: int
    expert: int
    step: int
    ready: float
    count: int = 1
    nbytes: int = 0
    card: int = 0


class Timeline:
    """The work issued so far."""

    def __init__(self, *, record: bool = True) -> None:
        self.spans: list[Span] = []
        self.end = 0.0
        self._record = record
        self._free: dict[tuple[str, int], float] = {}
        self._busy: dict[tuple[str, int], float] = {}

    def run(
        self,
        lane: str,
        seconds: float,
        name: str,
        after: float = 0.0,
        *,
        layer: int = -1,
        expert: int = -1,
        step: int = -1,
        count: int = 1,
        nbytes: float = 0.0,
        card: int = 0,
    ) -> float:
        """Issues work that waits for `after`; returns when it ends.

        Args:
            card: whose lane it is, where several have one each.
        """
        if seconds <= 0:
            return after
        resource = _RESOURCE.get(lane, lane), card
        start = max(self._free.get(resource, 0.0), after)
        end = start + seconds
        self._free[resource] = end
        self._busy[lane, card] = self._busy.get((lane, card), 0.0) + seconds
        if end > self.end:
            self.end = end
        if self._record:
            self.spans.append(Span(lane, start, end, name, layer, expert, step, after, count, round(nbytes), card))
        return end

    def mark(self, name: str, start: float, end: float, *, step: int = -1, count: int = 1) -> None:
        """Marks a phase of `count` rows: prefill, or one step of decode."""
        if self._record and end > start:
            self.spans.append(Span("phase", start, end, name, -1, -1, step, start, count))

    def free_at(self, lane: str, card: int = 0) -> float:
        """When the work issued to this lane's resource so far ends."""
        return self._free.get((_RESOURCE.get(lane, lane), card), 0.0)

    def busy_s(self, lane: str) -> float:
        """Seconds of work in a lane so far: of the busiest card."""
        return max((took for (name, _), took in self._busy.items() if name == lane), default=0.0)
