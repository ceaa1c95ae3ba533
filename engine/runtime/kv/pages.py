"""Pages of keys and values, and of states: who holds which, and which beginnings of texts they can be shared by."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import NamedTuple, Protocol

from engine.common.errors import EngineError
from engine.common.footprint import PAGE_TOKENS, pages_for, window_pages

Prefix = bytes
"""Identifies the tokens of a prompt up to the end of a page."""

NO_PREFIX: Prefix = b""

Discard = Callable[[Sequence[int]], None]

_WINDOWS_APART = 4
_FEWEST_APART = 512
"""How far apart, in windows and in tokens, a long text keeps what others need to go on from its midst."""


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
        discard, discard_states, discard_windows: return the memory of pages to the system; they can be written to
            again.
        window: tokens that layers with pages of their own see; 0 if all layers have their tokens in the same pages.
        at_once: most tokens that a row reads at once.
        exact: of a longer context what a token gives depends on which others are computed with it: nobody shares it,
            a prompt is read in one go and an answer token by token.
        again: a longer context is computed again from its beginning, as all of its tokens are rotated differently.
        together: a longer context is computed in steps of its own, as others would be rotated differently beside it.
    """

    root: Prefix = NO_PREFIX
    weight: int = 1
    discard: Discard = _keep
    discard_states: Discard = _keep
    discard_windows: Discard = _keep
    window: int = 0
    at_once: int = 1
    exact: int = sys.maxsize
    again: int = sys.maxsize
    together: int = sys.maxsize

    def most_windows(self, *, reads: bool = True) -> int:
        """Pages of a window, at most, that a row holds while it reads its prompt, or while it is answered."""
        return window_pages(self.window, self.at_once if reads else PAGE_TOKENS)

    def first_window(self, tokens: int) -> int:
        return max(0, tokens - self.window + 1) // PAGE_TOKENS

    @property
    def apart(self) -> int:
        """Tokens, in whole pages, from one place that others can go on from to the next."""
        return pages_for(max(_FEWEST_APART, _WINDOWS_APART * self.window)) * PAGE_TOKENS


