"""Converts times of the engine's clock to the window's."""

from __future__ import annotations

import numpy as np

from engine.telemetry.records import Records

_EARLY_NS = 100_000_000
_LATE_NS = 10_000_000_000
MOST_SPAN_NS = 3_600_000_000_000
"""No span lasts an hour."""


class ClockAlignment:
    """The two processes share a clock on every system we know; where they do not, or a clock jumps, times are shifted.

    A message is taken to have been sent when it arrived, within the latency of a pipe.
    """

    def __init__(self) -> None:
        self.shift_ns = 0
        """Added to the engine's times."""

    def observe(self, clock_ns: int, now_ns: int) -> bool:
        """Compare the engine's `clock_ns` with `now_ns` here; returns whether the engine's clock has jumped."""
        late_ns = now_ns - (clock_ns + self.shift_ns)
        if -_EARLY_NS <= late_ns <= _LATE_NS:
            return False
        self.shift_ns = now_ns - clock_ns
        return True

    def aligned(self, records: Records, now_ns: int) -> Records:
        """Records on the window's clock, without impossible ones that end before they begin or lie in the future."""
        starts, ends = records["start_ns"], records["end_ns"]
        limit_ns = now_ns - self.shift_ns + _EARLY_NS
        sound = (ends >= starts) & (starts >= max(0, limit_ns - 2 * MOST_SPAN_NS)) & (ends <= limit_ns)
        sound &= ends - np.maximum(starts, 0) < MOST_SPAN_NS
        if not sound.all():
            records = records[sound]
        if self.shift_ns:
            records = records.copy()
            records["start_ns"] += self.shift_ns
            records["end_ns"] += self.shift_ns
        return records
