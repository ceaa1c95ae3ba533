"""A row under way: its prompt, its pages, and its answer so far."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch

from engine.common.chat import FinishReason
from engine.common.errors import EngineError
from engine.kernels.native.paged_attention import PAGE_TOKENS, Piece
from engine.runtime.batch.request import BatchAnswer, BatchRequest
from engine.runtime.decode.sequence import AnswerSequence

Prefix = bytes
"""Stands for the tokens of a prompt up to the end of a page."""

NO_PREFIX: Prefix = b""


def prefix_after(before: Prefix, tokens: Sequence[int]) -> Prefix:
    """The prefix that a page of tokens makes of the one before it."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Pages 0 to `capacity` - 1.

    A row reserves all pages that it may come to need before it begins, so that no row that has begun ever waits or
    loses a page.  Pages that hold the beginning of a prompt are shared; when no row holds one any more it is kept as
    long as its place is not needed, the one unused for the longest going first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._holders = [0] * capacity
        self._reserved = 0
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages that no row holds but that may be shared again."""

    @property
    def held(self) -> int:
        """Pages that rows hold now."""
        return self.capacity - len(self._free) - len(self._idle)

    def reserve(self, pages: int) -> bool:
        """Reserves pages; false if there are not enough."""
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
            # It leaves what others have reserved, so the row that shares it gives up one of its own reservations.
            del self._idle[page]
            self._reserved -= 1
        self._holders[page] += 1
        return page

    def is_idle(self, prefix: Prefix) -> bool:
        """Whether this prefix has a page that no row holds."""
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


class PagedRow:
    """A row whose keys and values lie in pages.

    It has reserved the pages of its prompt and of the longest answer; it takes them as tokens come.

    Args:
        prompt: its tokens, one at least.
    """

    def __init__(
        self, request: BatchRequest, prompt: list[int], sequence: AnswerSequence, most_tokens: int, pool: PagePool
    ) -> None:
        self.request, self.prompt, self.sequence = request, prompt, sequence
        self._pool = pool
        # The last token of an answer is never fed.
        self._table = torch.zeros(pages_for(len(prompt) + most_tokens), dtype=torch.int32)
        self._pages: list[int] = []
        self.held = 0
        self.shared = 0
        self._prefix = NO_PREFIX
        self.following: bytes | None = None
        """The prefix that the next page will end with, if the prompt fills that page and goes on behind it."""
        self._following_end = 0
        self._look_ahead()

    @staticmethod
    def pages_needed(prompt_tokens: int, most_tokens: int) -> int:
        """Pages to reserve for it."""
        return pages_for(prompt_tokens + most_tokens)

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is not read to the end."""
        return self.held < len(self.prompt)

    def share_pages(self) -> None:
        """Takes over the pages of others whose prompts begin alike, as far as there are any."""
        while self.following is not None and self.held == len(self._pages) * PAGE_TOKENS:
            was_idle = self._pool.is_idle(self.following)
            page = self._pool.share(self.following)
            if page is None:
                return
            if not was_idle:
                self._pool.give_back_reservation(1)
            self._add(page)
            self.held += PAGE_TOKENS
            self.shared += PAGE_TOKENS
            self._prefix = self.following
            self._look_ahead()

    def piece(self, tokens: int) -> Piece:
        """Its next tokens, with pages for them."""
        while len(self._pages) < pages_for(self.held + tokens):
            self._add(self._pool.take())
        return Piece(self._table, self.held, tokens)

    def next_ids(self, tokens: int) -> list[int]:
        """The tokens of that piece."""
        return self.prompt[self.held : self.held + tokens] if self.is_reading else self.sequence.ids[-1:]

    def has_read(self, tokens: int) -> None:
        """The tokens of that piece are in their pages; whole pages of the prompt are there for others."""
        self.held += tokens
        while self.following is not None and self.held >= self._following_end:
            self._pool.publish(self._pages[self._following_end // PAGE_TOKENS - 1], self.following)
            self._prefix = self.following
            self._look_ahead()

    def answer(self, reason: FinishReason | Literal["failed"], error: EngineError | None = None) -> BatchAnswer:
        """What came of it."""
        ids = self.sequence.ids
        return BatchAnswer(
            self.request.row, self.sequence.text, reason, len(self.prompt), len(ids), tuple(ids), self.shared, error
        )

    def close(self) -> None:
        """Gives its pages back."""
        self._pool.give_back_reservation(len(self._table) - len(self._pages))
        for page in self._pages:
            self._pool.release(page)
        self._pages = []
        self._table = self._table[:0]

    def _add(self, page: int) -> None:
        self._table[len(self._pages)] = page
        self._pages.append(page)

    def _look_ahead(self) -> None:
        begin = self.held // PAGE_TOKENS * PAGE_TOKENS if self.following is None else self._following_end
        end = begin + PAGE_TOKENS
        # The prompt's last token is always computed: its logits are wanted.
        self.following = prefix_after(self._prefix, self.prompt[begin:end]) if end < len(self.prompt) else None
        self._following_end = end
