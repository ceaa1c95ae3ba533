"""What rows have read, for rows whose prompts begin alike: copies of states, or of caches, that pages cannot share.

A cache that sums up what it reads cannot go back to where two prompts part.  So the first of some rows stops there for
a moment and leaves a copy, which the others wait for and go on from; and a row that ends leaves its own cache.
"""

from __future__ import annotations

import copy
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from engine.runtime.kv.memory import cache_bytes
from engine.runtime.kv.reuse import KEEPS_EVERY_TOKEN

if TYPE_CHECKING:
    from engine.runtime.schedule.row import PagedRow

_FEWEST = 32
"""Tokens that it is worth to copy a cache for."""
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


class LeftCaches(Partings):
    """Caches by the tokens that they hold, the ones of no use for longest dropped first.

    Args:
        most_bytes: of all of them.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._caches: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._nbytes = 0

    def forget(self) -> None:
        """Drops all of them."""
        super().forget()
        self._caches.clear()
        self._nbytes = 0

    def find(self, prompt: Sequence[int]) -> tuple[Any, int] | None:
        """A copy of the cache that holds most of a prompt but its last token, and how many tokens that is."""
        wanted, best, tokens = _bytes(prompt[:-1]), None, _FEWEST - 1
        for key, (cache, _nbytes) in self._caches.items():
            common = _common(key, wanted)
            if common * _WIDTH < len(key) and not _can_crop(cache):
                continue
            if common > tokens:
                best, tokens = key, common
        if best is None:
            return None
        self._caches.move_to_end(best)
        found = copy.deepcopy(self._caches[best][0])
        if (more := len(best) // _WIDTH - tokens) > 0:
            for layer in found.layers:
                layer.crop(-more)
        return found, tokens

    def passed(self, row: PagedRow, cache: Any, tokens: int) -> None:
        """A row's cache holds so many tokens now."""
        if self.ends(row, tokens):
            self.take(row.prompt[:tokens], copy.deepcopy(cache))

    def take(self, ids: Sequence[int], cache: Any) -> None:
        """Nobody else uses a cache of these tokens any more."""
        nbytes, key = cache_bytes(cache), _bytes(ids)
        if len(ids) < _FEWEST or nbytes > self._most_bytes:
            return
        self._drop(key)
        while self._caches and self._nbytes + nbytes > self._most_bytes:
            self._drop(next(iter(self._caches)))
        self._caches[key] = cache, nbytes
        self._nbytes += nbytes

    def _drop(self, key: bytes) -> None:
        self._nbytes -= self._caches.pop(key, (None, 0))[1]


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


def _can_crop(cache: Any) -> bool:
    return all(type(layer) in KEEPS_EVERY_TOKEN for layer in cache.layers)
