"""Takes the measurements of a set, one by one, and notes anything unusual."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.devices.host_memory import available_ram
from engine.hardware.gpus import graphics_cards
from engine.hardware.measured import Arithmetic, CopyTime, DiskRead, ExpertTime, Measurements, RamRead, described
from engine.hardware.probe import Probe
from engine.measure.run import DRIFT, Measurement, NotMeasuredError, Progress, Row, Run, drift_of
from engine.measure.sets import MeasurementSet
from engine.measure.throttling import Throttling, WholeMachine

_MOST_COLD = 2 * 2**30
_RAM_SHARE = 4
_OTHERS_BYTES = 256 * 2**20
"""Bytes of video memory: smaller changes come and go with every window."""


def measure_machine(
    what: MeasurementSet,
    probe: Probe,
    device: Device | None,
    folder: Path,
    *,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    cancelled: Callable[[], bool] = lambda: False,
    throttling: Throttling | None = None,
    others_bytes: Callable[[], int | None] | None = None,
) -> Measurements:
    """Takes the measurements; those that fail are skipped with a reason.

    Nothing is saved: `save_measurements` does that, for finished measurements.

    Args:
        device: in addition to the CPU; None or the CPU itself: only the CPU.
        folder: where models are stored.
        throttling: detects a CPU that slows down meanwhile.
        others_bytes: video memory that other programs use.

    Raises:
        MeasurementCancelledError: soon after `cancelled()`.
    """
    beside = None if device is None or device.name == "cpu" else device
    threads = max(1, min(probe.physical_cores or probe.usable_cpus, probe.usable_cpus))
    state = _State(what, on_progress)
    run = Run(beside, folder, threads, cold_bytes(probe, what.cold_bytes), cancelled, state.found)
    throttling = throttling or WholeMachine(threads)
    others_bytes = others_bytes or _used_by_others
    others_before = others_bytes()
    skipped, notes = _measured_steadily(what, run, state, throttling)
    notes += _others_changed(others_before, others_bytes())
    if run.unsteady:
        names = ", ".join(sorted(run.unsteady)[:3])
        notes.append(f"Some numbers never settled ({names}): close other programs and measure again.")
    on_progress(Progress("", 1.0))
    return Measurements(
        kind=what.kind,
        device="" if beside is None else beside.name.partition("#")[0],
        device_bytes=0 if beside is None else beside.memory.total,
        machine=described(probe),
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ram=tuple(row for row in run.rows if isinstance(row, RamRead)),
        experts=tuple(row for row in run.rows if isinstance(row, ExpertTime)),
        copies=tuple(row for row in run.rows if isinstance(row, CopyTime)),
        disk=tuple(row for row in run.rows if isinstance(row, DiskRead)),
        arithmetic=tuple(row for row in run.rows if isinstance(row, Arithmetic)),
        pinned_limit_bytes=run.pinned_limit_bytes,
        skipped=skipped,
        unsteady=dict(run.unsteady),
        notes=tuple(notes),
    )


def _measured_steadily(
    what: MeasurementSet, run: Run, state: _State, throttling: Throttling
) -> tuple[dict[str, str], list[str]]:
    """(reasons of skipped measurements, notes); CPU measurements are repeated if the CPU slowed down."""
    notes: list[str] = []
    before = throttling.speed()
    skipped = _measured(what.measurements, run, state)
    after = throttling.speed()
    if abs(changed := drift_of([before, after])) > DRIFT:
        # Numbers taken before the slowdown do not represent sustained speed.
        notes.append(_slower(changed, "was measured again"))
        again = tuple(each for each in what.measurements if each.name not in skipped and _is_processors(each))
        run.rows = [row for row in run.rows if not _of_cpu(row)]
        skipped |= _measured(again, run, state)
        if abs(changed := drift_of([after, throttling.speed()])) > DRIFT:
            notes.append(_slower(changed, "its numbers are uncertain"))
            run.unsteady["processor, from first to last"] = changed
    return skipped, notes


def _others_changed(before: int | None, after: int | None) -> list[str]:
    if before is None or after is None or abs(after - before) <= _OTHERS_BYTES:
        return []
    used = f"{before / 2**30:.1f} GiB of video memory before and {after / 2**30:.1f} GiB after"
    return [f"Other programs used {used} the measurements: close them, or plan with less video memory."]


def cold_bytes(probe: Probe, least: int) -> int:
    """Bytes that exceed every cache of this CPU, limited by free RAM."""
    caches = (probe.processor.l3_bytes or 0) if probe.processor else 0
    wanted = min(max(least, 2 * caches), _MOST_COLD)
    return min(wanted, available_ram() // _RAM_SHARE)


class _State:
    """Progress of a run of measurements."""

    def __init__(self, what: MeasurementSet, on_progress: Callable[[Progress], None]) -> None:
        self._total_s = sum(each.estimated_s for each in what.measurements)
        self._done_s = 0.0
        self._name = ""
        self._on_progress = on_progress

    def begin(self, measurement: Measurement) -> None:
        self._name = measurement.name
        self._on_progress(Progress(self._name, self._done))

    def end(self, measurement: Measurement) -> None:
        self._done_s += measurement.estimated_s

    def found(self, row: Row) -> None:
        self._on_progress(Progress(self._name, self._done, row))

    @property
    def _done(self) -> float:
        return min(self._done_s / self._total_s, 0.99) if self._total_s else 0.0


def _measured(measurements: tuple[Measurement, ...], run: Run, state: _State) -> dict[str, str]:
    """Takes the measurements; returns the reasons of skipped ones by name."""
    skipped: dict[str, str] = {}
    for measurement in measurements:
        run.allow(measurement.estimated_s)
        run.check()
        state.begin(measurement)
        try:
            measurement(run)
        except NotMeasuredError as reason:
            skipped[measurement.name] = str(reason)
        except EngineError as error:
            skipped[measurement.name] = error.message
            if run.device is not None:
                with contextlib.suppress(EngineError):
                    run.device.recover()
        except OSError as error:
            skipped[measurement.name] = error.strerror or type(error).__name__
        except (MemoryError, RuntimeError) as error:  # torch raises either when memory runs out
            skipped[measurement.name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        state.end(measurement)
    run.allow(math.inf)
    return skipped


def _slower(changed: float, consequence: str) -> str:
    """A note for a relative change of time: -0.5 is twice the speed."""
    speed = 1 / (1 + changed) - 1
    how = f"{-speed:.0%} slower" if changed > 0 else f"{speed:.0%} faster"
    return f"The CPU became {how} during the measurement (heat, battery or other programs), and {consequence}."


def _is_processors(measurement: Measurement) -> bool:
    return measurement.name == "RAM" or "processor" in measurement.name


def _of_cpu(row: Row) -> bool:
    return isinstance(row, RamRead) or (isinstance(row, ExpertTime | Arithmetic) and row.device == "cpu")


def _used_by_others() -> int | None:
    known = [gpu.used_by_others_bytes for gpu in graphics_cards()[0] if gpu.used_by_others_bytes is not None]
    return sum(known) if known else None
