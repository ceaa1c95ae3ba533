"""What a job asks of whoever answers its rows, and what it is told.

All of it is plain data: rows may be answered by this process, by another one or by another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.rows import Answer, RowRequest

Check = Callable[[], bool]


def never() -> bool:
    return False


def always() -> bool:
    """For callers that want one step at a time."""
    return True


class BatchOutcome(Enum):
    """Why a run of rows has ended.

    `YIELDED`: another request had priority; the rows in progress are kept, and the next run continues them.
    """

    FINISHED = "finished"
    YIELDED = "yielded"
    CANCELLED = "cancelled"


RowCallback = Callable[[Answer], None]
"""Told what has become of one try of a row: `problem` is a sentence then, and not yet one about the row."""


class RowExecutor(Protocol):
    """Answers rows in any order, many at once."""

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """Answers rows, reading them as places become free.

        Args:
            rows: the remaining ones if an earlier call has yielded: the rows in progress come first.  A row may come
                again once it has been answered: it is to be tried again.
            on_row: called exactly once each time a row was read, one call at a time, and only until `run` returns.
            should_yield: whether somebody else comes first; `run` then returns soon and keeps all rows.
            cancelled: whether to stop: as quickly, but without keeping anything.

        Raises:
            EngineError: nothing can be answered; the rows in progress are kept for another try.
        """

    @property
    def under_way(self) -> tuple[int, int]:
        """Rows that are being answered now, and the tokens generated for them so far."""

    @property
    def waits(self) -> str:
        """Why nothing is being answered at present although rows are there, as a sentence; empty if something is."""

    @property
    def places(self) -> tuple[PlacePace, ...]:
        """Where rows are answered; empty if that is this machine alone."""


class ClosingExecutor(RowExecutor, Protocol):
    """An executor that holds something until it is closed.

    Attributes:
        note: a remark on how rows were answered, for the user; empty if there is none.
    """

    @property
    def note(self) -> str: ...

    def close(self) -> None:
        """Safe to call twice."""
