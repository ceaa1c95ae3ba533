"""How many rows an input has: counted where that is quick, else judged by how far it has been read."""

from __future__ import annotations

from collections.abc import Callable

from engine.batch_files.fingerprint import stamp
from engine.batch_files.row import RowSource

_COUNTED_BYTES = 100 * 10**6
_TOLD_BY = 200


class RowCount:
    """The number of rows, as well as it is known.

    Args:
        cancelled: asked while counting.
    """

    def __init__(self, source: RowSource, cancelled: Callable[[], bool]) -> None:
        self._total: int | None = None
        self._exact = False
        if sum(size for _name, size, _time in stamp(source).signs) <= _COUNTED_BYTES:
            count = 0
            for _row in source.rows():
                count += 1
                if cancelled():
                    return
            self._total, self._exact = count, True

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
