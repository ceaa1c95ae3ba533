"""Pages of keys and values: who holds which, and which beginnings of texts they can be shared by."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.kernels.native.paged_attention import PAGE_TOKENS

Prefix = bytes
"""Identifies the tokens of a prompt up to the end of a page."""

NO_PREFIX: Prefix = b""


def prefix_after(before: Prefix, tokens: Sequence[int]) -> Prefix:
    """The prefix that ends with this page of tokens, given the prefix before it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 0 to `capacity` - 1.

    A row takes pages that it has reserved.  Complete pages are offered for sharing under the tokens up to their end,
    of prompts and answers alike; once no row holds such a page it is kept until its place is needed, least recently
    used first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._holders = [0] * capacity
        self._reserved = 0
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages that no row holds but that can still be shared."""
        self.elsewhere = 0
        """Pages whose memory is in use as a cache of a sequence's own."""
        self.touched: set[int] = set()
        """Pages that have been written to, and so have memory."""
        self.others: Callable[[], int] = _none
        """Pages whose memory other pools have in use; see `SharedBudget`."""
        self.before_touching: Callable[[], object] = _none

    @property
    def held(self) -> int:
        """Pages that rows hold now."""
        return self.capacity - len(self._free) - len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that are held or promised, and those whose memory is a cache of a sequence's own."""
        return self.held + self._reserved + self.elsewhere

    def reserve(self, pages: int) -> bool:
        """Reserves pages; False if there are not enough."""
        if pages > 0 and self.in_use + pages + self.others() > self.capacity:
            return False
        self._reserved += pages
        return True

    def give_back_reservation(self, pages: int) -> None:
        """Releases the reservation of a row that ends early, or that shares pages instead."""
        self._reserved -= pages

    def take(self) -> int:
        """Takes a page out of a reservation."""
        assert self._reserved > 0
        self._reserved -= 1
        page = self._free.pop() if self._free else self._oldest_idle()
        self._holders[page] = 1
        if page not in self.touched:
            self.before_touching()
            self.touched.add(page)
        return page

    def give_back(self, most: int) -> list[int]:
        """Up to so many pages with memory that no row holds: they have none from now on."""
        pages = [page for page in self._free if page in self.touched][:most]
        while len(pages) < most and self._idle:
            pages.append(self._oldest_idle())
            self._free.insert(0, pages[-1])
        self.touched -= set(pages)
        return pages

    def _oldest_idle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._prefix_of.pop(page)]
        return page

    def share(self, prefix: Prefix) -> int | None:
        """The page that ends this prefix, with one more holder; `None` if there is none."""
        page = self._page_of.get(prefix)
        if page is None:
            return None
        if self._holders[page] == 0:
            # Reservations count an idle page as free, so the row that shares it gives up one of its own.
            del self._idle[page]
            self._reserved -= 1
        self._holders[page] += 1
        return page

    def fork(self, page: int) -> None:
        """One more holder of a page that is held: who writes to it next takes a page of its own instead."""
        assert self._holders[page] > 0
        self._holders[page] += 1

    def is_forked(self, page: int) -> bool:
        """Whether several hold it."""
        return self._holders[page] > 1

    def grow(self, pages: int) -> None:
        """There are so many more."""
        self._free[:0] = range(self.capacity + pages - 1, self.capacity - 1, -1)
        self._holders += [0] * pages
        self.capacity += pages

    def is_idle(self, prefix: Prefix) -> bool:
        """Whether this prefix has a page that no row holds."""
        page = self._page_of.get(prefix)
        return page is not None and self._holders[page] == 0

    def publish(self, page: int, prefix: Prefix) -> None:
        """Offers a page for sharing as the end of this prefix; the first page offered for a prefix is used."""
        if prefix not in self._page_of:
            self._page_of[prefix] = page
            self._prefix_of[page] = prefix

    def forget_prefixes(self) -> None:
        """Stops sharing all present pages with later rows."""
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._prefix_of.clear()

    def release(self, page: int) -> None:
        """Removes one holder."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefix_of:
            self._idle[page] = None
        else:
            self._free.append(page)


def _none() -> int:
    return 0


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // PAGE_TOKENS)
