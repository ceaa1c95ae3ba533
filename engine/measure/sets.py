"""What is measured: in about ten seconds, and in about two minutes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.formats import LADDER
from engine.measure.arithmetic import CpuArithmetic, DeviceArithmetic
from engine.measure.disk import DiskReads
from engine.measure.experts import CardExperts, CpuExperts, ExpertShape
from engine.measure.link import Copies, PinnedLimit
from engine.measure.ram import RamBandwidth
from engine.measure.run import Measurement, thread_counts

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_FINE = ExpertShape(2048, 768)
"""Qwen3-30B-A3B: many small experts."""
_SQUARE = ExpertShape(2880, 2880)
"""gpt-oss."""
_COARSE = ExpertShape(4096, 14336)
"""Mixtral 8x7B: few large experts."""
_WIDE = ExpertShape(7168, 2048)
"""DeepSeek-V3."""
THOROUGH_SHAPES = (_FINE, _SQUARE, _WIDE)
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


QUICK = MeasurementSet(
    "quick",
    256 * _MIB,
    (
        RamBandwidth(one_and_all, 3, 0.6),
        CpuArithmetic(3, 0.5),
        CpuExperts((_FINE,), LADDER, (1, 16, 128), one_and_all, 3, 3.5),
        DeviceArithmetic(3, 0.6),
        CardExperts((_FINE,), LADDER, (1, 128), 3, 1.0),
        Copies((64 * _KIB, 4 * _MIB, 32 * _MIB), 3, 1.5),
        DiskReads(256 * _MIB, (1, 4, 8), (2 * _MIB,), 3, 2.0),
    ),
)
"""Enough to plan with: about ten seconds."""

THOROUGH = MeasurementSet(
    "thorough",
    512 * _MIB,
    (
        RamBandwidth(thread_counts, 7, 4.0),
        CpuArithmetic(7, 2.0),
        CpuExperts(THOROUGH_SHAPES, LADDER, (1, 2, 4, 8, 16, 64, 256), thread_counts, 5, 55.0),
        CpuExperts((_COARSE,), LADDER[1:], (1, 16), one_and_all, 3, 10.0, "large experts on the processor"),
        DeviceArithmetic(7, 2.0),
        CardExperts(THOROUGH_SHAPES, LADDER, (1, 2, 4, 8, 16, 64, 256), 5, 20.0),
        Copies((4 * _KIB, 64 * _KIB, _MIB, 4 * _MIB, 32 * _MIB, 256 * _MIB), 5, 6.0),
        PinnedLimit(256 * _GIB, 10.0),
        DiskReads(_GIB, (1, 2, 4, 8, 16, 32), (256 * _KIB, 2 * _MIB), 3, 20.0),
    ),
)
"""By threads, shapes, sizes and depths: about two minutes."""
SETS = {each.kind: each for each in (QUICK, THOROUGH)}
