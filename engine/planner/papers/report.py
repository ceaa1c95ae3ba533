"""All rows of all papers, and their median deviations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from engine.planner.costs import EFFICIENCY, MEANINGS, Efficiency
from engine.planner.papers import (
    DERIVED,
    THROUGHPUT,
    PublishedCell,
    collaborative,
    duoserve,
    fiddler,
    klotski,
    moe_lightning,
)

_PAPERS = (collaborative, fiddler, duoserve, moe_lightning, klotski)


@dataclass(frozen=True, slots=True)
class Factor:
    """One efficiency factor.

    Attributes:
        name, value, meaning: see `Efficiency`.
    """

    name: str
    value: float
    meaning: str


def all_rows(efficiency: Efficiency = EFFICIENCY) -> list[PublishedCell]:
    """All figures, paper by paper."""
    return [row for paper in _PAPERS for row in paper.rows(efficiency)]


def factors(efficiency: Efficiency = EFFICIENCY) -> list[Factor]:
    """All efficiency factors in use; they are the only fitted numbers."""
    return [Factor(name, value, MEANINGS[name]) for name, value in asdict(efficiency).items()]


def median_deviation(rows: Sequence[PublishedCell], kind: str) -> float:
    """Median absolute deviation of the rows of a kind, without rows whose number is an input of a profile."""
    return statistics.median(abs(row.deviation) for row in rows if row.kind == kind and not row.given)


def document(rows: Sequence[PublishedCell], efficiency: Efficiency = EFFICIENCY) -> dict[str, object]:
    """Rows, factors and medians as one JSON-like document."""
    return {
        "rows": [{**asdict(row), "deviation": round(row.deviation, 6)} for row in rows],
        "efficiency_factors": [asdict(factor) for factor in factors(efficiency)],
        "median_absolute_deviation": {kind: median_deviation(rows, kind) for kind in (THROUGHPUT, DERIVED)},
    }
