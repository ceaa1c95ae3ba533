"""Brings moments of the engine's clock onto the window's."""

from __future__ import annotations

import numpy as np

from engine.telemetry.records import Records

_EARLY_NS = 100_000_000
_LATE_NS = 10_000_000_000
MOST_SPAN_NS = 3_600_000_000_000
"""Nothing that is recorded takes an hour."""


class ClockAlignment:
    """The two clocks are one on all systems that we know; where they are not, or one jumps, moments are moved.

    A message is taken to have been sent when it came, give or take the time that pipes may need.
    """

    def __init__(self) -> None:
        self.shift_ns = 0
        """What is added to the engine's moments."""

    def heard(self, clock_ns: int, now_ns: int) -> bool:
        """The engine says that it is `clock_ns` while it is `now_ns` here; whether its clock has jumped."""
        late_ns = now_ns - (clock_ns + self.shift_ns)
        if -_EARLY_NS <= late_ns <= _LATE_NS:
            return False
        self.shift_ns = now_ns - clock_ns
        return True

    def aligned(self, records: Records, now_ns: int) -> Records:
        """Records on the window's clock, without those that cannot be: they end before they begin, or in the future."""
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
