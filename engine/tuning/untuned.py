"""What a machine that nobody has tuned measures before it plans: for a few seconds, and once for a shape of experts.

Nodes of a cluster do this: nobody sits before them.  `switchyard tune` measures more, and its results stand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from engine.checkpoint.catalogue import find_shape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import holding, private_folder
from engine.common.paths import data_dir
from engine.formats import AUTO, LADDER
from engine.hardware.measured import ExpertTime, Measurements, load_measurements, save_measurements
from engine.hardware.probe import OtherPrograms, is_busy
from engine.hardware.probe import probe as probe_machine
from engine.measure.arithmetic import (
    NARROWEST,
    CardExpertTimes,
    CpuArithmetic,
    CpuExperts,
    DeviceArithmetic,
    ExpertShape,
    NativeCalls,
    RamBandwidth,
    SharedLayer,
)
from engine.measure.link import Copies, DiskReads
from engine.measure.measuring import MeasurementSet
from engine.tuning.measuring import device_spec, take_measurements
from engine.tuning.result import TUNING_KINDS

_log = logging.getLogger(__name__)
_KIND = "brief"
_PATIENCE_S = 60.0
"""How long to wait for another process of this machine that measures it."""
_BUSY_HOLDS_S = 3600.0
"""How long results hold that were taken while other programs were busy: an engine that is started again needs them."""
_MIB = 2**20
_TILE = 32
"""Widths are multiples of this in quantised records."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a plan for a model is made with.

    Attributes:
        shape: of its experts; None if it has none.
        threads: of the engine; None for all.
    """

    shape: ExpertShape | None
    precisions: tuple[str, ...]
    threads: int | None

    def is_in(self, kept: Measurements | None) -> bool:
        if kept is None or kept.kind in TUNING_KINDS:
            return kept is not None
        shape = self.shape
        if is_busy(kept.others) and _age_s(kept) > _BUSY_HOLDS_S:
            return False
        known = {row.precision for row in kept.experts if shape is not None and _is_of(shape, row)}
        return shape is None or known >= set(self.precisions)

    def measurements(self) -> MeasurementSet:
        """All of it: about three seconds without a card."""
        shapes = () if self.shape is None else (self.shape,)
        each_s = 0.5 * len(self.precisions)
        experts = (
            CpuExperts(shapes, self.precisions, (1,), self._threads, 3, each_s),
            CardExpertTimes(shapes, self.precisions, (1, 128), 3, each_s),
        )
        return MeasurementSet(
            _KIND,
            128 * _MIB,
            (
                RamBandwidth(self._threads, 3, 0.3),
                CpuArithmetic(3, 0.4),
                NativeCalls(self._threads, 9, 0.1),
                *(experts if shapes else ()),
                DeviceArithmetic(3, 0.4),
                SharedLayer(9, 0.5),
                Copies((64 * 2**10, 32 * _MIB), 3, 0.6),
                DiskReads(128 * _MIB, (4,), (2 * _MIB,), 2, 0.6),
            ),
        )

    def _threads(self, most: int) -> tuple[int, ...]:
        return (min(most, self.threads or most),)


def measure_untuned(config: EngineConfig, on_begin: Callable[[], None], cancelled: Callable[[], bool]) -> bool:
    """Measures this machine for a model, unless it was tuned or has measured itself for such a one; keeps the results.

    One process at a time measures: another one's results will do.

    Args:
        config: of the engine; its model is a path.
        on_begin: called if it takes time.

    Returns:
        whether this process has measured.

    Raises:
        RequestCancelled: soon after `cancelled()`.
    """
    wanted, spec, probe = _wanted(config), device_spec(config), probe_machine()
    name = "" if spec == "cpu" else spec
    if wanted.is_in(load_measurements(probe, name)):
        return False
    on_begin()
    try:
        private_folder(data_dir())
        with holding(data_dir() / "measuring.lock", _PATIENCE_S, "another process measures this machine"):
            kept = load_measurements(probe, name)
            if wanted.is_in(kept):
                return False
            others = OtherPrograms().watch()
            found = take_measurements(wanted.measurements(), probe, spec, lambda *_: None, cancelled)
            save_measurements(replace(_with_earlier(found, kept), others=others()))
            return True
    except OSError:
        _log.warning("what this machine measured of itself could not be kept", exc_info=True)
    except EngineError as error:
        if error.code is not ErrorCode.BUSY:
            raise
        _log.warning("this machine was not measured: %s", error.message)
    return False


def _wanted(config: EngineConfig) -> _Wanted:
    model = find_shape(config.model)
    precisions = LADDER if config.precision == AUTO else (model.measured_as(config.precision),)
    if not model.experts or not model.expert_width:
        return _Wanted(None, precisions, config.threads)
    shape = ExpertShape(_whole_tiles(model.hidden), _whole_tiles(model.expert_width))
    return _Wanted(shape, precisions, config.threads)


def _whole_tiles(width: int) -> int:
    return -(-width // _TILE) * _TILE


def _is_of(shape: ExpertShape, row: ExpertTime) -> bool:
    """Whether the row is of such an expert, or of the part of it that memory had room for; see `CpuExperts`."""
    inner = shape.inner
    while inner > row.inner >= NARROWEST:
        inner = inner // 2 // _TILE * _TILE
    return (row.device, row.hidden, row.inner) == ("cpu", shape.hidden, inner)


def _age_s(kept: Measurements) -> float:
    """By this machine's clock; infinite if that was set back since, or the file holds no time."""
    try:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(kept.taken_at)).total_seconds()
    except (ValueError, TypeError):
        return math.inf
    return age_s if age_s >= 0 else math.inf


def _with_earlier(found: Measurements, kept: Measurements | None) -> Measurements:
    """With what was measured before, of other experts."""
    if kept is None:
        return found
    new = {_question(row) for row in found.experts}
    return replace(found, experts=(*found.experts, *(row for row in kept.experts if _question(row) not in new)))


def _question(row: ExpertTime) -> ExpertTime:
    return replace(row, nbytes=0, seconds=0.0)
