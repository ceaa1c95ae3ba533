"""Measuring as part of tuning: the device, reuse of earlier measurements, and numbers for display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.common.config import EngineConfig
from engine.common.files import new_folder
from engine.common.paths import models_dir
from engine.hardware.measured import CallTime, CopyTime, DiskRead, ExpertTime, Measurements, RamRead, load_measurements
from engine.hardware.probe import Probe, is_busy
from engine.protocol import TuningNumber
from engine.tuning.result import TUNING_KINDS, TuningKind

if TYPE_CHECKING:
    from engine.measure.measuring import MeasurementSet
    from engine.measure.run import Row

OnMeasured = Callable[[str, float, TuningNumber | None], None]
"""(name of the measurement, progress 0 to 1, the latest number)."""


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """Measurements to plan with.

    Attributes:
        device: in addition to the CPU; empty without one.
        kept: whether these are earlier measurements.
    """

    measurements: Measurements
    device: str
    kept: bool


def measured_machine(
    probe: Probe,
    config: EngineConfig,
    kind: TuningKind,
    *,
    again: bool,
    before_measuring: Callable[[], None],
    on_progress: OnMeasured,
    cancelled: Callable[[], bool],
) -> MeasuredMachine:
    """Measures the CPU and the device of `config`, unless this machine has measurements that are as thorough.

    Args:
        again: always measure.
        before_measuring: called before measuring a device, to free its memory.

    Raises:
        RequestCancelled: soon after `cancelled()`.
    """
    from engine.measure.measuring import SETS  # imported late: planning alone must not wait for torch

    spec = device_spec(config)
    name = "" if spec == "cpu" else spec
    if not again and (kept := _good_enough(load_measurements(probe, name), kind)) is not None:
        return MeasuredMachine(kept, name, kept=True)
    if spec != "cpu":
        before_measuring()
    found = take_measurements(SETS[kind], probe, spec, on_progress, cancelled)
    return MeasuredMachine(found, found.device, kept=False)


def take_measurements(
    what: MeasurementSet, probe: Probe, spec: str, on_progress: OnMeasured, cancelled: Callable[[], bool]
) -> Measurements:
    """Measures the CPU and a device; nothing is saved.

    Args:
        spec: see `device_spec`.
    """
    from engine.devices.opening import open_devices
    from engine.measure.measuring import measure_machine

    def told(name: str, done: float, found: Row | None) -> None:
        on_progress(name, done, number_of(found) if found is not None else None)

    devices = open_devices(spec)
    try:
        new_folder(models_dir())
        return measure_machine(what, probe, devices[0], models_dir(), on_progress=told, cancelled=cancelled)
    finally:
        for one in devices:
            one.close()


def number_of(row: Row) -> TuningNumber | None:
    if isinstance(row, CallTime):
        return None
    if isinstance(row, RamRead):
        return TuningNumber("ram", _threads(row.threads), row.bytes_per_s, "bytes/s")
    if isinstance(row, ExpertTime):
        detail = f"{row.precision}, {row.hidden} x {row.inner}, {row.tokens} token{'s' if row.tokens > 1 else ''}"
        if row.device == "cpu":
            return TuningNumber("cpu_experts", f"{detail}, {_threads(row.threads)}", row.bytes_per_s, "bytes/s")
        return TuningNumber("gpu_experts", detail, row.bytes_per_s, "bytes/s")
    if isinstance(row, CopyTime):
        way = "h2d" if row.direction == "h2d" else "d2h"
        detail = f"{_size(row.nbytes)}, {'pinned' if row.pinned else 'pageable'}"
        detail += ", both ways" if row.both_ways else ""
        return TuningNumber("h2d" if way == "h2d" else "d2h", detail, row.nbytes / row.seconds, "bytes/s")
    if isinstance(row, DiskRead):
        return TuningNumber("disk", f"{row.depth} x {_size(row.nbytes)}", row.bytes_per_s, "bytes/s")
    if row.memory_bytes_per_s and row.device != "cpu":
        return TuningNumber("gpu_memory", row.device, row.memory_bytes_per_s, "bytes/s")
    if row.flops:
        on_cpu = row.device == "cpu"
        detail = _threads(row.threads) if on_cpu else row.device
        return TuningNumber("cpu_flops" if on_cpu else "gpu_flops", detail, row.flops, "flop/s")
    return None


def device_spec(config: EngineConfig) -> str:
    """The device to be measured: of several equal ones, the first; `cpu` without one."""
    from engine.devices.opening import CARD_KINDS, automatic

    name = automatic() if config.device == "auto" else config.device
    return f"{name}:0" if name in CARD_KINDS else name


def _good_enough(kept: Measurements | None, kind: TuningKind) -> Measurements | None:
    ranks: dict[str, int] = {name: rank for rank, name in enumerate(TUNING_KINDS)}
    if kept is not None and is_busy(kept.others):
        return None
    return kept if kept is not None and ranks.get(kept.kind, -1) >= ranks[kind] else None


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count != 1 else ''}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
