"""Pages of keys and values: who holds which, and which beginnings of texts they can be shared by."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.kernels.native.paged_attention import PAGE_TOKENS

Prefix = bytes
"""Identifies the tokens of a prompt up to the end of a page."""

NO_PREFIX: Prefix = b""

Discard = Callable[[Sequence[int]], None]


def _keep(pages: Sequence[int]) -> None:
    """For pages that have no memory of their own."""


def prefix_after(before: Prefix, tokens: Sequence[int]) -> Prefix:
    """The prefix that ends with this page of tokens, given the prefix before it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PageKind(NamedTuple):
    """How some rows use pages of a pool, whose memory holds keys and values in one of several ways.

    Attributes:
        root: the prefix of no tokens; what is stored in another way has another one.
        weight: pages that one of theirs takes.
        discard: returns the memory of pages to the system; they can be written to again.
    """

    root: Prefix = NO_PREFIX
    weight: int = 1
    discard: Discard = _keep


class PagePool:
    """Pages 0 to `capacity` - 1.

    A row takes pages that it has reserved.  Complete pages are offered for sharing under the tokens up to their end,
    of prompts and answers alike, and so is the last one of a row that has ended; once no row holds such a page it is
    kept until its place is needed, least recently used first.  That is the prefix cache.

    Args:
        beside: how many pages' memory a row takes for what it has beside its pages, without which nobody can go on from
            these: they are not shared; `None` if pages are all that it has.
    """

    def __init__(self, capacity: int, beside: int | None = None) -> None:
        self.capacity = capacity
        self.beside, self.shares = beside or 0, beside is None
        self._free = list(range(capacity - 1, -1, -1))
        self._holders = [0] * capacity
        self._reserved = 0
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._after: dict[Prefix, dict[int, tuple[int, ...]]] = {}
        """Offered pages by the prefix before them, with their own tokens."""
        self._before: dict[int, Prefix] = {}
        self.steady: set[int] = set()
        """Offered pages whose tokens, and all before them, were computed in whole chunks from the first one on: those
        of an answer that has to be repeated bit by bit may be shared."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages that no row holds but that can still be shared."""
        self.elsewhere: Callable[[], int] = int
        """Pages whose memory is in use as a cache of a sequence's own."""
        self.touched: dict[int, Discard] = {}
        """Pages that have been written to, and so have memory, and what returns that."""

    @property
    def held(self) -> int:
        """Pages that rows hold now."""
        return self.capacity - len(self._free) - len(self._idle)

    @property
    def in_use(self) -> int:
        """Pages that are held or promised, and those whose memory is a cache of a sequence's own."""
        return self.held + self._reserved + self.elsewhere()

    def needs(self, tokens: int) -> int:
        """Pages that a row of so many tokens takes."""
        return pages_for(tokens) + self.beside

    def reserve(self, pages: int) -> bool:
        """Reserves pages; False if there are not enough."""
        if pages > 0 and self.in_use + pages > self.capacity:
            return False
        self._reserved += pages
        return True

    def give_back_reservation(self, pages: int) -> None:
        """Releases the reservation of a row that ends early, or that shares pages instead."""
        self._reserved -= pages

    def take(self, kind: PageKind = PageKind()) -> int:  # noqa: B008 - it cannot be changed
        """Takes a page out of a reservation."""
        assert self._reserved > 0
        self._reserved -= 1
        page = self._free.pop() if self._free else self._oldest_idle()
        self._holders[page] = 1
        if self.touched.get(page, kind.discard) != kind.discard:
            self.discard([page])
        self.touched[page] = kind.discard
        return page

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of pages that nobody can share any more."""
        owners: dict[Discard, list[int]] = {}
        for page in pages:
            if (owner := self.touched.pop(page, None)) is not None:
                owners.setdefault(owner, []).append(page)
        for owner, own in owners.items():
            owner(own)

    def leave(self, kind: PageKind) -> None:
        """The memory of this kind is gone."""
        for page in [page for page, owner in self.touched.items() if owner == kind.discard]:
            del self.touched[page]
            if page in self._idle:
                del self._idle[page]
                self._forget(page)
                self._free.append(page)

    def give_back(self, most: int) -> list[int]:
        """Up to so many pages with memory that no row holds: they have none from now on."""
        pages = [page for page in self._free if page in self.touched][:most]
        while len(pages) < most and self._idle:
            pages.append(self._oldest_idle())
            self._free.insert(0, pages[-1])
        self.discard(pages)
        return pages

    def _oldest_idle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        prefix = self._prefix_of.pop(page)
        if self._page_of.get(prefix) == page:
            del self._page_of[prefix]
        siblings = self._after[before := self._before.pop(page)]
        del siblings[page]
        if not siblings:
            del self._after[before]
        self.steady.discard(page)

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

    def is_idle(self, prefix: Prefix) -> bool:
        """Whether this prefix has a page that no row holds."""
        page = self._page_of.get(prefix)
        return page is not None and self._holders[page] == 0

    @property
    def idle(self) -> int:
        """Pages that no row holds but that can still be shared."""
        return len(self._idle)

    def publish(
        self, page: int, prefix: Prefix, before: Prefix = NO_PREFIX, tokens: Sequence[int] = (), *, steady: bool = False
    ) -> None:
        """Offers a page for sharing as the end of this prefix; the first page offered for a prefix is used.

        Args:
            before, tokens: the prefix that its own tokens follow, and those.
        """
        if not self.shares:
            return
        if prefix not in self._page_of:
            self._page_of[prefix] = page
            self._prefix_of[page], self._before[page] = prefix, before
            self._after.setdefault(before, {})[page] = tuple(tokens)
        if steady and self._page_of[prefix] == page:
            self.steady.add(page)

    def longest(self, before: Prefix, tokens: Sequence[int]) -> tuple[int, int]:
        """The offered page behind a prefix that begins with most of these tokens, and how many they are."""
        found = ((_common(held, tokens), page) for page, held in self._after.get(before, {}).items())
        count, page = max(found, default=(0, -1))
        return page, count

    def steady_tokens(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first on, are in whole `steady` pages."""
        prefix, end = NO_PREFIX, PAGE_TOKENS
        while end <= len(tokens):
            prefix = prefix_after(prefix, tokens[end - PAGE_TOKENS : end])
            if self._page_of.get(prefix) not in self.steady:
                break
            end += PAGE_TOKENS
        return end - PAGE_TOKENS

    def prefixes(self, pages: Sequence[int]) -> list[Prefix]:
        """What those of these pages end that are offered."""
        return [self._prefix_of[page] for page in pages if page in self._prefix_of]

    def forget(self, prefixes: Sequence[Prefix]) -> list[int]:
        """Stops sharing the pages that end these and that no row holds; which they are."""
        pages = [page for page in map(self._page_of.get, prefixes) if page is not None and page in self._idle]
        for page in pages:
            del self._idle[page]
            self._forget(page)
            self._free.append(page)
        return pages

    def forget_prefixes(self) -> None:
        """Stops sharing all present pages with later rows."""
        self._free += self._idle
        self._idle.clear()
        for known in (self._page_of, self._prefix_of, self._after, self._before, self.steady):
            known.clear()

    def release(self, page: int) -> None:
        """Removes one holder."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefix_of:
            self._idle[page] = None
        else:
            self._free.append(page)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(held, tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(held), len(tokens)))


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // PAGE_TOKENS)
