"""Where rows whose prompts begin alike part.

What sums up what it reads cannot go back to where two prompts part.  So the first of some rows stops there for a moment
and leaves a copy of its state, which the others wait for and go on from.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from engine.runtime.schedule.row import PagedRow

_FEWEST = 32
"""Tokens that it is worth to leave a copy for."""
_MOST = 64
"""Prompts whose beginnings are compared with a new one."""


class Partings:
    """Where rows whose prompts begin alike part: the first of them leaves there what the others go on from.

    Args:
        step: they are taken to part at a multiple of so many tokens.
    """

    def __init__(self, step: int = 1) -> None:
        self._step = step
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Prompts that were begun lately."""
        self._stops: WeakKeyDictionary[PagedRow, int] = WeakKeyDictionary()
        """Where rows leave copies on their way."""

    def forget(self) -> None:
        """Forgets what prompts began with."""
        self._recent.clear()

    def waits(self, row: PagedRow, others: Sequence[PagedRow]) -> bool:
        """Whether a row that has not begun is to wait until one of others, which are reading, has read what both begin
        with."""
        mine = _bytes(row.prompt[:-1])
        for other in others:
            common = self._at(min(_common(_bytes(other.prompt), mine), len(other.prompt) - 1))
            if common and other.held < common:
                self._stops[other] = min(common, self._stops.get(other, common))
                return True
        shared = max((self._at(_common(each, mine)) for each in self._recent), default=0)
        if shared:
            self._stops[row] = shared  # those who come later will begin like these two
        self._recent[_bytes(row.prompt)] = None
        while len(self._recent) > _MOST:
            self._recent.popitem(last=False)
        return False

    def _at(self, tokens: int) -> int:
        """Where those part who have so many tokens in common; 0 if that is of no use."""
        return tokens // self._step * self._step if tokens >= _FEWEST else 0

    def up_to(self, row: PagedRow, tokens: int) -> int:
        """How many of the next tokens it reads before it leaves a copy."""
        stop = self._stops.get(row, 0)
        return min(tokens, stop - row.held) if stop > row.held else tokens

    def ends(self, row: PagedRow, tokens: int) -> bool:
        """Whether it leaves a copy behind so many tokens, once."""
        return self._stops.get(row) == tokens and bool(self._stops.pop(row))


_WIDTH = 8


def _bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(one), len(other)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _WIDTH] == other[: middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
