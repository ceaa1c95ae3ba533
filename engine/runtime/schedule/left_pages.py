"""What rows leave for others: where prompts that begin alike part, and pages that later answers find or disk keeps."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.pages import PageKind, PagePool, Prefix
from engine.runtime.prefix_cache.blocks import BLOCK_TOKENS, BlockLayout, PagedState, from_pages
from engine.runtime.prefix_cache.store import PrefixCache, WindowBlocks
from engine.runtime.schedule.row import PagedRow


@dataclass(eq=False)
class _Offer:
    """Pages and states that are held until they are on disk."""

    pages: list[int]
    states: list[int]
    windows: list[int]


class LeftPages:
    """Of one batch's rows.

    Args:
        kind: how they use the pool.
        kept: what writes to disk, if anything does.
        on_device: whether pages are in a card's memory, which experts want.
    """

    def __init__(self, pool: PagePool, kind: PageKind, kept: PrefixCache | None, *, on_device: bool) -> None:
        self._pool, self._kind, self._kept, self._on_device = pool, kind, kept, on_device
        self._offers: list[_Offer] = []
        self._left_by: dict[str, list[Prefix]] = {}
        """What lies in the pages that a chat's last answer left."""
        self.tokens = 0
        """What the last row that ended had read, if its pages are still there."""

    def leave(self, row: PagedRow, model: PackedModel) -> None:
        """What an answer has read stays in its pages; a chat's is written to disk from there."""
        row.leave_part()
        self.tokens = row.held if row.shares else 0
        kept, caches = self._kept, model.caches
        if kept is not None and kept.is_there(row.request.chat):
            self._left_by[row.request.chat] = self._pool.prefixes(row.pages.tolist())
            if isinstance(caches, PagedCaches) and kept.keeps(row.request.chat):
                self._offer(kept, row, caches)
        # As much as is kept of other models, or what this one has left.
        most = max(
            self._pool.needs(row.held, self._kind),
            kept.ram_budget // model.page_bytes if kept is not None else 0,
        )
        if self._on_device:  # room for a context is nobody else's
            most = max(most, self._pool.needs(model.context_tokens, self._kind))
        if (too_many := self._pool.spare - most) > 0:
            self._pool.give_back(too_many)
        self._pool.fit(if_many=True)

    def _offer(self, kept: PrefixCache, row: PagedRow, caches: PagedCaches) -> None:
        pool, table, (windows, others) = self._pool, row.pages.clone(), row.windows_to_keep()
        pages, layout, chat = table.tolist(), BlockLayout.of(caches.in_full), row.request.chat
        for page in pages:
            pool.fork(page)
        for page in windows.values():
            pool.hold_window(page, is_reserved=False)  # the row lets go of it now
        for place, page in others.items():
            if pool.reserve(pool.window_weight):
                pool.hold_window(page)
                windows[place] = page
        states = [(tokens, state) for tokens, state in row.states if pool.hold_state(state)]
        offer = _Offer(pages, [state for _tokens, state in states], [*windows.values()])
        self._offers.append(offer)
        copy = from_pages(caches.in_full, pages, layout)
        if caches.have_states:
            held = [PagedState(caches, table, tokens, state) for tokens, state in states]
            kept.offer_states(offer, row.read, layout, copy, held, chat)
            return
        blocks: WindowBlocks | None = None
        if caches.slides:
            own, each = BlockLayout.of(caches.in_windows), BLOCK_TOKENS // PAGE_TOKENS
            whole = range(row.held // BLOCK_TOKENS)
            there = [index for index in whole if all(index * each + number in windows for number in range(each))]
            blocks = WindowBlocks(own, from_pages(caches.in_windows, windows, own), there)
        kept.offer(offer, row.read, layout, copy, chat, blocks)

    def drop_written(self) -> None:
        """Lets go of pages that were held for the disk, once that has them, and forgets those of deleted chats."""
        kept = self._kept
        if kept is None:
            return
        for offer in [each for each in self._offers if kept.is_written(each)]:
            kept.forget(offer)
            self._drop(offer)
        for chat in [each for each in self._left_by if not kept.is_there(each)]:
            self._pool.forget(self._left_by.pop(chat))

    def give_up(self) -> bool:
        """Copies what the disk is to have of pages that are needed now; whether there was any."""
        offers = list(self._offers)
        for offer in offers:
            if self._kept is not None:
                self._kept.withdraw(offer)
            self._drop(offer)
        return bool(offers)

    def _drop(self, offer: _Offer) -> None:
        self._offers.remove(offer)
        for page in offer.pages:
            self._pool.release(page)
        for page in offer.windows:
            self._pool.release_window(page)
        for state in offer.states:
            self._pool.release_state(state)


_FEWEST = 32
"""Tokens that it is worth to leave a copy for."""
_MOST = 64
"""Prompts whose beginnings are compared with a new one."""


class Partings:
    """Where rows whose prompts begin alike part: the first of them leaves there what the others go on from.

    They are taken to part where a page ends.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Prompts that were begun lately."""
        self._stops: WeakKeyDictionary[PagedRow, int] = WeakKeyDictionary()
        """Where rows leave copies on their way."""

    def forget(self) -> None:
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
        return tokens // PAGE_TOKENS * PAGE_TOKENS if tokens >= _FEWEST else 0

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
