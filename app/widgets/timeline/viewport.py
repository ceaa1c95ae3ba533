"""Which stretch of time is shown, at how many columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from PySide6.QtCore import QLocale

from app.services.history.buckets import Floats

SHORTEST_NS = 20_000
"""Twenty microseconds: a layer's attention on a fast machine."""
LONGEST_NS = 7 * 24 * 3600 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Viewport:
    """The stretch from `start_ns` that is `span_ns` long, over `width` columns."""

    start_ns: float
    span_ns: float
    width: int

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.span_ns

    @property
    def column_ns(self) -> float:
        """Time that one column stands for."""
        return self.span_ns / max(self.width, 1)

    def x(self, at_ns: float) -> float:
        """Column of a moment; outside 0 to `width` if it is not shown."""
        return (at_ns - self.start_ns) / self.column_ns

    def at(self, x: float) -> float:
        """Moment of a column."""
        return self.start_ns + x * self.column_ns

    def edges(self) -> Floats:
        """Edges of columns that lie on a grid of their own, which does not move with the view: nothing shimmers.

        [n + 1], from the column before the first to the one after the last.
        """
        first = np.floor(self.start_ns / self.column_ns)
        return np.asarray((first + np.arange(self.width + 2, dtype=np.float64)) * self.column_ns)

    def zoomed(self, factor: float, anchor_ns: float) -> Viewport:
        """`factor` times as long, with `anchor_ns` at the same column."""
        span = min(max(self.span_ns * factor, SHORTEST_NS), LONGEST_NS)
        return replace(self, start_ns=anchor_ns - (anchor_ns - self.start_ns) * span / self.span_ns, span_ns=span)

    def panned(self, part: float) -> Viewport:
        """Moved by `part` of its length."""
        return replace(self, start_ns=self.start_ns + part * self.span_ns)

    def ending_at(self, end_ns: float) -> Viewport:
        """The same length, up to `end_ns`."""
        return replace(self, start_ns=end_ns - self.span_ns)

    def within(self, start_ns: float, end_ns: float) -> Viewport:
        """Moved so that something of [start, end] is always in sight."""
        margin = 0.9 * self.span_ns
        return replace(self, start_ns=min(max(self.start_ns, start_ns - margin), end_ns - self.span_ns + margin))


def duration(nanoseconds: float) -> str:
    """`-1:30`, `2.5 s`, `340 ms`, `12 µs`: short, for axes and readouts."""
    sign, value = ("−" if nanoseconds < 0 else ""), abs(nanoseconds)
    if value >= 3600e9:
        return f"{sign}{value // 3600e9:.0f} h {value % 3600e9 // 60e9:02.0f} min"
    if value >= 120e9:
        return f"{sign}{value // 60e9:.0f}:{value % 60e9 // 1e9:02.0f} min"
    if value >= 1e9:
        return f"{sign}{_three(value / 1e9)} s"
    if value >= 1e6:
        return f"{sign}{_three(value / 1e6)} ms"
    if value >= 1e3:
        return f"{sign}{_three(value / 1e3)} µs"
    return f"{sign}{value:.0f} ns" if value else "0"


def _three(value: float) -> str:
    """At most three digits: `2.5`, `340`."""
    return QLocale().toString(value, "g", 3)
