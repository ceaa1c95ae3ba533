"""The figures that five papers publish, next to what came out here: predicted, replayed, or run by the engine."""

from __future__ import annotations

from dataclasses import dataclass

THROUGHPUT = "throughput"
"""Times, rates and ratios of them, as the simulator predicts them."""
DERIVED = "derived"
"""Sizes, counts, shares: what follows from a model's and a machine's dimensions."""
REPLAYED = "replayed"
"""Of predictors on recorded routing, of another model than the paper's."""
MEASURED = "measured"
"""Of the engine itself, on emulated cards (`switchyard bench papers`)."""
FAR_OFF = 0.6
"""A cell that deviates by more has a sentence that says why."""


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """A cell of a published table.

    Attributes:
        paper, table, cell: position in the paper; `table` names one column or row, whose cells are comparable.
        published, predicted: the two numbers.
        unit: of both.
        kind: `THROUGHPUT`, `DERIVED`, `REPLAYED` or `MEASURED`.
        given: the number itself is in the machine's profile, so it agrees by construction and is left out of medians.
        note: what had to be assumed.
        why: what explains the deviation.
        bound: the paper says "at most".
    """

    paper: str
    table: str
    cell: str
    published: float
    predicted: float
    unit: str
    kind: str
    given: bool = False
    note: str = ""
    bound: bool = False
    why: str = ""

    @property
    def deviation(self) -> float:
        """Predicted over published, minus one; 0 if a published bound is met."""
        if self.bound and self.predicted <= self.published:
            return 0.0
        return self.predicted / self.published - 1.0
