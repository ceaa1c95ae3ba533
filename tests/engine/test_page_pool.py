"""Pages of rows in any order of their lives: none is lost, taken twice, or written to while others hold it.

Nor is a page of a window, wherever one has passed: each token finds what it sees.  Nor is a state, where layers sum up
what they read: each row goes on from that of its own tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.common.errors import EngineError, ErrorCode
from engine.common.footprint import PAGE_TOKENS, pages_for
from engine.devices.cpu import open_cpu
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.native.paged_attention import (
    CompressedPages,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
    StatePages,
)
from engine.runtime.batch.pipeline.paged import PlacedRows
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.pages import Discard, PageKind, PagePool, PageSizes
from engine.runtime.kv.tabled import RowPlaces
from engine.runtime.load.devices import ModelDevices, PageRoom
from engine.runtime.prefix_cache.blocks import PagedState
from engine.runtime.schedule.row import PagedRow
from tests.refusals import refused

_BEGINNINGS = [[1] * length for length in (1, PAGE_TOKENS, 2 * PAGE_TOKENS + 3)]
"""All alike, so that rows share pages."""
_AT_ONCE = 3 * PAGE_TOKENS
_SIZES = [PageSizes(1), PageSizes(1), *(PageSizes(1, 1 + window % 2, window % 4, window) for window in (1, 17, 31, 70))]


class _Room:
    """Memory of a card.

    Args:
        holder: of what pages and states hold, if anybody asks.
    """

    def __init__(self, holder: Any = None) -> None:
        self.pages = self.windows = self.states = 0
        self._holder = holder

    def resize(self, *, pages: int, windows: int, states: int) -> None:
        self.pages, self.windows, self.states = pages, windows, states
        if self._holder is not None:
            holder = self._holder
            for held, most in ((holder.held, pages), (holder.in_windows, windows), (holder.states, states)):
                for number in [number for number in held if number >= most]:
                    del held[number]


@dataclass(eq=False)
class _Row:
    """A row, and what its model would have written."""

    row: PagedRow
    ids: list[int]
    kind: int
    waits: bool = False
    """Whether it has no pages reserved, and must not take any."""


def _sequence(prompt: list[int], ids: list[int], most: int) -> Any:
    request = SimpleNamespace(row=0, chat="", on_reused=None, repeats=False)
    return SimpleNamespace(request=request, prompt=prompt, layout=None, ids=ids, max_tokens=most)


class PagesInAnyOrder(RuleBasedStateMachine):
    """Rows that begin, share, read, answer, step aside, take over and end, over one pool."""

    @initialize(
        capacity=st.integers(1, 20),
        state_weight=st.integers(0, 3),
        sizes=st.sampled_from(_SIZES),
        on_card=st.booleans(),
    )
    def start(self, capacity: int, state_weight: int, sizes: PageSizes, *, on_card: bool) -> None:
        if sizes.window:
            state_weight = 0
        self.pool = PagePool(capacity * (sizes.page + sizes.window), state_weight, sizes)
        self.pool.room = _Room(self) if on_card else None
        self.in_windows: dict[int, list[int]] = {}
        """Window's page -> all tokens up to its last one."""
        self.held_windows: list[int] = []
        """By others than rows."""
        self.states: dict[int, list[int]] = {}
        """Of each state, the tokens that it has summed up, in which of the ways."""
        self.held_states: list[int] = []
        """By others than rows."""
        self.alive: list[_Row] = []
        self.forks: list[dict[int, list[int]]] = []
        self.held: dict[int, list[int]] = {}
        """Page -> all tokens up to its last one, as they were written, and in which of the ways."""

        def discarding() -> Discard:
            def discard(pages: Sequence[int]) -> None:
                for page in pages:
                    assert page not in self._uses()
                    self.held.pop(page, None)

            return discard

        def discard_states(states: Sequence[int]) -> None:
            for state in states:
                assert state not in self._uses_of_states()
                self.states.pop(state, None)

        def discard_windows(pages: Sequence[int]) -> None:
            for page in pages:
                assert page not in self._uses_of_windows()
                self.in_windows.pop(page, None)

        self.kinds = [
            PageKind(
                *(root, weight, discarding(), lambda states: discard_states(states)),
                *(lambda pages: discard_windows(pages), sizes.window_tokens, _AT_ONCE),
            )
            for root, weight in ((b"", 1), (b"other", 1), (b"wider", 2))
        ]

    @precondition(lambda self: len(self.alive) < 6)
    @rule(
        beginning=st.sampled_from(_BEGINNINGS),
        rest=st.lists(st.integers(1, 3), min_size=1, max_size=PAGE_TOKENS + 2),
        most=st.integers(1, PAGE_TOKENS),
        ahead=st.one_of(st.none(), st.integers(1, PAGE_TOKENS)),
        kind=st.integers(0, 2),
    )
    def begin(self, beginning: list[int], rest: list[int], most: int, ahead: int | None, kind: int) -> None:
        ids: list[int] = []
        prompt = [*beginning, *rest]
        row = PagedRow(_sequence(prompt, ids, most), self.pool, self.kinds[kind], ahead)
        if row.reserve():
            self.alive.append(_Row(row, ids, kind))

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5), most=st.integers(1, 3 * PAGE_TOKENS), copies=st.booleans())
    def read(self, which: int, most: int, copies: bool) -> None:
        mine = self._of(which)
        if mine.waits or not mine.row.is_reading:
            return
        if self.pool.states:
            if mine.row.state is None:
                mine.row.find_state(self._caches(), None)
        else:
            mine.row.share_pages()
        if copies and not self.pool.states:
            before = mine.row.held
            mine.row.copy_part(self._caches())
            if mine.row.held > before:
                page = mine.row.pages.tolist()[-1]
                self.held[page] = self.held[page][: mine.row.held]
                if self.pool.windows:
                    page = mine.row._windows[len(mine.row.pages) - 1]
                    self.in_windows[page] = self.in_windows[page][: mine.row.held]
        self._write(mine, min(most, len(mine.row.prompt) - mine.row.held))
        if mine.row.is_reading and copies and self.pool.states:
            mine.row.leave_state(self._caches())
        if not mine.row.is_reading:
            mine.ids.append(7 + len(mine.ids) % 2)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5), tokens=st.integers(1, 40))
    def answer(self, which: int, tokens: int) -> None:
        mine = self._of(which)
        for at in range(tokens):
            if mine.waits or mine.row.is_reading or not mine.ids or self._is_full(mine):
                return
            if not mine.row.reserve_next():
                return
            self._write(mine, mine.row.width, in_place=at % 2 == 0)
            mine.ids.append(7 + len(mine.ids) % 2)
            if self.pool.states and at % 5 == 0 and not self._is_full(mine) and mine.row.reserve_next():
                # One more token, tried with others that do not come true.
                self._compute(mine, 1)
                mine.ids.append(7 + len(mine.ids) % 2)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5))
    def abandon_a_step(self, which: int) -> None:
        """Pages are taken, but what was computed is thrown away."""
        mine = self._of(which)
        if not mine.waits and mine.row.is_reading and (mine.row.state is not None or not self.pool.states):
            piece = mine.row.piece(1)
            if self.pool.states:
                assert piece.next_state != piece.state
                self.states[piece.next_state] = [-1]  # half written

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5))
    def step_aside(self, which: int) -> None:
        mine = self._of(which)
        mine.row.step_aside()
        mine.waits = True

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5))
    def come_back(self, which: int) -> None:
        mine = self._of(which)
        if mine.waits and (mine.row.reserve() or mine.row.reserve_least()):
            mine.waits = False

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 5), leaves=st.booleans(), is_deleted=st.booleans())
    def end(self, which: int, leaves: bool, is_deleted: bool) -> None:
        mine = self._of(which)
        self.alive.remove(mine)
        if leaves:
            mine.row.leave_part()
        left = self.pool.prefixes(mine.row.pages.tolist())
        for _, state in mine.row.states if leaves and len(self.held_states) < 3 else ():
            if self.pool.hold_state(state):  # until it is on disk
                self.held_states.append(state)
        if leaves and len(self.held_windows) < 9:
            own, others = mine.row.windows_to_keep()
            for page in own.values():
                self.pool.hold_window(page, is_reserved=False)
            held = [page for page in others.values() if self.pool.reserve(self.pool.window_weight)]
            for page in held:
                self.pool.hold_window(page)
            self.held_windows += [*own.values(), *held]
        mine.row.close()
        mine.row.close()  # whoever is not sure may say so twice
        if is_deleted:
            held = self._uses()
            for page in self.pool.forget(left):
                assert page not in held
                assert page not in self.held

    @precondition(lambda self: self.alive and len(self.forks) < 4)
    @rule(which=st.integers(0, 5))
    def fork(self, which: int) -> None:
        """Others go on from the whole pages that a row has."""
        mine = self._of(which)
        pages = mine.row.pages.tolist()[: mine.row.held // PAGE_TOKENS]
        for page in pages:
            self.pool.fork(page)
            assert self.pool.is_forked(page)
        self.forks.append({page: list(self.held[page]) for page in pages})

    @precondition(lambda self: self.forks)
    @rule(which=st.integers(0, 3))
    def end_fork(self, which: int) -> None:
        for page in self.forks.pop(which % len(self.forks)):
            self.pool.release(page)

    @precondition(lambda self: self.held_states)
    @rule()
    def write_a_state(self) -> None:
        self.pool.release_state(self.held_states.pop())

    @precondition(lambda self: self.held_windows)
    @rule(which=st.integers(0, 5))
    def write_a_window(self, which: int) -> None:
        self.pool.release_window(self.held_windows.pop(which % len(self.held_windows)))

    @rule(kind=st.integers(1, 2))
    def leave(self, kind: int) -> None:
        """The memory of one kind goes, once nobody has any of it."""
        in_use = {tokens[0] // 100 for fork in self.forks for tokens in fork.values()}
        if kind in in_use or any(mine.kind == kind for mine in self.alive) or self.held_states or self.held_windows:
            return
        self.pool.leave(self.kinds[kind])
        for page in [page for page, tokens in self.held.items() if tokens and tokens[0] // 100 == kind]:
            del self.held[page]

    @rule(most=st.integers(1, 4))
    def give_memory_back(self, most: int) -> None:
        held = self._uses()
        for page in self.pool.give_back(most):
            assert page not in held
            assert page not in self.held

    @rule(if_many=st.booleans(), forgets=st.booleans())
    def fit(self, *, if_many: bool, forgets: bool) -> None:
        self.pool.fit(if_many=if_many, forgets=forgets)

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()

    @invariant()
    def every_row_finds_what_it_wrote(self) -> None:
        for mine in self.alive if hasattr(self, "pool") else ():
            tokens = mine.row.read
            for place, page in enumerate(mine.row.pages.tolist()[: pages_for(len(tokens))]):
                wanted = self._as(mine, tokens[: (place + 1) * PAGE_TOKENS])
                assert self.held[page][: len(wanted)] == wanted
            window, first = mine.row._windows, self.kinds[mine.kind].first_window(len(tokens))
            for place in range(first, pages_for(len(tokens))) if self.pool.windows else ():
                wanted = self._as(mine, tokens[: (place + 1) * PAGE_TOKENS])
                assert self.in_windows[window[place]][: len(wanted)] == wanted
        for fork in getattr(self, "forks", ()):
            assert all(self.held[page] == tokens for page, tokens in fork.items())

    @invariant()
    def pages_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        uses, room = self._uses(), self.pool.room
        assert all(0 <= page < (room or self.pool).pages for page in uses)
        windows = self._uses_of_windows()
        assert all(0 <= page < (room or self.pool).windows for page in windows)
        assert self.pool.held_windows == len(windows)
        for mine in self.alive:
            assert len(set(mine.row.pages.tolist())) == len(mine.row.pages)
        assert self.pool.held == len(uses)
        states = self._uses_of_states()
        assert all(0 <= state < (room or self.pool).states for state in states)
        assert self.pool.held_states == len(states)
        of_rows = [state for mine in self.alive if mine.row.state is not None for state in self._own_states(mine)]
        assert len(set(of_rows)) == len(of_rows), "two rows write to a state"
        for mine in self.alive:
            if mine.row.state is not None:
                assert self.states[mine.row.state] == self._as(mine, mine.row.read)
        held = self.pool.held * self.pool.page_weight + self.pool.state_weight * len(states)
        assert held + self.pool.window_weight * windows.total() <= self.pool.in_use <= self.pool.capacity
        for mine in self.alive:
            assert len(mine.row._windows) <= self.kinds[mine.kind].most_windows(reads=mine.row.is_reading)
        assert self.pool.filled <= self.pool.capacity
        shared = [page for page, count in uses.items() if count > 1]
        for page in shared:  # only whole pages are shared: nobody writes to one
            holders = [mine.row for mine in self.alive if page in mine.row.pages.tolist()]
            assert all(row.held >= (row.pages.tolist().index(page) + 1) * PAGE_TOKENS for row in holders)

    def teardown(self) -> None:
        for mine in getattr(self, "alive", ()):
            mine.row.close()
        for page in chain.from_iterable(getattr(self, "forks", ())):
            self.pool.release(page)
        for state in getattr(self, "held_states", ()):
            self.pool.release_state(state)
        for page in getattr(self, "held_windows", ()):
            self.pool.release_window(page)
        if hasattr(self, "pool"):
            self.alive, self.forks, self.held_states, self.held_windows = [], [], [], []
            assert (self.pool.held, self.pool.held_windows, self.pool.in_use) == (0, 0, 0)
            weight = self.pool.state_weight
            assert self.pool.reserve(self.pool.states * weight)
            kind = self.kinds[0]
            assert len({self.pool.take_state(kind) for _ in range(self.pool.states)}) == self.pool.states
            for state in range(self.pool.states):
                self.pool.release_state(state)
            assert self.pool.reserve(self.pool.windows * self.pool.window_weight)
            taken = [self.pool.take_window(kind) for _ in range(self.pool.windows)]
            assert len({*taken}) == self.pool.windows
            for page in taken:
                self.pool.release_window(page)
            assert self.pool.reserve(self.pool.pages * self.pool.page_weight)  # none is lost
            assert len({self.pool.take() for _ in range(self.pool.pages)}) == self.pool.pages

    def _uses(self) -> Counter[int]:
        """How many hold each page."""
        rows = chain.from_iterable(mine.row.pages.tolist() for mine in self.alive)
        return Counter(chain(rows, *self.forks))

    def _uses_of_windows(self) -> Counter[int]:
        rows = chain.from_iterable(mine.row._windows.values() for mine in self.alive)
        return Counter(chain(rows, self.held_windows))

    def _own_states(self, mine: _Row) -> list[int]:
        assert mine.row.state is not None
        return [mine.row.state, mine.row._spare]

    def _uses_of_states(self) -> set[int]:
        rows = [self._own_states(mine) for mine in self.alive if mine.row.state is not None]
        return {*chain.from_iterable(rows), *self.held_states}

    def _caches(self) -> Any:
        """Of the model."""

        def copy_page(source: int, target: int) -> None:
            self.held[target] = list(self.held[source])

        def copy_window(source: int, target: int) -> None:
            self.in_windows[target] = list(self.in_windows[source])

        return SimpleNamespace(
            copy_window=copy_window,
            clear_state=lambda state: self.states.__setitem__(state, []),
            copy_state=lambda source, target: self.states.__setitem__(target, list(self.states[source])),
            copy_page=copy_page,
        )

    def _of(self, which: int) -> _Row:
        return self.alive[which % len(self.alive)]

    def _as(self, mine: _Row, tokens: list[int]) -> list[int]:
        return [100 * mine.kind + token for token in tokens]

    def _is_full(self, mine: _Row) -> bool:
        return pages_for(mine.row.held + mine.row.width + 1) > len(mine.row._table)

    def _write(self, mine: _Row, tokens: int, *, in_place: bool = False) -> None:
        self._compute(mine, tokens, in_place=in_place)
        mine.row.has_read(tokens)

    def _compute(self, mine: _Row, tokens: int, *, in_place: bool = False) -> None:
        """The next tokens, which are not counted yet."""
        row = mine.row
        piece = row.piece(tokens, in_place=in_place)
        pages, begin = row.pages.tolist(), row.held
        new = row.next_ids(tokens)[:tokens]
        before = row.read
        if self.pool.states:
            assert self.states[piece.state] == self._as(mine, before)
            self.states[piece.next_state] = self._as(mine, [*before, *new])
        for place in range(begin, begin + tokens):
            page, slot = pages[place // PAGE_TOKENS], place % PAGE_TOKENS
            assert self._uses()[page] == 1, "a page is written to while somebody else holds it"
            so_far = self._as(mine, [*before, *new[: place - begin + 1]])
            assert slot == 0 or self.held[page][: len(so_far) - 1] == so_far[:-1]
            self.held[page] = so_far
            if self.pool.windows:
                page = int(piece.windows[place // PAGE_TOKENS])
                assert self._uses_of_windows()[page] == 1, "a window's page is written to while somebody else holds it"
                self.in_windows[page] = so_far
                for seen in range(self.kinds[mine.kind].first_window(place), place // PAGE_TOKENS + 1):
                    wanted = so_far[: (seen + 1) * PAGE_TOKENS]
                    assert self.in_windows[int(piece.windows[seen])][: len(wanted)] == wanted


TestPagesInAnyOrder = PagesInAnyOrder.TestCase
TestPagesInAnyOrder.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)


def test_chats_that_follow_each_other_take_no_more_of_a_card_than_is_kept_of_them() -> None:
    pool, room = PagePool(400), _Room()
    pool.room = room
    for chat in range(80):
        assert pool.reserve(4)
        taken = [pool.take() for _ in range(4)]
        for place, page in enumerate(taken):
            pool.publish(page, bytes([chat, place]))
        for page in taken:
            pool.release(page)
        if (too_many := pool.spare - 8) > 0:
            pool.give_back(too_many)
        pool.fit(if_many=True)
    assert (pool.spare, room.pages) == (8, 12)
    assert pool.fit(forgets=True)  # before a request is given up for want of memory
    assert (pool.spare, room.pages) == (0, 0)
    assert not pool.fit(forgets=True)


def test_what_nobody_can_go_on_from_gives_way_before_anything_else() -> None:
    pool, room, kind = PagePool(400, 0, PageSizes(1, 1, 1, 40)), _Room(), PageKind(window=40)
    pool.room = room
    assert pool.reserve(7)
    page, windows = pool.take(kind), [pool.take_window(kind) for _ in range(6)]
    pool.publish(page, b"a")
    pool.release(page)
    for each in windows:  # which the window has passed, and none is offered
        pool.release_window(each)
    assert (room.pages, room.windows) == (1, 6)
    assert pool.fit()
    assert (room.pages, room.windows) == (1, 0)
    assert pool.has(b"a")


def _layers(count: int, place: torch.device) -> list[PagedLayer | StatePages]:
    return [PagedLayer(KvShape(1, 1, 8, 8), KvType.FP32, 0, place=place) for _ in range(count)]


def test_a_card_that_refuses_memory_within_its_budget_says_so_and_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pages: int) -> None:
        raise torch.OutOfMemoryError

    with open_cpu(2**20) as device:
        layers = _layers(3, torch.device("meta"))
        caches, each = PagedCaches(layers, [0, 0, 0]), sum(layer.page_bytes for layer in layers)
        room = PageRoom(ModelDevices([device]), caches, 4)
        pool = PagePool(100)
        pool.room = room
        assert pool.reserve(10)
        page = pool.take()
        before, generation = room.pages, caches.generation
        with monkeypatch.context() as patch:
            patch.setattr(layers[1], "resize", refuse)
            with refused(ErrorCode.NOT_ENOUGH_MEMORY, match="refused memory"):
                room.resize(pages=before + 1, windows=0, states=0)
            assert (room.pages, room.nbytes) == (before, before * each)
            assert caches.generation > generation  # some layers lie elsewhere now
            pool.publish(page, b"a")
            pool.release(page)
            assert pool.take() in range(before)  # what nobody holds gives way
            with pytest.raises(EngineError):
                room.resize(pages=0, windows=0, states=0)
            assert (room.pages, room.nbytes) == (0, 0)
        assert device.memory.use().by_category[MemoryCategory.KV] == 0


def test_a_card_has_memory_for_windows_and_states_by_themselves() -> None:
    meta = torch.device("meta")
    layers: list[PagedLayer | StatePages] = [*_layers(2, meta), StatePages.like(None, torch.empty(1, 4, 4), 0)]
    with open_cpu(2**20) as device:
        caches = PagedCaches(layers, [0, 40, 0], slides=True)
        room = PageRoom(ModelDevices([device]), caches, 4)
        room.resize(pages=9, windows=2, states=1)
        assert (room.pages, room.windows, room.states) == (9, 2, 3)  # more of what steps are captured with
        assert [len(layer.keys) for layer in layers[:2]] == [9, 2]  # type: ignore[union-attr]
        of_page = layers[0].page_bytes
        assert room.nbytes == device.memory.use().by_category[MemoryCategory.KV] == 11 * of_page + 3 * 64
        generation = caches.state_generation
        room.resize(pages=9, windows=1, states=3)
        assert room.nbytes == 10 * of_page + 3 * 64
        assert caches.state_generation == generation
        room.resize(pages=0, windows=0, states=0)
        assert caches.state_generation > generation


class _Refusing(_Room):
    """Has memory for one of each."""

    def resize(self, *, pages: int, windows: int, states: int) -> None:
        if max(pages, windows, states) > 1:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "no more")
        super().resize(pages=pages, windows=windows, states=states)


def _refusing(state_weight: int, sizes: PageSizes) -> tuple[PagePool, PagedRow]:
    pool = PagePool(40, state_weight, sizes)
    pool.room = _Refusing()
    kind = PageKind(window=sizes.window_tokens, at_once=_AT_ONCE)
    row = PagedRow(_sequence([1] * 3 * PAGE_TOKENS, [], 4), pool, kind)
    assert row.reserve()
    return pool, row


def test_pages_of_windows_that_hold_nothing_make_room_for_pages_of_tokens() -> None:
    pool, kind = PagePool(64, sizes=PageSizes(1, 1, 1, PAGE_TOKENS)), PageKind(window=PAGE_TOKENS)
    pool.room = room = _Room()
    assert pool.reserve(16)
    windows = [pool.take_window(kind) for _ in range(8)]
    pages = [pool.take(kind) for _ in range(4)]
    assert (room.pages, room.windows) == (4, 8)
    for window in windows[2:]:
        pool.release_window(window)
    assert room.windows == 8
    pages.append(pool.take(kind))
    assert (room.pages, room.windows) == (5, 2)
    assert pages == [0, 1, 2, 3, 4]


def test_what_a_card_refuses_is_not_counted() -> None:
    caches: Any = SimpleNamespace(clear_state=lambda _state: None, copy_state=lambda _source, _target: None)
    pool, row = _refusing(0, PageSizes(1, 1, 1, 40))
    for _ in range(3):
        with pytest.raises(EngineError):
            row.piece(2 * PAGE_TOKENS)
    row.close()
    assert (pool.in_use, pool.held_windows) == (0, 0)
    pool, row = _refusing(2, PageSizes(1))
    with pytest.raises(EngineError):
        row.find_state(caches, None)
    row.close()
    assert (pool.in_use, pool.held_states) == (0, 0)
    assert pool.reserve(2)
    state = pool.take_state(PageKind())  # the one that there is memory for
    assert row.reserve()
    row.state, row.held = state, PAGE_TOKENS
    row.leave_state(caches)  # nobody goes on from here, that is all
    row.state = None
    pool.release_state(state)
    row.close()
    assert (pool.in_use, pool.held_states) == (0, 0)


def test_states_on_their_way_to_disk_take_nothing_that_is_promised() -> None:
    pool = PagePool(6, 2)
    assert pool.reserve(2)
    state = pool.take_state(PageKind())
    assert pool.offer_state(state, b"before", [])
    pool.release_state(state)
    assert pool.reserve(5)
    assert not pool.hold_state(state)
    assert [pool.take() for _ in range(5)]
    assert pool.in_use == pool.filled == 5


def test_what_is_compressed_behind_a_window_counts_as_pages_and_what_is_recent_as_windows() -> None:
    made = CompressedPages(KvType.FP32, 4, 8, 8, 0)
    with open_cpu(2**20) as device:
        room = PageRoom(ModelDevices([device]), PagedCaches([made], [40], slides=True), 4)
        room.resize(pages=9, windows=2, states=0)
        assert room.nbytes == 9 * made.entries.page_bytes + 2 * made.recent.page_bytes


def test_states_of_a_model_without_attention_have_a_card_s_memory_too() -> None:
    held = torch.empty(1, 4, 4, device="meta")
    caches = PagedCaches([StatePages.like(None, held, 3)], [0])
    assert caches.are_of_card
    caches.resize(0, 0, 2)
    assert caches.layers[0].states.shape == (2, 4, 4)  # type: ignore[union-attr]


def test_what_a_card_holds_is_kept_from_where_it_lies_now() -> None:
    made = StatePages.like(None, torch.ones(1, 4, 4), 2)
    layers: list[PagedLayer | StatePages] = [made, *_layers(1, torch.device("cpu"))]
    caches, pages = PagedCaches(layers, [0, 0]), torch.tensor([0, 1], dtype=torch.int32)
    caches.resize(2, 0, 2)
    state = PagedState(caches, pages, 40, 1)
    layout = state.layout
    caches.resize(3, 0, 3)
    made.states[1] = 5
    data = torch.empty(layout.nbytes, dtype=torch.uint8)
    state.copy(data)
    assert (layout.parts(data)[0][0] == 5).all()


def test_tables_name_no_page_that_is_gone() -> None:
    place = torch.device("cpu")
    caches = PagedCaches(_layers(2, place), [0, 0])
    caches.resize(8, 0, 0)
    places = RowPlaces(caches, 1, 8 * PAGE_TOKENS, place)
    places.set([1], [40], [Piece(torch.tensor([7, 6], dtype=torch.int32), 40, 1)])
    caches.resize(2, 0, 0)
    places.set([1], [3], [Piece(torch.tensor([1], dtype=torch.int32), 3, 1)])
    table, layer = places.of_layer(1)[0], caches.layers[1]
    assert table.pages.max() < 2
    assert isinstance(layer, PagedLayer)
    assert table.entries[1, 0, 0, 1] == layer.keys[1].data_ptr()


def test_tables_name_no_page_that_a_window_has_passed() -> None:
    place = torch.device("cpu")
    caches = PagedCaches(_layers(2, place), [0, 38], slides=True)
    caches.resize(8, 3, 0)
    places = RowPlaces(caches, 2, 8 * PAGE_TOKENS, place)
    pages, windows = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([7, 6, 5, 4], [999, 2, 1, 2]))
    places.set([1, 2], [70, 71], [Piece(pages, 70, 2, windows=windows)])
    full, windowed = (places.of_layer(number)[0] for number in range(2))
    assert full.pages[1, :3].tolist() == [7, 6, 5]
    assert windowed.pages[:, :3].tolist() == [[0, 2, 1]] * 2
    assert full.numbers[:, :2].T.tolist() == [[70, 5, 6], [71, 5, 7]]
    assert windowed.numbers[:, :2].T.tolist() == [[70, 1, 6], [71, 1, 7]]
    places.set([3], [103], [Piece(pages, 103, 1, windows=windows)])
    assert windowed.pages[0, :4].tolist() == [0, 0, 1, 2]
    assert PlacedRows(Pieces([Piece(pages, 103, 1, windows=windows)]), 38).pages.tolist() == [[0, 0, 1, 2]]
