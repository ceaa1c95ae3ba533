"""The columns of a result: those of all input rows, including ones that first appear in later rows, and added ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.batch_files.row import Row

_ADDED = ("answer", "finish_reason", "prompt_tokens", "generated_tokens", "problem")


class SeenColumns:
    """Collects columns while rows are read, to avoid a second pass over the input.

    Args:
        first: known columns, in order.
    """

    def __init__(self, first: Iterable[str]) -> None:
        self._names = dict.fromkeys(first)
        self._are_all = False

    def through(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yields the same rows, first to last, noting their columns."""
        for row in rows:
            for name in row.fields:
                if name not in self._names:
                    self._names[name] = None
            yield row
        self._are_all = True

    def all_of(self, rows: Iterable[Row]) -> tuple[str, ...]:
        """The columns of all rows (from `through`), which are only read if they have not been."""
        if not self._are_all:
            for _row in rows:
                pass
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """The column names of a result.

    Attributes:
        own: the input's columns, in order.
        named: their names in the result: columns of later rows are renamed if they clash with added ones.
        added: names for the answer, its finish reason, its tokens and the row's problem.
    """

    own: tuple[str, ...]
    named: tuple[str, ...]
    added: tuple[str, ...]


def result_columns(first: Sequence[str], later: Sequence[str]) -> ResultColumns:
    """Chooses the column names of a result.

    Args:
        first: columns at the beginning of the input; added ones are renamed if they clash with these.
        later: further columns of later rows.
    """
    added = tuple(_free(name, first) for name in _ADDED)
    taken = {*first, *later, *added}
    named = list(first)
    for name in later:
        named.append(name if name not in added else _free(f"{name}_input", taken))
        taken.add(named[-1])
    return ResultColumns((*first, *later), tuple(named), added)


def _free(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
