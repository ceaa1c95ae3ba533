"""Pages of rows in any order of their lives: none is lost, taken twice, or written to while others hold it.

Nor is a state, where layers sum up what they read: each row goes on from that of its own tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.kv.pages import Discard, PageKind, PagePool, pages_for
from engine.runtime.schedule.row import PagedRow

_BEGINNINGS = [[1] * length for length in (1, PAGE_TOKENS, 2 * PAGE_TOKENS + 3)]
"""All alike, so that rows share pages."""


@dataclass(eq=False)
class _Row:
    """A row, and what its model would have written."""

    row: PagedRow
    ids: list[int]
    kind: int
    waits: bool = False
    """Whether it has no pages reserved, and must not take any."""


class PagesInAnyOrder(RuleBasedStateMachine):
    """Rows that begin, share, read, answer, step aside, take over and end, over one pool."""

    @initialize(capacity=st.integers(1, 20), state_weight=st.integers(0, 3))
    def start(self, capacity: int, state_weight: int) -> None:
        self.pool = PagePool(capacity, state_weight=state_weight)
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

        self.kinds = [
            PageKind(b"", 1, discarding(), lambda states: discard_states(states)),
            PageKind(b"other", 1, discarding(), lambda states: discard_states(states)),
            PageKind(b"wider", 2, discarding(), lambda states: discard_states(states)),
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
        request: Any = SimpleNamespace(row=0, chat="", on_reused=None, repeats=False)
        sequence: Any = SimpleNamespace(ids=ids)
        row = PagedRow(request, prompt, sequence, most, self.pool, ahead, 0.0, self.kinds[kind])
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
            mine.row.copy_part(lambda source, target: self.held.update({target: self.held[source]}))
            if mine.row.held > before:
                page = mine.row.pages.tolist()[-1]
                self.held[page] = self.held[page][: mine.row.held]
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
        if leaves and mine.row.states and len(self.held_states) < 3:
            _, state = mine.row.states[-1]
            self.pool.hold_state(state)  # until it is on disk
            self.held_states.append(state)
        mine.row.close()
        mine.row.close()  # whoever is not sure may say so twice
        if is_deleted:
            held = self._uses()
            for page in self.pool.forget(left):
                assert page not in held
                self.held.pop(page)

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

    @rule(kind=st.integers(1, 2))
    def leave(self, kind: int) -> None:
        """The memory of one kind goes, once nobody has any of it."""
        in_use = {tokens[0] // 100 for fork in self.forks for tokens in fork.values()}
        if kind in in_use or any(mine.kind == kind for mine in self.alive) or self.held_states:
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
        for fork in getattr(self, "forks", ()):
            assert all(self.held[page] == tokens for page, tokens in fork.items())

    @invariant()
    def pages_are_counted(self) -> None:
        if not hasattr(self, "pool"):
            return
        uses = self._uses()
        assert all(0 <= page < self.pool.capacity for page in uses)
        for mine in self.alive:
            assert len(set(mine.row.pages.tolist())) == len(mine.row.pages)
        assert self.pool.held == len(uses)
        states = self._uses_of_states()
        assert all(0 <= state < self.pool.states for state in states)
        assert self.pool.held_states == len(states)
        of_rows = [state for mine in self.alive if mine.row.state is not None for state in self._own_states(mine)]
        assert len(set(of_rows)) == len(of_rows), "two rows write to a state"
        for mine in self.alive:
            if mine.row.state is not None:
                assert self.states[mine.row.state] == self._as(mine, mine.row.read)
        weight = self.pool.state_weight
        assert self.pool.held + weight * len(states) <= self.pool.in_use <= self.pool.capacity
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
        if hasattr(self, "pool"):
            self.alive, self.forks, self.held_states = [], [], []
            assert (self.pool.held, self.pool.in_use) == (0, 0)
            weight = self.pool.state_weight
            assert self.pool.reserve(self.pool.states * weight)
            kind = self.kinds[0]
            assert len({self.pool.take_state(kind) for _ in range(self.pool.states)}) == self.pool.states
            for state in range(self.pool.states):
                self.pool.release_state(state)
            assert self.pool.reserve(self.pool.capacity)  # none is lost
            assert len({self.pool.take() for _ in range(self.pool.capacity)}) == self.pool.capacity

    def _uses(self) -> Counter[int]:
        """How many hold each page."""
        rows = chain.from_iterable(mine.row.pages.tolist() for mine in self.alive)
        return Counter(chain(rows, *self.forks))

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

        return SimpleNamespace(
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


TestPagesInAnyOrder = PagesInAnyOrder.TestCase
TestPagesInAnyOrder.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
