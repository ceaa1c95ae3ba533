"""The columns of a result: those of every row of the input, also those that only later rows have, and those added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.batch_files.row import Row

_ADDED = ("answer", "finish_reason", "prompt_tokens", "generated_tokens", "problem")


class SeenColumns:
    """Collects columns while rows are read; whoever needs them all seldom has to read for that.

    Args:
        first: that are known, in order.
    """

    def __init__(self, first: Iterable[str]) -> None:
        self._names = dict.fromkeys(first)
        self._are_all = False

    def through(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The same rows, from the first to the last."""
        for row in rows:
            for name in row.fields:
                if name not in self._names:
                    self._names[name] = None
            yield row
        self._are_all = True

    def all_of(self, rows: Iterable[Row]) -> tuple[str, ...]:
        """The columns of all rows, which are `through` rows, read only if nobody has read them yet."""
        if not self._are_all:
            for _row in rows:
                pass
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """What a result's columns are called.

    Attributes:
        own: of the input, in order: what its rows call them.
        named: what the result calls them: those that only later rows have make way for the added ones.
        added: for the answer, how it ended, its tokens, and what is wrong with the row.
    """

    own: tuple[str, ...]
    named: tuple[str, ...]
    added: tuple[str, ...]


def result_columns(first: Sequence[str], later: Sequence[str]) -> ResultColumns:
    """The columns of a result.

    Args:
        first: what the beginning of the input shows, for which the added ones make way.
        later: others that later rows have.
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