class PageSizes(NamedTuple):
    """What pages take of memory.

    Attributes:
        unit: bytes that a pool counts in.
        page, window: units of a page of tokens, and of a window's; 0 if windows have none.
        window_tokens: what layers with pages of their own see.
    """

    unit: int
    page: int = 1
    window: int = 0
    window_tokens: int = 0

    @classmethod
    def of(cls, by_window: Mapping[int, int], slides: bool) -> PageSizes:
        """Those of layers with so many bytes of a page by their window, 0 for those that see all tokens.

        Args:
            slides: whether windows may have pages of their own.
        """
        full, windows = by_window.get(0, 0), max(by_window, default=0)
        if not (slides and full and windows):
            return cls(max(1, sum(by_window.values())))
        rest = sum(by_window.values()) - full
        unit = gcd(full, rest)
        return cls(unit, full // unit, rest // unit, windows)

    @property
    def nbytes(self) -> int:
        return self.unit * (self.page + self.window)


class _Places:
    """Places 0 to `count` - 1 in one kind of memory, each as large as `weight` pages of the pool."""

    def __init__(self, count: int, weight: int) -> None:
        self.count, self.weight = count, weight
        self.free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        self.idle = set[int]()
        """Those that no row holds but that can still be shared."""
        self.touched: dict[int, Discard] = {}
        """Those that have been written to, and so have memory, and what returns that."""

    @property
    def held(self) -> int:
        return self.count - len(self.free) - len(self.idle)

    def discard(self, numbers: Sequence[int]) -> None:
        owners: dict[Discard, list[int]] = {}
        for number in numbers:
            if (owner := self.touched.pop(number, None)) is not None:
                owners.setdefault(owner, []).append(number)
        for owner, own in owners.items():
            owner(own)


class Room(Protocol):
    """Memory of pages, of windows' pages and of states.

    Attributes:
        pages, windows, states: so many of the first have any.
    """

    pages: int
    windows: int
    states: int

    def resize(self, *, pages: int, windows: int, states: int) -> None: ...


class PagePool:
    """Memory of the size of `capacity` pages, for all that rows hold of their tokens.

    A row takes pages that it has reserved.  Complete pages are offered for sharing under the tokens up to their end,
    of prompts and answers alike, and so is the last one of a row that has ended; once no row holds such a page it is
    kept until its place is needed, least recently used first.  That is the prefix cache.

    Layers with a sliding window may have pages of their own, which a row gives up once its window has passed them.  To
    go on behind a prefix takes all of its pages, and of the windows' those that the next token sees.

    Where layers sum up what they read, a row has two pages of another kind: the state behind its tokens, and the one
    that the next step writes, so that a step may be given up.  States are never shared; the prefix cache has some of
    its own, and whoever goes on from pages copies the one behind them.

    Args:
        state_weight: pages whose memory a state takes; 0 without any.
        sizes: of a page, and of a window's.
    """

    def __init__(
        self,
        capacity: int,
        state_weight: int = 0,
        sizes: PageSizes = PageSizes(1),  # noqa: B008 - it cannot be changed
    ) -> None:
        page_weight, window_weight = sizes.page, sizes.window
        self.capacity, self.state_weight = capacity, state_weight
        self.page_weight, self.window_weight = page_weight, window_weight
        self.room: Room | None = None
        """What gives memory to the first of each kind, where it does not come by itself."""
        self.beside = 2 * state_weight
        """What a row takes beside its pages."""
        self._pages = _Places(capacity // page_weight, page_weight)
        # Not only as many as pages: what is on its way to disk holds a window's alone.
        self._windows = _Places(capacity // window_weight if window_weight else 0, window_weight)
        self._states = _Places(capacity // state_weight if state_weight else 0, state_weight)
        self._kinds = (self._states, self._windows, self._pages)
        self._state_of: dict[Prefix, int] = {}
        self._behind: dict[int, tuple[Prefix, Prefix]] = {}
        """Of an offered state, the prefix of whole pages that it is behind, and that of all of its tokens."""
        self._states_after: dict[Prefix, dict[int, tuple[int, ...]]] = {}
        """Offered states by the former, with the tokens since then."""
        self._window_of: dict[Prefix, int] = {}
        self._prefix_of_window: dict[int, Prefix] = {}
        self._windows_held = 0
        """Windows' pages by rows: two that share one have room for two, as either may be the first to need another."""
        self._reserved = 0
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self._after: dict[Prefix, dict[int, tuple[int, ...]]] = {}
        """Offered pages by the prefix before them, with their own tokens."""
        self._before: dict[int, Prefix] = {}
        self.steady: set[int] = set()
        """Offered pages whose tokens, and all before them, were computed in whole chunks from the first one on: those
        of an answer that has to be repeated bit by bit may be shared."""
        self._idle: OrderedDict[tuple[_Places, int], None] = OrderedDict()
        """What no row holds but can still be shared, the least recently used first."""

    @property
    def pages(self) -> int:
        return self._pages.count

    @property
    def windows(self) -> int:
        return self._windows.count

    @property
    def states(self) -> int:
        return self._states.count

    @property
    def held(self) -> int:
        return self._pages.held

    @property
    def held_windows(self) -> int:
        return self._windows.held

    @property
    def held_states(self) -> int:
        return self._states.held

    @property
    def in_use(self) -> int:
        """What is held or promised, in pages."""
        held = self.held * self.page_weight + self.held_states * self.state_weight
        return held + self._windows_held * self.window_weight + self._reserved

    @property
    def filled(self) -> int:
        """Memory that holds something of use, in pages."""
        return sum((kind.count - len(kind.free)) * kind.weight for kind in self._kinds)

    @property
    def spare(self) -> int:
        """Memory that was written to and that no row holds, in pages."""
        return sum((len(kind.touched) - kind.held) * kind.weight for kind in self._kinds)

    def needs(self, tokens: int, kind: PageKind = PageKind(), *, reads: bool = True) -> int:  # noqa: B008
        """Memory that a row of so many tokens takes, in pages, while it reads its prompt or is answered."""
        pages = pages_for(tokens)
        windows = min(pages, kind.most_windows(reads=reads)) if kind.window else 0
        return (pages * self.page_weight + windows * self.window_weight) * kind.weight + self.beside

    def most_tokens(self, kind: PageKind) -> int:
        """How long a row may be that has all of it."""
        room = (self.capacity - self.beside) // kind.weight
        windows = kind.most_windows() if kind.window else 0
        if room < windows * (self.page_weight + self.window_weight):
            return room // (self.page_weight + self.window_weight) * PAGE_TOKENS
        return (room - windows * self.window_weight) // self.page_weight * PAGE_TOKENS

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
        """Takes a page out of a reservation.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: a device has none for it.
        """
        return self._take(self._pages, kind.discard)

    def take_window(self, kind: PageKind) -> int:
        page = self._take(self._windows, kind.discard_windows)
        self._windows_held += 1
        return page

    def fit(self, *, if_many: bool = False, forgets: bool = False) -> bool:
        """Gives up the memory of the last of each kind that hold nothing of use, or only if these are half of all;
        whether there was any.

        Args:
            forgets: the prefix cache goes first.
        """
        if self.room is None:
            return False
        least = self._least(self.room, if_many=if_many, forgets=forgets)
        if least == self._there(self.room):
            return False
        try:
            self._resize(self.room, least)
        except EngineError:  # to be moved they need some first
            return False
        return True

    def _least(self, room: Room, *, if_many: bool, forgets: bool = False) -> dict[_Places, int]:
        """See `fit`: how many of each are to have memory."""
        idle = 0 if forgets else sum(len(kind.idle) * kind.weight for kind in self._kinds)
        self.give_back(self.spare - idle)  # what holds nothing goes first
        there = self._there(room)
        used = {kind: max(kind.touched, default=-1) + 1 for kind in self._kinds}
        return {
            kind: count if count < there[kind] and (2 * count < there[kind] or not if_many) else there[kind]
            for kind, count in used.items()
        }

    def _there(self, room: Room) -> dict[_Places, int]:
        return {self._states: room.states, self._windows: room.windows, self._pages: room.pages}

    def _resize(self, room: Room, counts: Mapping[_Places, int]) -> None:
        room.resize(pages=counts[self._pages], windows=counts[self._windows], states=counts[self._states])

    def take_state(self, kind: PageKind) -> int:
        return self._take(self._states, kind.discard_states)

    def _take(self, places: _Places, discard: Discard) -> int:
        assert self._reserved >= places.weight
        while not places.free or self.filled + places.weight > self.capacity:
            evicted, number = self._oldest_idle()
            evicted.free.append(number)
            if evicted is not places:
                evicted.discard([number])
        if self.room is not None:
            self._make_room(self.room, places)
        self._reserved -= places.weight
        number = places.free.pop()
        places.holders[number] = 1
        if places.touched.get(number, discard) != discard:
            places.discard([number])
        places.touched[number] = discard
        return number

    def _make_room(self, room: Room, places: _Places) -> None:
        """Has the next free one of these places have memory."""
        there = self._there(room)
        if places.free[-1] >= there[places]:
            places.free.sort(reverse=True)  # others before it may have memory, given up by the prefix cache
        if (wanted := places.free[-1] + 1) <= there[places]:
            return
        # Windows' pages that hold nothing make room before experts do.
        windows = {self._windows: self._least(room, if_many=True)[self._windows]}
        try:
            self._resize(room, {**there, **windows, places: wanted})
        except EngineError:
            if not places.idle:
                raise
            evicted = None
            while evicted is not places:
                evicted, number = self._oldest_idle()
                evicted.free.append(number)
                evicted.discard([number])

    def _hold(self, places: _Places, number: int) -> bool:
        """One more holder; whether there was none."""
        places.holders[number] += 1
        if number not in places.idle:
            return False
        places.idle.remove(number)
        del self._idle[places, number]
        return True

    def _release(self, places: _Places, number: int, *, is_offered: bool) -> None:
        places.holders[number] -= 1
        if places.holders[number]:
            return
        if is_offered:
            places.idle.add(number)
            self._idle[places, number] = None
        else:
            places.free.append(number)

    # --- states -----------------------------------------------------------------------------------------

    def hold_state(self, state: int) -> bool:
        """One more holder of a state that is held or offered: nobody writes to it then.  False if there is no room for
        one that was only offered."""
        if state in self._states.idle and not self.reserve(self.state_weight):
            return False
        if self._hold(self._states, state):
            self._reserved -= self.state_weight
        return True

    def release_state(self, state: int) -> None:
        self._release(self._states, state, is_offered=state in self._behind)

    def offer_state(self, state: int, before: Prefix, tokens: Sequence[int]) -> bool:
        """Offers a state, which nobody writes to any more; false if there is one behind the same tokens.

        Args:
            before, tokens: the prefix of whole pages that these tokens follow.
        """
        prefix = prefix_after(before, tokens) if tokens else before
        if prefix in self._state_of:
            return False
        self._state_of[prefix], self._behind[state] = state, (before, prefix)
        self._states_after.setdefault(before, {})[state] = tuple(tokens)
        return True

    def state_of(self, prefix: Prefix) -> int | None:
        return self._state_of.get(prefix)

    def find_state(self, root: Prefix, tokens: Sequence[int]) -> tuple[int, int]:
        """The offered state behind most of these tokens of which all pages are there, and how many they are."""
        state, count, prefix, end = -1, 0, root, 0
        while True:
            for each, own in self._states_after.get(prefix, {}).items():
                behind = end + len(own)
                if behind > count and tuple(tokens[end:behind]) == own and self.longest(prefix, own)[1] == len(own):
                    state, count = each, behind
            whole = tokens[end : end + PAGE_TOKENS]
            prefix = prefix_after(prefix, whole)
            if len(whole) < PAGE_TOKENS or prefix not in self._page_of:
                return state, count
            end += PAGE_TOKENS

    def discard_free_states(self) -> None:
        """Returns the memory of those that nobody holds or can go on from."""
        self._states.discard(self._states.free)

    # --- windows ----------------------------------------------------------------------------------------

    def offer_window(self, page: int, prefix: Prefix) -> None:
        """Offers a window's page for sharing as the end of this prefix, as `publish` does."""
        if prefix not in self._window_of and page not in self._prefix_of_window:
            self._window_of[prefix], self._prefix_of_window[page] = page, prefix

    def window_of(self, prefix: Prefix) -> int | None:
        """The window's page that is offered as the end of a prefix; `None` if there is none."""
        return self._window_of.get(prefix)

    def hold_window(self, page: int, *, is_reserved: bool = True) -> None:
        """One more row holds a window's page, which is held or offered.

        Args:
            is_reserved: whether it gives up a reservation for that; else another one is about to let go of the page.
        """
        self._hold(self._windows, page)
        self._windows_held += 1
        self._reserved -= self.window_weight if is_reserved else 0

    def fork_window(self, page: int) -> None:
        """One more sequence of a row that holds a window's page goes on from it."""
        self._windows.holders[page] += 1

    def is_window_forked(self, page: int) -> bool:
        return self._windows.holders[page] > 1

    def release_window(self, page: int, *, is_fork: bool = False, is_of_use: bool = True) -> None:
        """Removes one holder.

        Args:
            is_of_use: whether others may want to go on from where it is seen.
        """
        if not is_fork:
            self._windows_held -= 1
        if not is_of_use and self._windows.holders[page] == 1:
            self._forget_window(page)
        self._release(self._windows, page, is_offered=page in self._prefix_of_window)

    def _forget_window(self, page: int) -> None:
        prefix = self._prefix_of_window.pop(page, None)
        if prefix is not None:
            del self._window_of[prefix]

    # --- what nobody holds ------------------------------------------------------------------------------

    def discard(self, pages: Sequence[int]) -> None:
        self._pages.discard(pages)

    def leave(self, kind: PageKind) -> None:
        """The memory of this kind is gone."""
        discards = (kind.discard_states, kind.discard_windows, kind.discard)
        for places, discard in zip(self._kinds, discards, strict=True):
            for number in [number for number, owner in places.touched.items() if owner == discard]:
                del places.touched[number]
                if number in places.idle:
                    self._let_go(places, number)

    def give_back(self, most: int) -> list[int]:
        """Returns the memory of up to so many pages, or of states and windows in their place, that no row holds; which
        of them are pages."""
        gone: dict[_Places, list[int]] = {}
        for places in self._kinds:
            free = [number for number in places.free if number in places.touched]
            gone[places] = free[: most // places.weight] if free else []
            most -= len(gone[places]) * places.weight
        while most > 0 and self._idle:
            places, number = self._oldest_idle()
            gone[places].append(number)
            places.free.insert(0, number)
            most -= places.weight
        for places, numbers in gone.items():
            places.discard(numbers)
        return gone[self._pages]

    def _oldest_idle(self) -> tuple[_Places, int]:
        (places, number), _ = self._idle.popitem(last=False)
        self._forget(places, number)
        return places, number

    def _let_go(self, places: _Places, number: int) -> None:
        """Stops offering what nobody holds."""
        del self._idle[places, number]
        self._forget(places, number)
        places.free.append(number)

    def _forget(self, places: _Places, number: int) -> None:
        places.idle.discard(number)
        if places is self._windows:
            self._forget_window(number)
        elif places is self._states:
            before, prefix = self._behind.pop(number)
            del self._state_of[prefix]
            del self._states_after[before][number]
            if not self._states_after[before]:
                del self._states_after[before]
        else:
            prefix = self._prefix_of.pop(number)
            if self._page_of.get(prefix) == number:
                del self._page_of[prefix]
            siblings = self._after[before := self._before.pop(number)]
            del siblings[number]
            if not siblings:
                del self._after[before]
            self.steady.discard(number)

    # --- pages of tokens --------------------------------------------------------------------------------

    def share(self, prefix: Prefix) -> int | None:
        """The page that ends this prefix, with one more holder; `None` if there is none."""
        page = self._page_of.get(prefix)
        if page is not None and self._hold(self._pages, page):
            # Reservations count an idle page as free, so the row that shares it gives up one of its own.
            self._reserved -= self.page_weight
        return page

    def fork(self, page: int) -> None:
        """One more holder of a page that is held: who writes to it next takes a page of its own instead."""
        assert self._pages.holders[page] > 0
        self._pages.holders[page] += 1

    def is_forked(self, page: int) -> bool:
        return self._pages.holders[page] > 1

    def is_idle(self, prefix: Prefix) -> bool:
        return self._page_of.get(prefix) in self._pages.idle

    def has(self, prefix: Prefix) -> bool:
        return prefix in self._page_of

    @property
    def idle(self) -> int:
        """Pages that no row holds but that can still be shared."""
        return len(self._pages.idle)

    def publish(
        self, page: int, prefix: Prefix, before: Prefix = NO_PREFIX, tokens: Sequence[int] = (), *, steady: bool = False
    ) -> None:
        """Offers a page for sharing as the end of this prefix; the first page offered for a prefix is used.

        Args:
            before, tokens: the prefix that its own tokens follow, and those.
        """
        if prefix not in self._page_of:
            self._page_of[prefix] = page
            self._prefix_of[page], self._before[page] = prefix, before
            self._after.setdefault(before, {})[page] = tuple(tokens)
        if steady and self._page_of[prefix] == page:
            self.steady.add(page)

    def longest(self, before: Prefix, tokens: Sequence[int], *, has_window: bool = False) -> tuple[int, int]:
        """The offered page behind a prefix that begins with most of these tokens, and how many they are.

        Args:
            has_window: whether the window's page has to be there, too.
        """
        found = (
            (_common(held, tokens), page)
            for page, held in self._after.get(before, {}).items()
            if not has_window or self._prefix_of[page] in self._window_of
        )
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
        """Stops sharing what ends these and no row holds, and returns the memory of it; which of it are pages."""
        pages = list[int]()
        for prefix in prefixes:
            found = (self._state_of.get(prefix), self._window_of.get(prefix), self._page_of.get(prefix))
            for places, number in zip(self._kinds, found, strict=True):
                if number is not None and number in places.idle:
                    self._let_go(places, number)
                    places.discard([number])
                    pages += [number] if places is self._pages else []
        return pages

    def forget_prefixes(self) -> None:
        """Stops sharing all present pages with later rows."""
        for places in self._kinds:
            places.free += places.idle
            places.idle.clear()
        self._idle.clear()
        for known in (self._page_of, self._prefix_of, self._after, self._before, self.steady):
            known.clear()
        for of_others in (self._state_of, self._behind, self._states_after, self._window_of, self._prefix_of_window):
            of_others.clear()

    def release(self, page: int) -> None:
        self._release(self._pages, page, is_offered=page in self._prefix_of)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(held, tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(held), len(tokens)))
