"""All rows of all papers, and for each paper and table how far off they are and whether their order is right."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from engine.planner.costs import EFFICIENCY, MEANINGS, Factor
from engine.planner.papers import PublishedCell, collaborative, duoserve, fiddler, klotski, moe_lightning

_PAPERS = (collaborative, fiddler, duoserve, moe_lightning, klotski)
SAME = 0.02
"""Numbers that differ by less have no order: neither the papers' repeats nor a simulation tell them apart."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How one table came out, or a whole paper.

    Attributes:
        table: empty for the whole paper.
        cells: that count: those that are not given.
        median: of the absolute deviations.
        worst, worst_cell: the largest deviation, with its sign, and whose it is.
        rank_correlation: Spearman's; of a paper, the least of its tables'.  None where nothing has an order.
    """

    paper: str
    table: str
    cells: int
    median: float
    worst: float
    worst_cell: str
    rank_correlation: float | None


def all_rows() -> list[PublishedCell]:
    """All figures, paper by paper."""
    return [row for paper in _PAPERS for row in paper.rows()]


def in_order(rows: Iterable[PublishedCell]) -> list[PublishedCell]:
    """Rows of several sources, the papers and their tables together."""
    known = [paper.PAPER for paper in _PAPERS]
    return sorted(rows, key=lambda row: known.index(row.paper))


def factors() -> list[Factor]:
    """All efficiency factors in use; they are the only fitted numbers."""
    return [Factor(name, value, MEANINGS[name]) for name, value in asdict(EFFICIENCY).items()]


def median_deviation(rows: Sequence[PublishedCell], kind: str) -> float:
    """Median absolute deviation of the rows of a kind, without rows whose number is an input of a profile."""
    return statistics.median(abs(row.deviation) for row in rows if row.kind == kind and not row.given)


def rank_correlation(rows: Sequence[PublishedCell]) -> float | None:
    """Spearman's, where numbers that differ by less than `SAME` share a rank; None if all that was published does."""
    rows = [row for row in rows if not row.bound]
    published, predicted = _ranks([row.published for row in rows]), _ranks([row.predicted for row in rows])
    if not published.any():
        return None
    spread = float(np.sqrt((published**2).sum() * (predicted**2).sum()))
    return float((published * predicted).sum()) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Mean ranks, around 0."""
    ranks, first = np.empty(len(values)), 0.0
    order = sorted(range(len(values)), key=lambda index: values[index])
    same: list[int] = []
    for place, index in enumerate(order):
        if not same or values[index] > first * (1 + SAME):
            same, first = [], values[index]
        same.append(index)
        ranks[same] = place - (len(same) - 1) / 2
    return ranks - (len(values) - 1) / 2


def summaries(rows: Sequence[PublishedCell]) -> list[Summary]:
    """Of each table, and behind a paper's tables of the paper."""
    found: list[Summary] = []
    for paper, of_paper in groupby(rows, key=lambda row: row.paper):
        counted = [row for row in of_paper if not row.given]
        tables: dict[str, list[PublishedCell]] = {}
        for row in counted:
            tables.setdefault(row.table, []).append(row)
        each = [_summary(paper, table, cells, rank_correlation(cells)) for table, cells in tables.items()]
        ranked = [table.rank_correlation for table in each if table.rank_correlation is not None]
        found += [*each, _summary(paper, "", counted, min(ranked, default=None))]
    return found


def _summary(paper: str, table: str, cells: Sequence[PublishedCell], correlation: float | None) -> Summary:
    worst = max(cells, key=lambda row: abs(row.deviation))
    name = worst.cell if table else f"{worst.table}: {worst.cell}"
    median = statistics.median(abs(row.deviation) for row in cells)
    return Summary(paper, table, len(cells), median, worst.deviation, name, correlation)


def document(rows: Sequence[PublishedCell]) -> dict[str, object]:
    """Rows, tables, factors and medians as one JSON-like document."""
    return {
        "rows": [{**asdict(row), "deviation": round(row.deviation, 6)} for row in rows],
        "tables": [asdict(summary) for summary in summaries(rows)],
        "efficiency_factors": [asdict(factor) for factor in factors()],
        "median_absolute_deviation": {
            kind: median_deviation(rows, kind) for kind in dict.fromkeys(row.kind for row in rows)
        },
    }
