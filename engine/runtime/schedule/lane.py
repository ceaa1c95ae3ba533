"""Rows of several sources that are answered in turn or together, and go on where they were."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.jobs.rows import BatchOutcome, Check
from engine.runtime.schedule.request import AnswerCallback, PreparedRow
from engine.runtime.schedule.row import PagedRow


@dataclass(eq=False)
class RowSource:
    """Where rows come from and where their answers go: the requests of people, or one job.

    Attributes:
        prepared: the next ones; it may have ended now and go on later.
        rests: whether its rows stay as they are, and no more of them are begun.
        rows: those in progress that have pages, or gave them up.
        is_dry: whether it had no more when it was last asked.
    """

    prepared: Iterator[PreparedRow | None]
    on_row: AnswerCallback
    rests: bool = False
    rows: list[PagedRow] = field(default_factory=list)
    next: PreparedRow | None = None
    """For which there has been no room."""
    is_dry: bool = False

    def take(self) -> PreparedRow | None:
        """The row to begin next, if there is one now."""
        new, self.next = self.next or next(self.prepared, None), None
        self.is_dry = new is None
        return new

    @property
    def under_way(self) -> tuple[int, int]:
        """Its rows in progress, and the tokens generated for them."""
        return len(self.rows), sum(len(row.sequence.ids) for row in self.rows)


class Lane(ABC):
    """Rows that go on between other work on the same model."""

    def __init__(self) -> None:
        self.sources: list[RowSource] = []
        self._own = RowSource(iter(()), lambda _answer: None)
        """Of who asks by `run`."""
        self.turns = 0
        """Sweeps, or rows answered alone, begun so far."""

    def run(
        self, prepared: Iterator[PreparedRow], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        """Answers the rows of one source until there are no more; see `BatchExecutor.run`."""
        self._asks(prepared, on_row)
        outcome = BatchOutcome.FINISHED

        def until() -> bool:
            nonlocal outcome
            if cancelled():
                outcome = BatchOutcome.CANCELLED
            elif should_yield():
                outcome = BatchOutcome.YIELDED
            return outcome is not BatchOutcome.FINISHED

        self.go_on(until)
        if outcome is BatchOutcome.CANCELLED:
            self.close()
        return outcome

    def _asks(self, prepared: Iterator[PreparedRow | None], on_row: AnswerCallback) -> None:
        self._own.prepared, self._own.on_row = prepared, on_row
        if self._own not in self.sources:
            self.sources.append(self._own)

    @property
    def is_resting(self) -> bool:
        """Whether nobody wants it to go on, and no sweep has to end first."""
        return all(source.rests and not self.works_on(source) for source in self.sources)

    @property
    @abstractmethod
    def under_way(self) -> tuple[int, int]:
        """Rows that share each sweep now, and the tokens generated for them."""

    @abstractmethod
    def go_on(self, until: Check) -> bool:
        """Goes on until `until()` comes true, which is asked before each layer; whether there is more to do."""

    @abstractmethod
    def works_on(self, source: RowSource) -> bool:
        """Whether rows of this source are in the sweep under way."""

    def has_ended(self, source: RowSource) -> bool:
        """Whether all that a source had has been answered."""
        return source.is_dry and not source.rows and source.next is None

    @abstractmethod
    def drop(self, source: RowSource) -> None:
        """Gives up a source and its rows; others begin their sweep again if it had any in it."""

    def close(self) -> None:
        """Drops all rows."""
        for source in list(self.sources):
            self.drop(source)

    @abstractmethod
    def free(self) -> None:
        """As `close`, and also releases the memory: nothing more is possible."""
