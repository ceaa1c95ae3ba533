"""The number of rows of an input: counted if that is fast, otherwise extrapolated from the share read so far."""

from __future__ import annotations

from itertools import islice

from engine.batch_files.background import Between, noop
from engine.batch_files.fingerprint import stamp
from engine.batch_files.row import RowSource

_COUNTED_BYTES = 100 * 10**6
_UNPACKED = (".csv", ".jsonl", ".md", ".tsv", ".txt")
_ROWS_AT_ONCE = 64
_TOLD_BY = 200


def counted_rows(source: RowSource, between: Between = noop) -> int | None:
    """The number of rows; None if the input is too big to count quickly.

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
    """Whether there are at least `rows` rows; False if the input is too big to count quickly.

    Raises:
        EngineError: as the source's `rows`.
    """
    nbytes = sum(size for _name, size, _time in stamp(source).signs)
    # A line takes at least one byte, unless compressed.
    if nbytes > _COUNTED_BYTES or (nbytes < rows and source.path.suffix.lower() in _UNPACKED):
        return False
    return next(islice(source.rows(), rows - 1, None), None) is not None


class RowCount:
    """The number of rows, as far as known.

    Args:
        counted: see `counted_rows`.
    """

    def __init__(self, counted: int | None) -> None:
        self._total = counted
        self._exact = counted is not None

    @property
    def total(self) -> int | None:
        """Total rows; None while unknown."""
        return self._total

    def read(self, rows: int, share: float) -> None:
        """Notes that this share of the input had `rows` rows."""
        if not self._exact and share > 0 and rows >= _TOLD_BY:
            self._total = max(rows, round(rows / share))

    def ended(self, rows: int) -> None:
        """Notes the total at the end of the input."""
        self._total, self._exact = rows, True
