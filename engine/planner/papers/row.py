"""One published number and its prediction."""

from __future__ import annotations

from dataclasses import dataclass

THROUGHPUT = "throughput"
"""Times, rates and ratios of them."""
DERIVED = "derived"
"""Sizes, counts, shares: what follows from a model's and a machine's dimensions."""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell of a published table.

    Attributes:
        paper, table, cell: where it stands; `table` names one column or row, whose cells are compared with each other.
        unit: of both numbers.
        kind: `THROUGHPUT` or `DERIVED`.
        published, predicted: the numbers.
        given: the machine's profile holds this very number, so that it agrees by construction: not counted in medians.
        note: what was assumed, or why it is off.
        bound: the publication says "at most".
    """

    paper: str
    table: str
    cell: str
    unit: str
    kind: str
    published: float
    predicted: float
    given: bool = False
    note: str = ""
    bound: bool = False

    @property
    def deviation(self) -> float:
        """Predicted over published, less one; nothing if a bound is kept."""
        if self.bound and self.predicted <= self.published:
            return 0.0
        return self.predicted / self.published - 1.0
