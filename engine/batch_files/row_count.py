"""How many rows an input has: counted where that is quick, else judged by how far it has been read."""

from __future__ import annotations

from itertools import islice

from engine.batch_files.aside import Between, on_and_on
from engine.batch_files.fingerprint import stamp
from engine.batch_files.row import RowSource

_COUNTED_BYTES = 100 * 10**6
_UNPACKED = (".csv", ".jsonl", ".md", ".tsv", ".txt")
_ROWS_AT_ONCE = 64
_TOLD_BY = 200


def counted_rows(source: RowSource, between: Between = on_and_on) -> int | None:
    """The number of rows; None of an input so big that counting would take long.

    Raises:
        EngineError: as the source's `rows`.
        StoppedError: see `Between`.
    """
    if sum(size for _name, size, _time in stamp(source).signs) > _COUNTED_BYTES:
        return None
    count = 0
    for count, row in enumerate(source.rows(), start=1):
        if count % _ROWS_AT_ONCE == 1:
            between(row.share)
    return count


def has_rows(source: RowSource, rows: int) -> bool:
    """Whether there are so many; False of an input so big that counting would take long.

    Raises:
        EngineError: as the source's `rows`.
    """
    nbytes = sum(size for _name, size, _time in stamp(source).signs)
    # A line takes a byte at least, unless it is packed.
    if nbytes > _COUNTED_BYTES or (nbytes < rows and source.path.suffix.lower() in _UNPACKED):
        return False
    return next(islice(source.rows(), rows - 1, None), None) is not None


class RowCount:
    """The number of rows, as well as it is known.

    Args:
        counted: see `counted_rows`.
    """

    def __init__(self, counted: int | None) -> None:
        self._total = counted
        self._exact = counted is not None

    @property
    def total(self) -> int | None:
        """Rows in all; None while nobody knows."""
        return self._total

    def read(self, rows: int, share: float) -> None:
        """So many rows were in this share of the input."""
        if not self._exact and share > 0 and rows >= _TOLD_BY:
            self._total = max(rows, round(rows / share))

    def ended(self, rows: int) -> None:
        """There were so many."""
        self._total, self._exact = rows, True
