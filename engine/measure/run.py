"""What every measurement is given: the machine, how to stop, whom to tell, and repeats that notice a drift."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.devices.device import Device
from engine.hardware.measured import Arithmetic, CopyTime, DiskRead, ExpertTime, RamRead

Row = RamRead | ExpertTime | CopyTime | DiskRead | Arithmetic

DRIFT = 0.15
"""A part by which the last repeats may differ from the first: beyond, something has slowed down or sped up."""
_ROUNDS = 3
_PATIENCE, _GRACE_S = 2.0, 2.0


class MeasurementCancelledError(Exception):
    """Whoever asked for the measurements no longer wants them; nothing of them is kept."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far measuring has come.

    Attributes:
        name: of what is being measured.
        done: 0 to 1, of all measurements by their estimated time.
        found: what was just found, if something was.
    """

    name: str
    done: float
    found: Row | None = None


class Measurement(Protocol):
    """One thing to measure; its parameters are its own."""

    @property
    def name(self) -> str:
        """For people, and to say that it was skipped."""

    @property
    def estimated_s(self) -> float:
        """About how long it takes."""

    def __call__(self, run: Run) -> None:
        """Measures, telling `run.found` of each number.

        Raises:
            MeasurementCancelledError: see `Run.check`.
            NotMeasuredError: it has no sense here.
            EngineError, OSError, MemoryError: it could not be done.
        """


class NotMeasuredError(Exception):
    """The message says why something is not measured on this machine."""


@dataclass
class Run:
    """One go at measuring.

    Attributes:
        device: beside the CPU; None without one.
        folder: on the disk to be measured; its files are removed again.
        threads: physical cores that this process may use.
        cold_bytes: of memory that no cache holds.
        cancelled: asked often.
        tell: called with what was found.
    """

    device: Device | None
    folder: Path
    threads: int
    cold_bytes: int
    cancelled: Callable[[], bool]
    tell: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    unsteady: dict[str, float] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    pinned_limit_bytes: int | None = None
    clock: Callable[[], float] = time.perf_counter
    _due_s: float = math.inf
    _over_s: float = math.inf

    def allow(self, seconds: float) -> None:
        """What begins now is estimated to take so long: beyond, it is repeated no more; far beyond, it ends."""
        self._due_s = self.clock() + seconds
        self._over_s = self.clock() + _PATIENCE * seconds + _GRACE_S

    @property
    def is_late(self) -> bool:
        """Whether the time that was estimated is over, so that nothing more is to be repeated."""
        return self.clock() > self._due_s

    def check(self) -> None:
        """Called between any two steps of some milliseconds.

        Raises:
            MeasurementCancelledError: nobody wants the result any more.
            NotMeasuredError: it takes far longer than was estimated; what was found is kept.
        """
        if self.cancelled():
            raise MeasurementCancelledError
        if self.clock() > self._over_s:
            raise NotMeasuredError("it took far too long: other programs keep this machine busy")

    def found(self, row: Row) -> None:
        """Keeps a number and tells of it."""
        self.rows.append(row)
        self.tell(row)

    def needed_device(self) -> Device:
        """The device.  Raises `NotMeasuredError` without one."""
        if self.device is None:
            raise NotMeasuredError("there is no graphics card in use")
        return self.device

    def steady(self, name: str, once: Callable[[], float], repeats: int = 5) -> float:
        """The median of `once`, repeated as a whole while its first and last repeats differ by more than `DRIFT`.

        A processor that has just become too hot is measured as it goes on; one that never settles is noted.
        """
        once()  # warms up: caches of code, clocks, pages
        drift = 0.0
        values: list[float] = []
        for _ in range(_ROUNDS):
            values = []
            for _ in range(max(2, repeats)):
                self.check()
                values.append(once())
                if self.is_late:
                    return statistics.median(values)
            drift = drift_of(values)
            if abs(drift) <= DRIFT:
                self.unsteady.pop(name, None)
                return statistics.median(values)
            self.repeated.add(name)
        self.unsteady[name] = drift
        return statistics.median(values)


def drift_of(values: list[float]) -> float:
    """By what part the last third (median) is above the first."""
    size = max(1, len(values) // 3)
    first, last = statistics.median(values[:size]), statistics.median(values[-size:])
    return last / first - 1 if first > 0 else 0.0


def counted(count: int, what: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most`."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most}))
