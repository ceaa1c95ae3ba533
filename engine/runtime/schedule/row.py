"""A row in progress: its prompt, its pages, and its answer so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.common import clock
from engine.common.chat import FinishReason
from engine.common.errors import EngineError
from engine.common.footprint import PAGE_TOKENS, SPARE_WINDOW_PAGES, pages_for
from engine.kernels.native.paged_attention import Piece
from engine.runtime.decode.beam_search import Beams, BeamStep
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence
from engine.runtime.decode.speculation import Guess, HeadDrafter, Speculation
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.pages import PageKind, PagePool, Prefix, prefix_after
from engine.runtime.prefix_cache.blocks import BLOCK_TOKENS, BlockLayout, block_into_pages, into_pages, state_into_pages
from engine.runtime.prefix_cache.store import Found, PrefixCache, Reused

if TYPE_CHECKING:
    from engine.runtime.kv.library_caches import LibraryCaches

_BEFORE_END = 16
"""How far before its end a prompt leaves a state at least: what a template puts there, the next turn has not."""
_FEWEST_APART = 512
"""Tokens from one state to the next in the midst of a prompt."""
_LONG = b"long"
"""Before the prefixes of contexts that are rotated as long ones."""


class PagedRow:
    """A row whose keys and values are in pages.

    It reserves the pages of its prompt and of the answer's next tokens, and takes them as tokens arrive.

    Args:
        ahead: tokens of the answer whose pages are reserved at a time; `None` for all of them at once.
        source: the `RowSource` that it is of.

    Attributes:
        prompt: what it has to read: the sequence's, and once it has stepped aside the answer so far.
    """

    def __init__(
        self,
        sequence: Sequence,
        pool: PagePool,
        kind: PageKind = PageKind(),  # noqa: B008 - it cannot be changed
        ahead: int | None = None,
        source: Any = None,
    ) -> None:
        self.source = source
        self.sequence, self.request, self.layout = sequence, sequence.request, sequence.layout
        self.prompt, most_tokens = sequence.prompt, sequence.max_tokens
        self._prompt_tokens = len(self.prompt)
        self._pool, self._kind = pool, kind
        self.is_of_job = ahead is None  # these have room for all of their answers
        self._ahead = most_tokens if ahead is None else min(ahead, most_tokens)
        # The last token of an answer is never fed back.
        self._table = torch.zeros(pages_for(len(self.prompt) + most_tokens), dtype=torch.int32)
        self._pages: list[int] = []
        self._windows: dict[int, int] = {}
        """The pages of its window by their place among its pages, if layers with one have pages of their own."""
        self._window_table = torch.zeros_like(self._table) if kind.window else None
        self._places = set[int]()
        """Numbers of tokens that others may want to go on behind."""
        self._reserved = self._covered = 0
        """What it has room for, and the pages of tokens that this is for."""
        self.search: Callable[[torch.Tensor], Beams[FinishReason]] | None = None
        """Begins the search for its answer, from logits after the prompt, if it has beams."""
        self.beams: _RowBeams | None = None
        self._least_of_beams = 0
        self.over: FinishReason | None = None
        """Why its answer has ended, once it has."""
        self.error: EngineError | None = None
        """What was wrong with it; it has ended then."""
        self.held = self.shared = 0
        self.kept = Reused()
        """What was brought from where it is kept; part of `shared`."""
        self._was_looked_for = self._has_copied = False
        self._once_read = 0
        """Tokens that had been read when it stepped aside: `shared` counts what it never had to read."""
        self._published = 0
        """Tokens at the beginning that lie in pages offered to others; `_prefix` identifies them."""
        self.steady = 0
        """Tokens at the beginning that were computed in whole chunks from the first one on."""
        self.speculation: Speculation | None = None
        self.drafter: HeadDrafter | None = None
        """Of its speculation, if the model has a head that drafts."""
        self._told = 0
        """Tokens of the answer that it knows of."""
        self.recorded = 0
        """Number of its recorded request, while nobody shares its sweeps."""
        self.following: bytes | None = None
        """The prefix that the next page will end, if the prompt fills that page and continues after it."""
        self.state: int | None = None
        """What layers have summed up of the tokens held, if they do: its page of states."""
        self._spare = self._into = 0
        """The other one of its own, and the one of both that the next step writes."""
        self.left: list[tuple[int, Prefix]] = []
        """Where it left states to others on its way."""
        self._found = 0
        """Tokens that it went on behind."""
        self._begin()

    def _begin(self) -> None:
        kind, tokens = self._kind, len(self.prompt)
        self._is_long = tokens > kind.again
        self._prefix = _LONG + kind.root if self._is_long else kind.root
        # A page that nobody holds any more is counted as one: those that take more of the budget cannot stay.
        self.shares = kind.weight == 1 and self.may_take_over
        self._look_ahead()

    @property
    def undivided(self) -> int:
        """How many of its prompt's next tokens have to be read at once; 0 if any number may be."""
        if self._is_long and self.held <= self._kind.again:
            return len(self.prompt) - self.held
        if self.may_take_over:
            return 0
        return max(1, self._prompt_tokens - self.held)  # of its answer, if it has stepped aside, one by one

    @property
    def may_take_over(self) -> bool:
        """Whether what was computed of a shorter prompt is what it would compute itself."""
        return len(self.prompt) <= self._kind.exact

    @property
    def takes_company(self) -> bool:
        """Whether its next tokens may be computed together with those of others."""
        end = len(self.prompt) if self.is_reading else self.held + self.width
        return end <= self._kind.together

    @property
    def is_to_begin_again(self) -> bool:
        """Whether its answer reaches the length from which on all tokens are rotated otherwise."""
        return not self.is_reading and not self._is_long and self.held >= self._kind.again

    @property
    def is_reading(self) -> bool:
        return self.held < len(self.prompt)

    def reserve(self) -> bool:
        """Reserves the pages that it needs to begin; False if there are not enough now."""
        return self._reserve_up_to(len(self.prompt) + self._ahead)

    def reserve_least(self) -> bool:
        """Reserves the pages without which it cannot go on."""
        return self._reserve_up_to(len(self.prompt) + 1)

    def reserve_next(self) -> bool:
        """Reserves the page of its answer's next token, and some after it; False if there is none now."""
        if self.beams is not None:
            return self._reserve_pages(self._pool.beside + self._taken + self.beams.taken + self.beams.needs)
        if self._needs(self.held + 1) <= self._reserved:
            return True
        return self._reserve_up_to(self.held + self._ahead) or self._reserve_up_to(self.held + 1)

    def step_aside(self) -> None:
        """Returns its pages; once it has reserved some again, it reads its prompt and its answer so far.

        A search begins again then, with as many pages as it had.
        """
        if self.beams is not None:
            self._least_of_beams = self.beams.beside
        self.close()
        self._once_read = max(self._once_read, self.held)
        self.prompt = self.sequence.prompt + self.sequence.ids
        self.held = self._published = self.steady = 0
        self._has_copied, self.left = False, []
        self._begin()

    def find_state(self, caches: PagedCaches | LibraryCaches, kept: PrefixCache | None) -> None:
        """Takes pages of states before it reads anything; goes on from what others have read of its prompt.

        Args:
            kept: where else some of it may be; none of it may be where it has to repeat.
        """
        first = self._pool.take_state(self._kind)
        try:
            self._spare = self._pool.take_state(self._kind)
        except EngineError:  # a card has no memory for it
            self._pool.release_state(first)
            self._pool.give_back_reservation(-self._pool.state_weight)
            raise
        self.state = first
        self._into = self.state
        caches.clear_state(self.state)
        if self.request.repeats or not self.shares:
            return
        found, tokens = self._pool.find_state(self._prefix, self.prompt[:-1])
        if tokens:
            caches.copy_state(found, self.state)
            self.share_pages(tokens - tokens % PAGE_TOKENS)
            if tokens > self.held:
                page, _ = self._pool.longest(self._prefix, self.prompt[self.held : tokens])
                own = self._pool.take(self._kind)
                if own != page:
                    caches.copy_page(page, own)
                self._add(own)
                self._has_found(tokens - self.held)
        if kept is not None and isinstance(caches, PagedCaches):
            self._bring_state(kept, caches)
        self._found = self.held

    def _bring_state(self, kept: PrefixCache, caches: PagedCaches) -> None:
        begun_s, before = clock.now(), len(self.prompt)
        while True:
            found = kept.find_state(self.prompt, self.held, self.request.chat)
            if found is None or found.tokens >= before:  # what is damaged is removed: there may be something shorter
                return
            before, new = found.tokens, found.tokens - self.held
            piece = self.piece(new)
            if state_into_pages(found, caches.layers, piece):
                break
        self.shared += max(0, min(before, self._prompt_tokens) - max(self.held, self._once_read))
        self.kept = found.reused
        self.has_read(new)
        self.request.on_reused(found.reused.ram, found.reused.disk, clock.now() - begun_s)

    def up_to_state(self, tokens: int) -> int:
        """How many of its next tokens it reads before it may leave a state for whoever asks the same again."""
        last = self._before_end
        return min(tokens, last - self.held) if self.held < last and not self.request.repeats else tokens

    @property
    def _before_end(self) -> int:
        return (len(self.prompt) - _BEFORE_END) // PAGE_TOKENS * PAGE_TOKENS

    def leaves_state(self, caches: PagedCaches | LibraryCaches) -> bool:
        """Whether others may want to go on from here: before its prompt's end, or far from the last such place."""
        if self.held == self._before_end or not isinstance(caches, PagedCaches):  # whole caches are as long as it is
            return self.held == self._before_end
        before = self.left[-1][0] if self.left else self._found
        return self.held - before >= max(_FEWEST_APART, self._pool.state_weight * PAGE_TOKENS)

    def forget_last_state(self, caches: LibraryCaches) -> None:
        """Frees what its last tokens went on from, which is about as long as what it holds now."""
        if self.state is not None:
            caches.clear_state(self._spare)

    def leave_state(self, caches: PagedCaches | LibraryCaches) -> None:
        """Copies its state for others, where a page ends, if there is room for that."""
        pool, prefix = self._pool, self._prefix
        if self.state is None or not self.shares or not self.held or self.held % PAGE_TOKENS:
            return
        if pool.state_of(prefix) is None:
            if not pool.reserve(pool.state_weight):
                return
            try:
                left = pool.take_state(self._kind)
            except EngineError:  # a card has no memory for it
                pool.give_back_reservation(pool.state_weight)
                return
            caches.copy_state(self.state, left)
            pool.offer_state(left, prefix, ())
            pool.release_state(left)
        self.left.append((self.held, prefix))

    @property
    def states(self) -> list[tuple[int, int]]:
        """The states that it left, as far as they are there, and its own: what its answer can be gone on with from."""
        left = [(tokens, self._pool.state_of(prefix)) for tokens, prefix in self.left if tokens < self.held]
        return [(tokens, state) for tokens, state in [*left, (self.held, self.state)] if tokens and state is not None]

    @property
    def pages(self) -> torch.Tensor:
        """Its pages in order, int32."""
        return self._table[: len(self._pages)]

    @property
    def _taken(self) -> int:
        """What its pages and its window's take of its reservation."""
        return len(self._pages) * self._pool.page_weight + len(self._windows) * self._pool.window_weight

    @property
    def read(self) -> list[int]:
        return (self.sequence.prompt + self.sequence.ids)[: self.held]

    def share_pages(self, most: int | None = None, step: int = PAGE_TOKENS) -> None:
        """Takes over pages of rows whose prompts have the same beginning, as far as there are any.

        Args:
            most: tokens that it may hold then.
            step: only a multiple of so many, if layers have a window.
        """
        if self.held != len(self._pages) * PAGE_TOKENS:
            return
        begun, prefixes = len(self._pages), self._known_prefixes(most)
        count = self._reach(begun, prefixes, step) if self._kind.window else len(prefixes)
        if self._is_long and self.held + count * PAGE_TOKENS <= self._kind.again:
            return  # it has to be read at once
        if count < len(prefixes):
            self._places.add(self.held + len(prefixes) * PAGE_TOKENS)  # this is where prompts part
        if not count:
            return
        reach = self.held + count * PAGE_TOKENS
        if self._kind.window:
            self._places.add(reach)
            first = self._kind.first_window(reach)
            self._pass_windows(first)
            for place in range(max(begun, first), begun + count):
                page = self._pool.window_of(prefixes[place - begun])
                assert page is not None
                self._pool.hold_window(page)
                self._add_window(place, page)
        for prefix in prefixes[:count]:
            was_idle, page = self._pool.is_idle(prefix), self._pool.share(prefix)
            assert page is not None
            if not was_idle:
                self._pool.give_back_reservation(self._pool.page_weight)
            self._add(page)
        self._has_found(reach - self.held)
        self._published, self._prefix = self.held, prefixes[count - 1]
        self._look_ahead()

    def _known_prefixes(self, most: int | None) -> list[Prefix]:
        """Those of its next pages that are offered, up to the first that is not."""
        found, prefix, end = list[Prefix](), self.following, self.held + PAGE_TOKENS
        while prefix is not None and self._pool.has(prefix) and (most is None or end - PAGE_TOKENS < most):
            found.append(prefix)
            is_next = end + PAGE_TOKENS < len(self.prompt)
            prefix = prefix_after(prefix, self.prompt[end : end + PAGE_TOKENS]) if is_next else None
            end += PAGE_TOKENS
        return found

    def _reach(self, begun: int, prefixes: list[Prefix], step: int) -> int:
        """How many of these pages can be gone on behind: what the next token sees of a window is there."""
        count = run = 0
        for number, prefix in enumerate(prefixes, 1):
            run = run + 1 if self._pool.window_of(prefix) is not None else 0
            end = begun + number
            wanted = end - max(begun, self._kind.first_window(end * PAGE_TOKENS))
            if run >= wanted and end * PAGE_TOKENS % step == 0:
                count = number
        return count

    def share_steady_pages(self, chunk: int) -> None:
        """The same, where tokens have to be those of another time, bit by bit: whole chunks computed as at first."""
        if not self.held:
            most = self._pool.steady_tokens(self.prompt[:-1]) // chunk * chunk
            self.share_pages(most, chunk)
            self.steady = min(most, self.held)

    def copy_part(self, caches: PagedCaches) -> None:
        """Takes over the beginning of a page in which its prompt goes on otherwise, or that is not full; once."""
        if self._has_copied or self.held != len(self._pages) * PAGE_TOKENS:
            return
        self._has_copied, pool, place = True, self._pool, len(self._pages)
        new = self.prompt[self.held : len(self.prompt) - 1][:PAGE_TOKENS]
        page, tokens = pool.longest(self._prefix, new, has_window=bool(self._kind.window))
        if not tokens or (self._is_long and self.held + tokens <= self._kind.again):
            return
        (prefix,) = pool.prefixes([page])
        window, own_window = pool.window_of(prefix), -1
        if self._kind.window:
            self._pass_windows(self._kind.first_window(self.held))
            own_window = self._add_window(place, pool.take_window(self._kind))
        own = pool.take(self._kind)
        self._add(own)
        # What nobody held may just have been evicted, for these two.
        is_there = own == page or pool.prefixes([page]) == [prefix]
        if self._kind.window:
            is_there &= own_window == window or (window is not None and pool.window_of(prefix) == window)
        if not is_there:
            return
        if own != page:
            caches.copy_page(page, own)
        if window is not None and own_window not in (-1, window):
            caches.copy_window(window, own_window)
        self._has_found(tokens)

    def _has_found(self, tokens: int) -> None:
        before = max(self.held, self._once_read)
        self.held += tokens
        self.shared += max(0, min(self.held, self._prompt_tokens) - before)

    def bring_kept(self, kept: PrefixCache, caches: PagedCaches) -> None:
        """Takes over what is kept of its prompt, if that is more than it holds; it is looked for once."""
        if self._was_looked_for or self.held % PAGE_TOKENS:
            return
        self._was_looked_for = True
        begun_s, window = clock.now(), self._kind.window
        found = kept.find(self.prompt, self.held, self.request.chat, window)
        if found is None or found.layout != BlockLayout.of(caches.in_full):
            return
        while len(self._pages) < pages_for(found.tokens):
            self._add(self._pool.take(self._kind))
        there = into_pages(found, caches.in_full, self.pages, self.held)
        if window and not (there == found.tokens and self._bring_windows(found, caches)):
            return
        new = there - self.held
        if new > 0:
            self.shared += max(0, min(there, self._prompt_tokens) - max(self.held, self._once_read))
            self.kept = found.reused
            self.has_read(new)
            self.request.on_reused(found.reused.ram, found.reused.disk, clock.now() - begun_s)

    def _bring_windows(self, found: Found, caches: PagedCaches) -> bool:
        """What the token behind all that was found sees of a window; whether that is sound."""
        first, windows = self._kind.first_window(found.tokens), found.windows
        if windows is None or windows.layout != BlockLayout.of(caches.in_windows):
            return False
        begun = max(first * PAGE_TOKENS, self.held) // BLOCK_TOKENS
        blocks: dict[int, torch.Tensor] = {}
        if windows.bring(begun, lambda index, data: blocks.__setitem__(index, data.clone())) < found.tokens:
            return False
        self._pass_windows(first)
        for place in range(max(first, self.held // PAGE_TOKENS), found.tokens // PAGE_TOKENS):
            page = self._windows.get(place, -1)  # a step that was given up may have taken it
            page = self._add_window(place, self._pool.take_window(self._kind)) if page < 0 else page
            block, number = divmod(place, BLOCK_TOKENS // PAGE_TOKENS)
            block_into_pages(blocks[block], windows.layout, caches.in_windows, [*[-1] * number, page])
        return True

    def windows_to_keep(self) -> tuple[dict[int, int], dict[int, int]]:
        """The pages of its window now, and those that others hold or may share of a window before its prompt's end, by
        their places."""
        if not self._kind.window:
            return {}, {}
        first, found, prefix, read = (
            self._kind.first_window(self._before_end),
            dict[int, int](),
            self._kind.root,
            self.read,
        )
        for place in range(min(self._before_end, self.held) // PAGE_TOKENS):
            prefix = prefix_after(prefix, read[place * PAGE_TOKENS : (place + 1) * PAGE_TOKENS])
            page = self._pool.window_of(prefix)
            if place >= first - SPARE_WINDOW_PAGES and page is not None and place not in self._windows:
                found[place] = page
        return dict(self._windows), found

    def piece(self, tokens: int, *, in_place: bool = False) -> Piece:
        """Its next tokens, with pages for them.

        Args:
            in_place: whether its state may be written over: these tokens are not going to be taken back.
        """
        while len(self._pages) < pages_for(self.held + tokens):
            self._add(self._pool.take(self._kind))
        if self._window_table is not None:
            first = self._kind.first_window(self.held)
            self._pass_windows(first)
            for place in range(first, pages_for(self.held + tokens)):
                if place not in self._windows:
                    assert place * PAGE_TOKENS >= self.held, "a window lacks what has been read"
                    self._add_window(place, self._pool.take_window(self._kind))
        if self.state is None:
            return Piece(self._table, self.held, tokens, windows=self._window_table)
        self._into = self.state if in_place else self._spare
        return Piece(self._table, self.held, tokens, self.state, self._into)

    @property
    def lag(self) -> int:
        """Tokens of its answer that its state does not have: they were tried with others that did not come true."""
        if self.state is None or self.is_reading or self.search is not None:
            return 0
        return max(0, self._prompt_tokens + len(self.sequence.ids) - self.held - 1)

    @property
    def width(self) -> int:
        """Tokens that it has in a step at least."""
        return 1 + self.lag if self.beams is None else len(self.beams.tokens)

    def pieces(self, tokens: int, *, in_place: bool = False) -> list[Piece]:
        """The same as several sequences if it has beams."""
        return self.beams.pieces() if self.beams is not None else [self.piece(tokens, in_place=in_place)]

    def search_on(self, logits: torch.Tensor, caches: PagedCaches | LibraryCaches) -> None:
        """Beams choose their next tokens, from logits [B, V], or [1, V] after the prompt."""
        try:
            if self.beams is None:
                assert self.search is not None
                begun = self.search(logits)
                step = next(begun)
                prompt = _Tables(list(self._pages), dict(self._windows))
                self.beams = _RowBeams(begun, self._pool, self._kind, prompt, self.held, caches, self.state)
            else:
                step = self.beams.search.send(logits)
                self.beams.held += 1
        except StopIteration as end:
            self.over = end.value
        else:
            self.beams.follow(step)

    def position(self, index: int) -> int:
        """Where a token lies that is not among pictures, for rotations."""
        return self.layout.position(index) if self.layout is not None else index

    def up_to(self, tokens: int) -> int:
        """How many of its next tokens may be read at once, pictures being looked at for those that are."""
        if self.layout is None:
            return tokens
        end = self.layout.whole(self.held, self.held + tokens)
        self.layout.look(self.held, end)
        return end - self.held

    def given(self, ids: list[int], model: Any) -> dict[str, Any] | None:
        """Arguments of the model for its next tokens, where pictures are among them."""
        return self.layout.given(self.held, ids, model) if self.layout is not None else None

    def next_ids(self, tokens: int) -> list[int]:
        if self.beams is not None:
            return self.beams.tokens
        return self.prompt[self.held : self.held + tokens] if self.is_reading else self.sequence.ids[-1 - self.lag :]

    def has_read(self, tokens: int, chunk: int = 0) -> None:
        """Records that its next tokens are in their pages, and offers complete pages for sharing.

        Args:
            chunk: so many at once were computed as if it were alone, if any were.
        """
        if chunk and self.held == self.steady and tokens == chunk:
            self.steady += chunk
        self.held += tokens
        if self.layout is not None and not self.is_reading:
            self.layout.look(0, 0)
        if self.state is not None and self._into == self._spare:
            self.state, self._spare = self._spare, self.state
            self._into = self.state
        while self.held >= self._published + PAGE_TOKENS:
            begin, end = self._published, self._published + PAGE_TOKENS
            prefix = self.following or prefix_after(self._prefix, self._tokens(begin, end))
            if self.shares and end <= self._kind.exact:
                page, steady = self._pages[begin // PAGE_TOKENS], end <= self.steady
                self._pool.publish(page, prefix, self._prefix, self._tokens(begin, end), steady=steady)
                self._offer_window(begin // PAGE_TOKENS, prefix)
            self._published, self._prefix = end, prefix
            self._look_ahead()
        if self._kind.window and not self.is_reading and self.held - tokens < len(self.prompt) and self._covered:
            self._pass_windows(self._kind.first_window(self.held))
            self._reserve_pages(self._needs(self._covered * PAGE_TOKENS) + self._least_of_beams)

    def leave_part(self) -> None:
        """It has ended: offers its last page, too, although that is not full."""
        rest = self._tokens(self._published, self.held)
        if self.held > self._kind.exact:
            return
        if rest and self.shares and len(self._pages) * PAGE_TOKENS > self._published:
            prefix = prefix_after(self._prefix, rest)
            self._pool.publish(self._pages[self._published // PAGE_TOKENS], prefix, self._prefix, rest)
            self._offer_window(self._published // PAGE_TOKENS, prefix)
        if self.state is not None and self.held and self.shares:
            self._pool.offer_state(self.state, self._prefix, rest)

    @property
    def room(self) -> int:
        return self._covered * PAGE_TOKENS - self.held

    def guess(self, most: int, rows: int, tokens: int) -> Guess | None:
        """What to try with its next token, if anything promises enough; see `Speculation.guess`.

        Args:
            most: tokens in all that its part of the step may have.
        """
        if self.speculation is None or self.lag:
            return None
        self.speculation.append(self.sequence.ids[self._told :])
        self._told = len(self.sequence.ids)
        most = min(most, self.room)
        return self.speculation.guess(lambda count: count <= most, rows=rows, tokens=tokens)

    def answer(self, reason: FinishReason = "cancelled", error: EngineError | None = None) -> GenerationResult:
        speculation = self.speculation
        return self.sequence.result(
            reason,
            error,
            reused_tokens=self.shared,
            guessed_tokens=speculation.guessed if speculation is not None else 0,
            accepted_tokens=speculation.accepted if speculation is not None else 0,
            from_ram=self.kept.ram,
            from_disk=self.kept.disk,
            **(self.layout.told if self.layout is not None else {}),
        )

    def close(self) -> None:
        taken = self._taken + (2 * self._pool.state_weight if self.state is not None else 0)
        if self.beams is not None:
            self.beams.close()
            taken += self.beams.taken
            self.beams = None
        self._pool.give_back_reservation(self._reserved - taken)
        for page in self._windows.values():
            self._pool.release_window(page)
        for page in self._pages:
            self._pool.release(page)
        if self.state is not None:
            self._pool.release_state(self.state)
            self._pool.release_state(self._spare)
            self.state = None
        self._pages = []
        self._windows = {}
        self._reserved = self._covered = 0

    def _reserve_up_to(self, tokens: int) -> bool:
        tokens = min(tokens, len(self._table) * PAGE_TOKENS)
        if not self._reserve_pages(self._needs(tokens) + self._least_of_beams):
            return False
        self._covered = pages_for(tokens)
        return True

    def _needs(self, tokens: int) -> int:
        return self._pool.needs(tokens, self._kind, reads=self.is_reading)

    def _reserve_pages(self, pages: int) -> bool:
        if not self._pool.reserve(pages - self._reserved):
            return False
        self._reserved = pages
        return True

    def _add(self, page: int) -> None:
        self._table[len(self._pages)] = page
        self._pages.append(page)

    def _add_window(self, place: int, page: int) -> int:
        assert self._window_table is not None
        self._window_table[place] = page
        self._windows[place] = page
        return page

    def _pass_windows(self, first: int) -> None:
        """Gives up pages of its window, which begins with this one now: there is room for others in their place."""
        for place in [place for place in self._windows if place < first - SPARE_WINDOW_PAGES]:
            self._pool.release_window(self._windows.pop(place), is_of_use=self._is_of_use(place))
            self._pool.give_back_reservation(-self._pool.window_weight)

    def _is_of_use(self, place: int) -> bool:
        """Whether a page of its window is seen from where others may want to go on."""
        end, apart = (place + 1) * PAGE_TOKENS, self._kind.apart
        places = (-(-end // apart) * apart, self._before_end, *self._places)
        return any(self._kind.first_window(each) - SPARE_WINDOW_PAGES <= place < pages_for(each) for each in places)

    def _offer_window(self, place: int, prefix: Prefix) -> None:
        if place in self._windows:
            self._pool.offer_window(self._windows[place], prefix)

    def _tokens(self, begin: int, end: int) -> list[int]:
        """Tokens of its prompt and, after that, of its answer."""
        read = self.prompt[begin:end]
        if len(read) == end - begin:
            return read
        # After stepping aside the prompt holds the beginning of the answer as well.
        first = len(self.prompt) - self._prompt_tokens
        return read + self.sequence.ids[first + max(0, begin - len(self.prompt)) : first + end - len(self.prompt)]

    def _look_ahead(self) -> None:
        begin, end = self._published, self._published + PAGE_TOKENS
        # The prompt's last token is always computed, because its logits are needed.
        follows = end < len(self.prompt) and self.shares
        self.following = prefix_after(self._prefix, self.prompt[begin:end]) if follows else None


class _Tables(NamedTuple):
    """The pages of a sequence, and those of its window by their place among them."""

    pages: list[int]
    windows: dict[int, int]


class _RowBeams:
    """Sequences that go on from a row's pages: forks of these, each with its own token in every step.

    Attributes:
        held: tokens of each.
        tokens: the next one of each.
        own: pages that the row's prompt does not have.
        taken: of the row's reservation so far.

    Args:
        state: behind the prompt, if layers have any.
    """

    def __init__(
        self,
        search: Beams[FinishReason],
        pool: PagePool,
        kind: PageKind,
        prompt: _Tables,
        held: int,
        caches: PagedCaches | LibraryCaches,
        state: int | None,
    ) -> None:
        self.search, self.held = search, held
        self.tokens: list[int] = []
        self.own = set[int]()
        self.taken = 0
        self._own_windows = set[int]()
        self._pool, self._kind, self._caches = pool, kind, caches
        self._tables: list[_Tables] = []
        self._prompt = prompt
        self._state = state
        self._states: list[int] = []
        """Of each, and those that the step under way writes."""
        self._next: list[int] = []

    def follow(self, step: BeamStep) -> None:
        """The next tokens, and which beam each goes on from."""
        before, self.tokens = self._tables, step.tokens
        sources = [before[source] if before else self._prompt for source in step.sources]
        self._tables = [_Tables(list(source.pages), dict(source.windows)) for source in sources]
        for table in self._tables:
            for page in table.pages:
                self._pool.fork(page)
            for page in table.windows.values():
                self._pool.fork_window(page)
        self._release(before)
        if self._state is not None:
            old, new = [*self._states, *self._next], self._next
            self._states = [new[source] if new else self._state for source in step.sources]
            self._next = []
            for state in self._states:
                self._pool.hold_state(state)
            for state in old:
                self._pool.release_state(state)

    @property
    def needs(self) -> int:
        """What the next tokens take."""
        place = self.held // PAGE_TOKENS
        states = (len(self._states) - len(self._next)) * self._pool.state_weight
        windows = sum(self._wants_window(table, place) for table in self._tables) if self._kind.window else 0
        new = sum(place == len(table.pages) or self._pool.is_forked(table.pages[place]) for table in self._tables)
        return states + new * self._pool.page_weight + windows * self._pool.window_weight

    def _wants_window(self, table: _Tables, place: int) -> bool:
        return place not in table.windows or self._pool.is_window_forked(table.windows[place])

    @property
    def beside(self) -> int:
        """What those who begin such a search anew need beside the prompt's pages."""
        own = len(self.own) * self._pool.page_weight + len(self._own_windows) * self._pool.window_weight
        return own + self.needs + len(self._states) * self._pool.state_weight

    def pieces(self) -> list[Piece]:
        """The next tokens, each in a page that nobody else holds."""
        place = self.held // PAGE_TOKENS
        for table in self._tables:
            if place == len(table.pages) or self._pool.is_forked(table.pages[place]):
                own = self._pool.take(self._kind)
                self.taken += self._pool.page_weight
                if place < len(table.pages):
                    self._caches.copy_page(table.pages[place], own)
                    self._release([_Tables(table.pages[place:], {})])
                table.pages[place:] = [own]
                self.own.add(own)
            if self._kind.window:
                self._slide(table, place)
        while len(self._next) < len(self._states):
            self._next.append(self._pool.take_state(self._kind))
            self.taken += self._pool.state_weight
        states = list(zip(self._states, self._next, strict=True)) or [(0, 0)] * len(self._tables)
        return [
            Piece(torch.tensor(table.pages, dtype=torch.int32), self.held, 1, *own, windows=self._window_table(table))
            for table, own in zip(self._tables, states, strict=True)
        ]

    def _slide(self, table: _Tables, place: int) -> None:
        """Has the window of a beam end with a page of its own."""
        first = self._kind.first_window(self.held)
        passed = {each: table.windows.pop(each) for each in list(table.windows) if each < first}
        self._release([_Tables([], passed)])
        if self._wants_window(table, place):
            own = self._pool.take_window(self._kind)
            self.taken += self._pool.window_weight
            if place in table.windows:
                assert isinstance(self._caches, PagedCaches)
                self._caches.copy_window(table.windows[place], own)
                self._release([_Tables([], {place: table.windows[place]})])
            table.windows[place] = own
            self._own_windows.add(own)

    def _window_table(self, table: _Tables) -> torch.Tensor | None:
        if not self._kind.window:
            return None
        return torch.tensor([table.windows.get(place, 0) for place in range(len(table.pages))], dtype=torch.int32)

    def close(self) -> None:
        self._release(self._tables)
        for state in [*self._states, *self._next]:
            self._pool.release_state(state)

    def _release(self, tables: Iterable[_Tables]) -> None:
        for page in itertools.chain.from_iterable(table.pages for table in tables):
            if not self._pool.is_forked(page):
                self.own.discard(page)
            self._pool.release(page)
        for page in itertools.chain.from_iterable(table.windows.values() for table in tables):
            is_last = page in self._own_windows and not self._pool.is_window_forked(page)
            if is_last:
                self._own_windows.discard(page)
                self.taken -= self._pool.window_weight
                self._pool.give_back_reservation(-self._pool.window_weight)
            self._pool.release_window(page, is_fork=not is_last)
