"""Pages of keys and values: who holds which, and which prompts they are the beginning of."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.kernels.native.paged_attention import PAGE_TOKENS

Prefix = bytes
"""Stands for the tokens of a prompt up to the end of a page."""

NO_PREFIX: Prefix = b""


def prefix_after(before: Prefix, tokens: Sequence[int]) -> Prefix:
    """The prefix that a page of tokens makes of the one before it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 0 to `capacity` - 1.

    A row reserves all pages that it may come to need before it begins, so that nobody who has begun ever waits or
    loses a page.  Pages that hold the beginning of a prompt are shared; when no row holds one any more it is kept as
    long as nobody needs its place, the one unused for the longest going first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._holders = [0] * capacity
        self._reserved = 0
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds but that may be shared again."""

    @property
    def held(self) -> int:
        """Pages that rows hold now."""
        return self.capacity - len(self._free) - len(self._idle)

    def reserve(self, pages: int) -> bool:
        """Sets so many pages aside for somebody; false if they are not there."""
        if self._reserved + pages > len(self._free) + len(self._idle):
            return False
        self._reserved += pages
        return True

    def give_back_reservation(self, pages: int) -> None:
        """Of a row that ends earlier, or that shares pages instead."""
        self._reserved -= pages

    def take(self) -> int:
        """A page out of a reservation."""
        assert self._reserved > 0
        self._reserved -= 1
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._prefix_of.pop(page)]
        self._holders[page] = 1
        return page

    def share(self, prefix: Prefix) -> int | None:
        """The page that ends this prefix, held by one more; `None` if there is none, or not without a reservation."""
        page = self._page_of.get(prefix)
        if page is None:
            return None
        if self._holders[page] == 0:
            # It leaves what others have reserved, so whoever shares it gives one of its own reservations for it.
            del self._idle[page]
            self._reserved -= 1
        self._holders[page] += 1
        return page

    def is_idle(self, prefix: Prefix) -> bool:
        """Whether this prefix has a page that nobody holds."""
        page = self._page_of.get(prefix)
        return page is not None and self._holders[page] == 0

    def publish(self, page: int, prefix: Prefix) -> None:
        """The page now holds the end of this prefix, for others to share; the first one that does so counts."""
        if prefix not in self._page_of:
            self._page_of[prefix] = page
            self._prefix_of[page] = prefix

    def forget_prefixes(self) -> None:
        """Nothing that is there now is shared with those to come."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._prefix_of.clear()

    def release(self, page: int) -> None:
        """One holder less."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefix_of:
            self._idle[page] = None
        else:
            self._free.append(page)


def pages_for(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE_TOKENS)
