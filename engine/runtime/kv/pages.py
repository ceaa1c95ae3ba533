"""Pages of keys and values, and of states: who holds which, and which beginnings of texts they can be shared by."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.common.errors import EngineError
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
        discard, discard_states: return the memory of pages to the system; they can be written to again.
    """

    root: Prefix = NO_PREFIX
    weight: int = 1
    discard: Discard = _keep
    discard_states: Discard = _keep


class Room(Protocol):
    """Memory of pages and states.

    Attributes:
        pages, states: so many of the first have any.
    """

    pages: int
    states: int

    def resize(self, pages: int, states: int) -> None: ...


class PagePool:
    """Pages 0 to `capacity` - 1.

    A row takes pages that it has reserved.  Complete pages are offered for sharing under the tokens up to their end,
    of prompts and answers alike, and so is the last one of a row that has ended; once no row holds such a page it is
    kept until its place is needed, least recently used first.  That is the prefix cache.

    Where layers sum up what they read, a row has two pages of another kind: the state behind its tokens, and the one
    that the next step writes, so that a step may be given up.  States are never shared; the prefix cache has some of
    its own, and whoever goes on from pages copies the one behind them.

    Args:
        beside: how many pages' memory a row takes for what it has beside its pages, without which nobody can go on from
            these: they are not shared; `None` if pages are all that it has.
        state_weight: pages whose memory a state takes; 0 without any.
        room: what gives memory to the first pages and states, where it does not come by itself.
    """

    def __init__(
        self, capacity: int, beside: int | None = None, state_weight: int = 0, room: Room | None = None
    ) -> None:
        self.capacity, self.state_weight, self._room = capacity, state_weight, room
        self.beside, self.shares = beside or 2 * state_weight, beside is None
        self.states = capacity // state_weight if state_weight else 0
        """How many states there can be."""
        self._free_states = list(range(self.states - 1, -1, -1))
        self._state_holders = [0] * self.states
        self._state_of: dict[Prefix, int] = {}
        self._behind: dict[int, tuple[Prefix, Prefix]] = {}
        """Of an offered state, the prefix of whole pages that it is behind, and that of all of its tokens."""
        self._states_after: dict[Prefix, dict[int, tuple[int, ...]]] = {}
        """Offered states by the former, with the tokens since then."""
        self._idle_states = set[int]()
        self.touched_states: dict[int, Discard] = {}
        """As `touched`."""
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
        """Pages that no row holds but that can still be shared; a state is -1 less its number."""
        self.elsewhere: Callable[[], int] = int
        """Pages whose memory is in use as a cache of a sequence's own."""
        self.touched: dict[int, Discard] = {}
        """Pages that have been written to, and so have memory, and what returns that."""

    @property
    def held(self) -> int:
        """Pages that rows hold now, states not counted."""
        return self.capacity - len(self._free) - self.idle

    @property
    def held_states(self) -> int:
        """States that rows hold now."""
        return self.states - len(self._free_states) - len(self._idle_states)

    @property
    def in_use(self) -> int:
        """Pages that are held or promised, and those whose memory is a cache of a sequence's own."""
        return self.held + self.held_states * self.state_weight + self._reserved + self.elsewhere()

    @property
    def filled(self) -> int:
        """Pages whose memory holds something of use."""
        return self.capacity - len(self._free) + (self.states - len(self._free_states)) * self.state_weight

    @property
    def has_memory(self) -> int:
        """Pages that have any."""
        return len(self.touched) + len(self.touched_states) * self.state_weight

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
        """Takes a page out of a reservation.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`: a device has none for it.
        """
        assert self._reserved > 0
        page = self._free_page()
        self._reserved -= 1
        self._holders[page] = 1
        if self.touched.get(page, kind.discard) != kind.discard:
            self.discard([page])
        self.touched[page] = kind.discard
        return page

    def _free_page(self) -> int:
        while not self._free or (self.states and self.filled >= self.capacity):
            page = self._oldest_idle()
            if page >= 0:
                return page
            self._free_states.append(-1 - page)
            _discard(self.touched_states, [-1 - page])
        room = self._room
        if room is not None and (wanted := self._free[-1] + 1) > room.pages:
            try:
                room.resize(wanted, room.states)
            except EngineError:
                if not self.idle:
                    raise
                while (page := self._oldest_idle()) < 0:
                    self._free_states.append(-1 - page)
                return page
        return self._free.pop()

    def fit(self, *, spare: int = 0) -> bool:
        """Gives up the memory of the last pages and states that hold nothing, if these are more than `spare`; whether
        there was any."""
        if self._room is None:
            return False
        pages, states = (max(held, default=-1) + 1 for held in (self.touched, self.touched_states))
        if pages + spare >= self._room.pages and states >= self._room.states:
            return False
        self._room.resize(pages, states)
        return True

    def take_state(self, kind: PageKind) -> int:
        """Takes a state out of a reservation of its weight."""
        assert self._reserved >= self.state_weight
        pages = list[int]()
        while not self._free_states or self.filled + self.state_weight > self.capacity:
            page = self._oldest_idle()
            if page >= 0:
                pages.append(page)
                self._free.append(page)
            else:
                self._free_states.append(-1 - page)
        self.discard(pages)
        if self._room is not None and (wanted := self._free_states[-1] + 1) > self._room.states:
            self._room.resize(self._room.pages, wanted)
        self._reserved -= self.state_weight
        state = self._free_states.pop()
        self._state_holders[state] = 1
        if self.touched_states.get(state, kind.discard_states) != kind.discard_states:
            _discard(self.touched_states, [state])
        self.touched_states[state] = kind.discard_states
        return state

    def hold_state(self, state: int) -> None:
        """One more holder of a state that is held or offered: nobody writes to it then."""
        if not self._state_holders[state]:
            self._idle_states.remove(state)
            del self._idle[-1 - state]
        self._state_holders[state] += 1

    def release_state(self, state: int) -> None:
        """Removes one holder."""
        self._state_holders[state] -= 1
        if self._state_holders[state]:
            return
        if state in self._behind:
            self._idle_states.add(state)
            self._idle[-1 - state] = None
        else:
            self._free_states.append(state)

    def offer_state(self, state: int, before: Prefix, tokens: Sequence[int]) -> bool:
        """Offers a state, which nobody writes to any more; false if there is one behind the same tokens.

        Args:
            before, tokens: the prefix of whole pages that these tokens follow.
        """
        prefix = prefix_after(before, tokens) if tokens else before
        if not self.shares or prefix in self._state_of:
            return False
        self._state_of[prefix], self._behind[state] = state, (before, prefix)
        self._states_after.setdefault(before, {})[state] = tuple(tokens)
        return True

    def state_of(self, prefix: Prefix) -> int | None:
        """The state that is offered behind a prefix; `None` if there is none."""
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

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of pages that nobody can share any more."""
        _discard(self.touched, pages)

    def leave(self, kind: PageKind) -> None:
        """The memory of this kind is gone."""
        for page in [page for page, owner in self.touched.items() if owner == kind.discard]:
            del self.touched[page]
            if page in self._idle:
                self._let_go(page)
        for state in [state for state, owner in self.touched_states.items() if owner == kind.discard_states]:
            del self.touched_states[state]
            if state in self._idle_states:
                self._let_go(-1 - state)

    def give_back(self, most: int) -> list[int]:
        """Up to so many pages with memory that no row holds, and states in place of some of them: they have none from
        now on."""
        states = [state for state in self._free_states if state in self.touched_states]
        states = states[: most // self.state_weight] if states else []
        most -= len(states) * self.state_weight
        pages = [page for page in self._free if page in self.touched][:most]
        while len(pages) < most and self._idle:
            page = self._oldest_idle()
            if page >= 0:
                pages.append(page)
                self._free.insert(0, page)
            else:
                states.append(-1 - page)
                self._free_states.insert(0, -1 - page)
                most -= self.state_weight
        self.discard(pages)
        _discard(self.touched_states, states)
        return pages

    def _oldest_idle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        return page

    def _let_go(self, page: int) -> None:
        """Stops offering what nobody holds."""
        del self._idle[page]
        self._forget(page)
        (self._free if page >= 0 else self._free_states).append(page if page >= 0 else -1 - page)

    def _forget(self, page: int) -> None:
        if page < 0:
            state = -1 - page
            before, prefix = self._behind.pop(state)
            del self._state_of[prefix]
            self._idle_states.discard(state)
            del self._states_after[before][state]
            if not self._states_after[before]:
                del self._states_after[before]
            return
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
        """Pages that no row holds but that can still be shared, states not counted."""
        return len(self._idle) - len(self._idle_states)

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
        states = [state for state in map(self._state_of.get, prefixes) if state in self._idle_states]
        for page in [*pages, *(-1 - state for state in states if state is not None)]:
            self._let_go(page)
        _discard(self.touched_states, [state for state in states if state is not None])
        return pages

    def forget_prefixes(self) -> None:
        """Stops sharing all present pages with later rows."""
        self._free += [page for page in self._idle if page >= 0]
        self._free_states += self._idle_states
        self._idle.clear()
        for known in (self._page_of, self._prefix_of, self._after, self._before, self.steady):
            known.clear()
        for of_states in (self._state_of, self._behind, self._states_after, self._idle_states):
            of_states.clear()

    def release(self, page: int) -> None:
        """Removes one holder."""
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._prefix_of:
            self._idle[page] = None
        else:
            self._free.append(page)


def _discard(touched: dict[int, Discard], pages: Sequence[int]) -> None:
    owners: dict[Discard, list[int]] = {}
    for page in pages:
        if (owner := touched.pop(page, None)) is not None:
            owners.setdefault(owner, []).append(page)
    for owner, own in owners.items():
        owner(own)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(held, tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(held), len(tokens)))


def pages_for(tokens: int) -> int:
    """Pages that `tokens` tokens need."""
    return -(-tokens // PAGE_TOKENS)
