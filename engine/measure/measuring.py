"""Takes the measurements of a set, one by one, and notes anything unusual.

A set takes about ten seconds or about two minutes. Throttling is detected by the same small task before and after: a
hot laptop takes longer for it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.devices.host_memory import available_ram
from engine.formats import LADDER
from engine.hardware.gpus import graphics_cards
from engine.hardware.measured import Arithmetic, CallTime, ExpertTime, Measurements, RamRead, described
from engine.hardware.probe import Probe
from engine.measure.arithmetic import (
    CardExpertTimes,
    CpuArithmetic,
    CpuExperts,
    DeviceArithmetic,
    ExpertShape,
    NativeCalls,
    RamBandwidth,
    SharedLayer,
    seconds_here,
    torch_threads,
)
from engine.measure.link import Copies, DiskReads, PinnedLimit
from engine.measure.run import (
    DRIFT,
    Measurement,
    NotMeasuredError,
    OnProgress,
    Row,
    Run,
    drift_of,
    thread_counts,
)

_WIDTH = 1024
_REPEATS = 9


def machine_seconds(threads: int) -> float:
    """Seconds that a matrix product on all cores takes now: more when the machine slows down."""
    left = torch.full((_WIDTH, _WIDTH), 0.01)
    with torch_threads(threads):
        seconds = [seconds_here(partial(torch.mm, left, left)) for _ in range(_REPEATS + 1)]
    return min(seconds[1:])  # slower runs were disturbed by something else


_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
SMALL = ExpertShape(512, 256)
"""Of small models: so short a piece is read more slowly than a long one."""
_FINE = ExpertShape(2048, 768)
"""Qwen3-30B-A3B: many small experts."""
_SQUARE = ExpertShape(2880, 2880)
"""gpt-oss."""
_COARSE = ExpertShape(4096, 14336)
"""Mixtral 8x7B: few large experts."""
_WIDE = ExpertShape(7168, 2048)
"""DeepSeek-V3."""
AGAIN = "RAM, again"
"""At the end of all: how much its bandwidth has changed meanwhile says how far to trust it."""
THOROUGH_SHAPES = (SMALL, _FINE, _SQUARE, _WIDE)
"""Formats of experts in a thorough measurement, in addition to the coarse ones."""


@dataclass(frozen=True)
class MeasurementSet:
    """Measurements in order of execution.

    Attributes:
        kind: stored with the results.
        cold_bytes: least bytes read in a pass; see `measuring.cold_bytes`.
    """

    kind: str
    cold_bytes: int
    measurements: tuple[Measurement, ...]


def one_and_all(most: int) -> tuple[int, ...]:
    """One thread, and all."""
    return tuple(sorted({1, most}))


_ROWS = DiskReads(2 * _MIB, (16,), (4 * _KIB,), 3, 0.3, "rows on disk")
"""As the engine reads those of tables; few, for a hard disk."""

QUICK = MeasurementSet(
    "quick",
    256 * _MIB,
    (
        RamBandwidth(one_and_all, 3, 0.6),
        CpuArithmetic(3, 0.5),
        NativeCalls(one_and_all, 9, 0.1),
        CpuExperts((_FINE,), LADDER, (1, 16, 128), one_and_all, 3, 3.5),
        CpuExperts((SMALL,), LADDER, (1,), one_and_all, 21, 0.5, "small experts on the processor"),
        DeviceArithmetic(3, 0.6),
        CardExpertTimes((_FINE,), LADDER, (1, 128), 3, 1.0),
        SharedLayer(9, 0.5),
        Copies((64 * _KIB, 4 * _MIB, 32 * _MIB), 3, 1.5),
        RamBandwidth(one_and_all, 3, 0.6, AGAIN),
        DiskReads(256 * _MIB, (1, 4, 8), (2 * _MIB,), 3, 2.0),
        _ROWS,
    ),
)
"""Enough to plan with: about ten seconds."""

THOROUGH = MeasurementSet(
    "thorough",
    512 * _MIB,
    (
        RamBandwidth(thread_counts, 7, 4.0),
        CpuArithmetic(7, 2.0),
        NativeCalls(thread_counts, 21, 0.3),
        CpuExperts(THOROUGH_SHAPES, LADDER, (1, 2, 4, 8, 16, 64, 256), thread_counts, 5, 55.0),
        CpuExperts((_COARSE,), LADDER[1:], (1, 16), one_and_all, 3, 10.0, "large experts on the processor"),
        DeviceArithmetic(7, 2.0),
        CardExpertTimes(THOROUGH_SHAPES, LADDER, (1, 2, 4, 8, 16, 64, 256), 5, 20.0),
        SharedLayer(21, 1.0),
        Copies((4 * _KIB, 64 * _KIB, _MIB, 4 * _MIB, 32 * _MIB, 256 * _MIB), 5, 6.0),
        RamBandwidth(thread_counts, 7, 4.0, AGAIN),
        PinnedLimit(256 * _GIB, 10.0),
        DiskReads(_GIB, (1, 2, 4, 8, 16, 32), (256 * _KIB, 2 * _MIB), 3, 20.0),
        _ROWS,
    ),
)
"""By threads, shapes, sizes and depths: about two minutes."""
SETS = {each.kind: each for each in (QUICK, THOROUGH)}


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
    on_progress: OnProgress = lambda _name, _done, _found: None,
    cancelled: Callable[[], bool] = lambda: False,
    throttling: Callable[[], float] | None = None,
    others_bytes: Callable[[], int | None] | None = None,
) -> Measurements:
    """Takes the measurements; those that fail are skipped with a reason.

    Nothing is saved: `save_measurements` does that, for finished measurements.

    Args:
        device: in addition to the CPU; None or the CPU itself: only the CPU.
        folder: where models are stored.
        throttling: seconds of a task that takes longer when the machine slows down.
        others_bytes: video memory that other programs use.

    Raises:
        RequestCancelled: soon after `cancelled()`.
    """
    beside = None if device is None or device.name == "cpu" else device
    threads = max(1, min(probe.physical_cores or probe.usable_cpus, probe.usable_cpus))
    run = Run(beside, folder, threads, cold_bytes(probe, what.cold_bytes), cancelled, on_progress)
    run.total_s = sum(each.estimated_s for each in what.measurements)
    throttling = throttling or partial(machine_seconds, threads)
    others_bytes = others_bytes or _used_by_others
    others_before = others_bytes()
    skipped, notes = _measured_steadily(what, run, throttling)
    notes += _others_changed(others_before, others_bytes())
    if run.unsteady:
        names = ", ".join(sorted(run.unsteady)[:3])
        notes.append(f"Some numbers never settled ({names}): close other programs and measure again.")
    on_progress("", 1.0, None)
    return Measurements(
        kind=what.kind,
        device="" if beside is None else beside.name.partition("#")[0],
        device_bytes=0 if beside is None else beside.memory.total,
        machine=described(probe),
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        **run.rows_by_kind(),
        pinned_limit_bytes=run.pinned_limit_bytes,
        skipped=skipped,
        unsteady=dict(run.unsteady),
        notes=tuple(notes),
    )


def _measured_steadily(
    what: MeasurementSet, run: Run, throttling: Callable[[], float]
) -> tuple[dict[str, str], list[str]]:
    """(reasons of skipped measurements, notes); CPU measurements are repeated if the CPU slowed down."""
    notes: list[str] = []
    before = throttling()
    skipped = _measured(what.measurements, run)
    after = throttling()
    if abs(changed := drift_of([before, after])) > DRIFT:
        # Numbers taken before the slowdown do not represent sustained speed.
        notes.append(_slower(changed, "was measured again"))
        again = tuple(each for each in what.measurements if each.name not in skipped and _is_processors(each))
        run.rows = [row for row in run.rows if not _of_cpu(row)]
        skipped |= _measured(again, run)
        if abs(changed := drift_of([after, throttling()])) > DRIFT:
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


def _measured(measurements: tuple[Measurement, ...], run: Run) -> dict[str, str]:
    """Takes the measurements; returns the reasons of skipped ones by name."""
    skipped: dict[str, str] = {}
    for measurement in measurements:
        run.allow(measurement.estimated_s)
        run.check()
        run.begin(measurement.name)
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
        run.done_s += measurement.estimated_s
    run.allow(math.inf)
    return skipped


def _slower(changed: float, consequence: str) -> str:
    """A note for a relative change of time: -0.5 is twice the speed."""
    speed = 1 / (1 + changed) - 1
    how = f"{-speed:.0%} slower" if changed > 0 else f"{speed:.0%} faster"
    return f"The CPU became {how} during the measurement (heat, battery or other programs), and {consequence}."


def _is_processors(measurement: Measurement) -> bool:
    return measurement.name in ("RAM", AGAIN) or "processor" in measurement.name


def _of_cpu(row: Row) -> bool:
    return isinstance(row, RamRead) or (isinstance(row, ExpertTime | Arithmetic | CallTime) and row.device == "cpu")


def _used_by_others() -> int | None:
    known = [gpu.used_by_others_bytes for gpu in graphics_cards()[0] if gpu.used_by_others_bytes is not None]
    return sum(known) if known else None
