"""The context of a measurement: machine, cancellation, progress, and repeats that detect drift."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.common.errors import RequestCancelled
from engine.devices.device import Device
from engine.hardware.measured import ROWS, Arithmetic, CallTime, CopyTime, DiskRead, ExpertTime, RamRead

Row = RamRead | ExpertTime | CopyTime | DiskRead | Arithmetic | CallTime

DRIFT = 0.15
"""Relative difference allowed between the last repeats and the first: beyond it, the speed has changed."""
_ROUNDS = 3
_PATIENCE, _GRACE_S = 2.0, 2.0


OnProgress = Callable[[str, float, Row | None], None]
"""(name of the current measurement, 0 to 1 of the estimated time of all, the latest result if there is one)."""


class Measurement(Protocol):
    """One measurement, with its own parameters."""

    @property
    def name(self) -> str:
        """Display name; also names it when skipped."""

    @property
    def estimated_s(self) -> float:
        """Estimated seconds."""

    def __call__(self, run: Run) -> None:
        """Measures, passing each number to `run.found`.

        Raises:
            RequestCancelled: see `Run.check`.
            NotMeasuredError: it does not apply here.
            EngineError, OSError, MemoryError: it failed.
        """


class NotMeasuredError(Exception):
    """Why something is not measured on this machine."""


@dataclass
class Run:
    """One run of measurements.

    Attributes:
        device: in addition to the CPU; None without one.
        folder: on the disk to be measured; scratch files are removed.
        threads: physical cores that this process may use.
        cold_bytes: a size that exceeds every cache.
        cancelled: polled often.
        on_progress: called with each result, and when a measurement begins.
        total_s, done_s: estimated seconds of all measurements, and of those that have ended.
    """

    device: Device | None
    folder: Path
    threads: int
    cold_bytes: int
    cancelled: Callable[[], bool]
    on_progress: OnProgress
    rows: list[Row] = field(default_factory=list)
    unsteady: dict[str, float] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    pinned_limit_bytes: int | None = None
    clock: Callable[[], float] = time.perf_counter
    total_s: float = 0.0
    done_s: float = 0.0
    _name: str = ""
    _due_s: float = math.inf
    _over_s: float = math.inf

    def allow(self, seconds: float) -> None:
        """Sets the time budget of the next measurement: past it, no more repeats; far past it, it is aborted."""
        self._due_s = self.clock() + seconds
        self._over_s = self.clock() + _PATIENCE * seconds + _GRACE_S

    @property
    def is_late(self) -> bool:
        """Whether the time budget is used up, so that nothing is repeated any more."""
        return self.clock() > self._due_s

    def check(self) -> None:
        """Must be called every few milliseconds.

        Raises:
            RequestCancelled: the run was cancelled.
            NotMeasuredError: it far exceeds its time budget; earlier results are kept.
        """
        if self.cancelled():
            raise RequestCancelled
        if self.clock() > self._over_s:
            raise NotMeasuredError("it took far too long: other programs keep this machine busy")

    def begin(self, name: str) -> None:
        """Reports what is measured from now on."""
        self._name = name
        self._report(None)

    def found(self, row: Row) -> None:
        """Stores a result and reports it."""
        self.rows.append(row)
        self._report(row)

    def _report(self, row: Row | None) -> None:
        self.on_progress(self._name, min(self.done_s / self.total_s, 0.99) if self.total_s else 0.0, row)

    def rows_by_kind(self) -> dict[str, Any]:
        """All results, as `Measurements` has them."""
        return {name: tuple(row for row in self.rows if isinstance(row, kind)) for name, kind in ROWS.items()}

    def needed_device(self) -> Device:
        """The device.  Raises `NotMeasuredError` without one."""
        if self.device is None:
            raise NotMeasuredError("no graphics card is in use")
        return self.device

    def steady(self, name: str, once: Callable[[], float], repeats: int = 5) -> float:
        """The median of `once`, repeated as a whole while its first and last repeats differ by more than `DRIFT`.

        A CPU that has just become too hot is measured at its sustained speed; one that never settles is noted.
        """
        once()  # warm-up: instruction caches, clocks, pages
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
    """Relative difference of the last third (median) over the first."""
    size = max(1, len(values) // 3)
    first, last = statistics.median(values[:size]), statistics.median(values[-size:])
    return last / first - 1 if first > 0 else 0.0


def counted(count: int, what: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def thread_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `most`."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length()) if 1 << power <= most), most}))
