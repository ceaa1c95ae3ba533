"""What a job asks of whoever answers its rows, and what it is told.

All of it is plain data: rows may be answered by this process, by another one or by another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.rows import RowRequest

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


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What has become of one try of a row.

    Attributes:
        row: its index in the input.
        text: the answer alone; for a failed row, its text so far.
        finish_reason: as in `Finished`; `failed` if the row could not be answered, `cancelled` if nobody wants it.
        prompt_tokens, generated_tokens: lengths.
        reasoning: what was thought before the answer.
        error: why the row could not be answered, as a sentence; empty if it was.
        is_complete: whether the answer satisfies the row's constraint; another try may be made if not.
        by: the name of the endpoint that answered; empty for this machine.
        tool_calls: as of `Answer`.
    """

    row: int
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    reasoning: str = ""
    error: str = ""
    is_complete: bool = True
    by: str = ""
    tool_calls: str = ""


RowCallback = Callable[[RowAnswer], None]


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
