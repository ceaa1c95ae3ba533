"""A row in progress: its prompt, its pages, and its answer so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.common import clock
from engine.common.chat import FinishReason
from engine.common.errors import EngineError
from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer, Piece, StatePages
from engine.runtime.batch.session_rows import RowSession, SessionBeams
from engine.runtime.decode.beam_search import Beams, BeamStep
from engine.runtime.decode.drafter import Guess
from engine.runtime.decode.generation import Decoded, GenerationResult
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.decode.speculation import Speculation
from engine.runtime.kept.block import BlockLayout
from engine.runtime.kept.copying import into_pages, state_into_pages
from engine.runtime.kept.prefixes import KeptPrefixes, Reused
from engine.runtime.kv.pages import PageKind, PagePool, Prefix, pages_for, prefix_after
from engine.runtime.pictures import Layout
from engine.runtime.schedule.request import BatchRequest

if TYPE_CHECKING:
    from engine.runtime.batch.row_mixers import RowCache
    from engine.runtime.decode.head_drafter import HeadDrafter
    from engine.runtime.kv.paged_cache import PagedCaches

_BEFORE_END = 16
"""How far before its end a prompt leaves a state at least: what a template puts there, the next turn has not."""
_FEWEST_APART = 512
"""Tokens from one state to the next in the midst of a prompt."""


class PagedRow:
    """A row whose keys and values are in pages.

    It reserves the pages of its prompt and of the answer's next tokens, and takes them as tokens arrive.

    Args:
        prompt: its tokens, at least one.
        most_tokens: of the answer.
        ahead: tokens of the answer whose pages are reserved at a time; `None` for all of them at once.
        begun_s: when it was asked for.
        layout: where pictures lie in the prompt, if there are any.
    """

    def __init__(
        self,
        request: BatchRequest,
        prompt: list[int],
        sequence: AnswerSequence,
        most_tokens: int,
        pool: PagePool,
        ahead: int | None = None,
        begun_s: float = 0.0,
        kind: PageKind = PageKind(),  # noqa: B008 - it cannot be changed
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout
        self.begun_s = begun_s
        self.request, self.prompt, self.sequence = request, prompt, sequence
        self._prompt_tokens = len(prompt)
        self._pool, self._kind = pool, kind
        self.is_of_job = ahead is None  # these have room for all of their answers
        self._ahead = most_tokens if ahead is None else min(ahead, most_tokens)
        # The last token of an answer is never fed back.
        self._table = torch.zeros(pages_for(len(prompt) + most_tokens), dtype=torch.int32)
        self._pages: list[int] = []
        self._reserved = 0
        self.search: Callable[[torch.Tensor], Beams[Decoded]] | None = None
        """Begins the search for its answer, from logits after the prompt, if it has beams."""
        self.beams: _RowBeams | SessionBeams | None = None
        self._least_of_beams = 0
        self.over: FinishReason | None = None
        """Why its answer has ended, once it has."""
        self.error: EngineError | None = None
        """What was wrong with it; it has ended then."""
        self.held = 0
        self.own: RowCache | RowSession | None = None
        """What it has beside its pages, or in place of them."""
        self.shared = 0
        self.kept = Reused()
        """What was brought from where it is kept; part of `shared`."""
        self._was_looked_for = self._has_copied = False
        self._once_read = 0
        """Tokens that had been read when it stepped aside: `shared` counts what it never had to read."""
        self._prefix = kind.root
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
        # A page that nobody holds any more is counted as one: those that take more of the budget cannot stay.
        self._shares = pool.shares and kind.weight == 1
        self.state: int | None = None
        """What layers have summed up of the tokens held, if they do: its page of states."""
        self._spare = self._into = 0
        """The other one of its own, and the one of both that the next step writes."""
        self.left: list[tuple[int, Prefix]] = []
        """Where it left states to others on its way."""
        self._found = 0
        """Tokens that it went on behind."""
        self._look_ahead()

    @property
    def is_reading(self) -> bool:
        """Whether some of its prompt is still to be read."""
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
            return self._reserve_pages(self._pool.beside + len(self._pages) + self.beams.taken + self.beams.needs)
        taken = len(self._pages) * self._kind.weight + self._pool.beside
        if taken < self._reserved or self.held < len(self._pages) * PAGE_TOKENS:
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
        self.prompt = self.prompt[: self._prompt_tokens] + self.sequence.ids
        self.held = self._published = self.steady = 0
        self._prefix, self._has_copied, self.left = self._kind.root, False, []
        self._look_ahead()

    def find_state(self, caches: PagedCaches, kept: KeptPrefixes | None) -> None:
        """Takes pages of states before it reads anything; goes on from what others have read of its prompt.

        Args:
            kept: where else some of it may be; none of it may be where it has to repeat.
        """
        self.state, self._spare = self._pool.take_state(self._kind), self._pool.take_state(self._kind)
        self._into = self.state
        caches.clear_state(self.state)
        if self.request.repeats or not self._shares:
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
        if kept is not None:
            self._bring_state(kept, caches)
        self._found = self.held

    def _bring_state(self, kept: KeptPrefixes, caches: PagedCaches) -> None:
        begun_s, before = clock.now(), len(self.prompt)
        while True:
            found = kept.find_state(self.prompt, self.held, has_rows=True, chat=self.request.chat)
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
        last = (len(self.prompt) - _BEFORE_END) // PAGE_TOKENS * PAGE_TOKENS
        return min(tokens, last - self.held) if self.held < last and not self.request.repeats else tokens

    def leaves_state(self) -> bool:
        """Whether others may want to go on from here: before its prompt's end, or far from the last such place."""
        last = (len(self.prompt) - _BEFORE_END) // PAGE_TOKENS * PAGE_TOKENS
        before = self.left[-1][0] if self.left else self._found
        return self.held == last or self.held - before >= max(_FEWEST_APART, self._pool.state_weight * PAGE_TOKENS)

    def leave_state(self, caches: PagedCaches) -> None:
        """Copies its state for others, where a page ends, if there is room for that."""
        pool, prefix = self._pool, self._prefix
        if self.state is None or not self._shares or not self.held or self.held % PAGE_TOKENS:
            return
        if pool.state_of(prefix) is None:
            if not pool.reserve(pool.state_weight):
                return
            left = pool.take_state(self._kind)
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
    def read(self) -> list[int]:
        """The tokens that are in its pages."""
        return (self.prompt[: self._prompt_tokens] + self.sequence.ids)[: self.held]

    def share_pages(self, most: int | None = None) -> None:
        """Takes over pages of rows whose prompts have the same beginning, as far as there are any.

        Args:
            most: tokens that it may hold then.
        """
        while self.following is not None and self.held == len(self._pages) * PAGE_TOKENS:
            if most is not None and self.held >= most:
                return
            was_idle = self._pool.is_idle(self.following)
            page = self._pool.share(self.following)
            if page is None:
                return
            if not was_idle:
                self._pool.give_back_reservation(1)
            self._add(page)
            self._has_found(PAGE_TOKENS)
            self._published, self._prefix = self.held, self.following
            self._look_ahead()

    def share_steady_pages(self, chunk: int) -> None:
        """The same, where tokens have to be those of another time, bit by bit: whole chunks computed as at first."""
        if not self.held:
            self.share_pages(most := self._pool.steady_tokens(self.prompt[:-1]) // chunk * chunk)
            self.steady = most

    def copy_part(self, copy_page: Callable[[int, int], None]) -> None:
        """Takes over the beginning of a page in which its prompt goes on otherwise, or that is not full; once.

        Args:
            copy_page: from one page to another one.
        """
        if self._has_copied or self.held != len(self._pages) * PAGE_TOKENS:
            return
        self._has_copied = True
        page, tokens = self._pool.longest(self._prefix, self.prompt[self.held : len(self.prompt) - 1][:PAGE_TOKENS])
        if tokens:
            own = self._pool.take(self._kind)
            if own != page:
                copy_page(page, own)
            self._add(own)
            self._has_found(tokens)

    def _has_found(self, tokens: int) -> None:
        before = max(self.held, self._once_read)
        self.held += tokens
        self.shared += max(0, min(self.held, self._prompt_tokens) - before)

    def starts_behind(self, tokens: int) -> None:
        """Holds the first tokens of its prompt, which others have read."""
        self.piece(tokens)
        self.shared += max(0, min(tokens, self._prompt_tokens) - self._once_read)
        self.has_read(tokens)

    def bring_kept(self, kept: KeptPrefixes, layers: Sequence[PagedLayer | StatePages]) -> None:
        """Takes over what is kept of its prompt, if that is more than it holds; it is looked for once."""
        if self._was_looked_for or self.held % PAGE_TOKENS:
            return
        self._was_looked_for = True
        begun_s, found = clock.now(), kept.find(self.prompt, self.held, self.request.chat)
        if found is None or found.layout != BlockLayout.of_pages(layers):
            return
        self.piece(found.tokens - self.held)
        there = into_pages(found, layers, self.pages, self.held)
        new = there - self.held
        if new > 0:
            self.shared += max(0, min(there, self._prompt_tokens) - max(self.held, self._once_read))
            self.kept = found.reused
            self.has_read(new)
            self.request.on_reused(found.reused.ram, found.reused.disk, clock.now() - begun_s)

    def piece(self, tokens: int, *, in_place: bool = False) -> Piece:
        """Its next tokens, with pages for them.

        Args:
            in_place: whether its state may be written over: these tokens are not going to be taken back.
        """
        while len(self._pages) < pages_for(self.held + tokens):
            self._add(self._pool.take(self._kind))
        if self.state is None:
            return Piece(self._table, self.held, tokens)
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
        return self.beams.pieces() if isinstance(self.beams, _RowBeams) else [self.piece(tokens, in_place=in_place)]

    def search_on(self, logits: torch.Tensor, copy_page: Callable[[int, int], None] | None) -> None:
        """Beams choose their next tokens, from logits [B, V], or [1, V] after the prompt.

        Args:
            copy_page: from one page to another one, if it has any.
        """
        try:
            if self.beams is None:
                assert self.search is not None
                begun = self.search(logits)
                step = next(begun)
                if isinstance(self.own, RowSession):
                    self.beams = self.own.beams(begun, len(step.tokens))
                else:
                    assert copy_page is not None
                    self.beams = _RowBeams(begun, self._pool, self._kind, self._pages, self.held, copy_page, self.state)
            else:
                step = self.beams.search.send(logits)
                self.beams.held += 1
        except StopIteration as end:
            found: Decoded = end.value
            self.sequence.become(found.ids, found.text)
            self.over = found.reason
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

    def given(self, ids: Sequence[int], model: Any) -> dict[str, Any] | None:
        """Arguments of the model for its next tokens, where pictures are among them."""
        return self.layout.given(self.held, ids, model) if self.layout is not None else None

    def next_ids(self, tokens: int) -> list[int]:
        """The ids of its next tokens."""
        if self.beams is not None:
            return self.beams.tokens
        return self.prompt[self.held : self.held + tokens] if self.is_reading else self.sequence.ids[-1 - self.lag :]

    def has_read(self, tokens: int) -> None:
        """Records that its next tokens are in their pages, and offers complete pages for sharing."""
        self.held += tokens
        if self.layout is not None and not self.is_reading:
            self.layout.look(0, 0)
        if self.state is not None and self._into == self._spare:
            self.state, self._spare = self._spare, self.state
            self._into = self.state
        while self.held >= self._published + PAGE_TOKENS:
            begin, end = self._published, self._published + PAGE_TOKENS
            prefix = self.following or prefix_after(self._prefix, self._tokens(begin, end))
            page = self._pages[begin // PAGE_TOKENS]
            if self._shares:
                self._pool.publish(page, prefix, self._prefix, self._tokens(begin, end), steady=end <= self.steady)
            self._published, self._prefix = end, prefix
            self._look_ahead()

    def has_read_exactly(self, tokens: int, chunk: int) -> None:
        """The same of prompt tokens that were computed as if it were alone, up to so many at once."""
        if self.held == self.steady and tokens == chunk:
            self.steady += chunk
        self.has_read(tokens)

    def leave_part(self) -> None:
        """It has ended: offers its last page, too, although that is not full."""
        rest = self._tokens(self._published, self.held)
        if rest and self._shares and len(self._pages) * PAGE_TOKENS > self._published:
            prefix = prefix_after(self._prefix, rest)
            self._pool.publish(self._pages[self._published // PAGE_TOKENS], prefix, self._prefix, rest)
        if self.state is not None and self.held and self._shares:
            self._pool.offer_state(self.state, self._prefix, rest)

    @property
    def room(self) -> int:
        """Tokens for which it has pages, or has reserved them."""
        return (self._reserved - self._pool.beside) * PAGE_TOKENS - self.held

    def guess(self, most: int, rows: int, tokens: int) -> Guess | None:
        """What to try with its next token, if anything promises enough; see `Speculation.guess`.

        Args:
            most: tokens in all that its part of the step may have.
        """
        if self.speculation is None or self.lag:
            return None
        self.speculation.append(self.sequence.ids[self._told :])
        self._told = len(self.sequence.ids)
        most, own = min(most, self.room), self.own

        def takes(count: int) -> bool:
            return count <= most and (not isinstance(own, RowSession) or own.takes(count))

        return self.speculation.guess(takes, rows=rows, tokens=tokens)

    def answer(self, reason: FinishReason = "cancelled", error: EngineError | None = None) -> GenerationResult:
        """The row's outcome."""
        sequence, speculation = self.sequence, self.speculation
        return GenerationResult(
            sequence.text,
            reason,
            self._prompt_tokens,
            self.shared,
            len(sequence.ids),
            token_ids=tuple(sequence.ids),
            guessed_tokens=speculation.guessed if speculation is not None else 0,
            accepted_tokens=speculation.accepted if speculation is not None else 0,
            stopped_by=sequence.stopped_by,
            from_ram=self.kept.ram,
            from_disk=self.kept.disk,
            **(self.layout.told if self.layout is not None else {}),
            row=self.request.row,
            error=error,
        )

    def close(self) -> None:
        """Returns its pages."""
        taken = len(self._pages) + (2 * self._pool.state_weight if self.state is not None else 0)
        if self.beams is not None:
            taken += self.beams.taken
            self.beams.close()
            self.beams = None
        self._pool.give_back_reservation(self._reserved - taken)
        for page in self._pages:
            self._pool.release(page)
        if self.state is not None:
            self._pool.release_state(self.state)
            self._pool.release_state(self._spare)
            self.state = None
        self._pages = []
        self._reserved = 0
        if self.own is not None:
            self.own.close()
            self.own = None

    def _reserve_up_to(self, tokens: int) -> bool:
        pages = min(pages_for(tokens), len(self._table)) * self._kind.weight + self._pool.beside
        return self._reserve_pages(pages + self._least_of_beams)

    def _reserve_pages(self, pages: int) -> bool:
        if not self._pool.reserve(pages - self._reserved):
            return False
        self._reserved = pages
        return True

    def _add(self, page: int) -> None:
        self._table[len(self._pages)] = page
        self._pages.append(page)

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
        follows = end < len(self.prompt) and self._shares
        self.following = prefix_after(self._prefix, self.prompt[begin:end]) if follows else None


class _RowBeams:
    """Sequences that go on from a row's pages: forks of these, each with its own token in every step.

    Attributes:
        held: tokens of each.
        tokens: the next one of each.
        own: pages that the row's prompt does not have.
        taken: pages so far, out of the row's reservation.

    Args:
        state: behind the prompt, if layers have any.
    """

    def __init__(
        self,
        search: Beams[Decoded],
        pool: PagePool,
        kind: PageKind,
        prompt: Sequence[int],
        held: int,
        copy_page: Callable[[int, int], None],
        state: int | None,
    ) -> None:
        self.search, self.held = search, held
        self.tokens: list[int] = []
        self.own = set[int]()
        self.taken = 0
        self._pool, self._kind, self._copy_page = pool, kind, copy_page
        self._tables: list[list[int]] = []
        self._prompt = list(prompt)
        self._state = state
        self._states: list[int] = []
        """Of each, and those that the step under way writes."""
        self._next: list[int] = []

    def follow(self, step: BeamStep) -> None:
        """The next tokens, and which beam each goes on from."""
        before, self.tokens = self._tables, step.tokens
        self._tables = [list(before[source] if before else self._prompt) for source in step.sources]
        for page in itertools.chain(*self._tables):
            self._pool.fork(page)
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
        """Pages that the next tokens take."""
        place = self.held // PAGE_TOKENS
        states = (len(self._states) - len(self._next)) * self._pool.state_weight
        return states + sum(place == len(table) or self._pool.is_forked(table[place]) for table in self._tables)

    @property
    def beside(self) -> int:
        """Pages that those who begin such a search anew need beside the prompt's."""
        return len(self.own) + self.needs + len(self._states) * self._pool.state_weight

    def pieces(self) -> list[Piece]:
        """The next tokens, each in a page that nobody else holds."""
        place = self.held // PAGE_TOKENS
        for table in self._tables:
            if place < len(table) and not self._pool.is_forked(table[place]):
                continue
            own = self._pool.take(self._kind)
            self.taken += 1
            if place < len(table):
                self._copy_page(table[place], own)
                self._release([table[place:]])
            table[place:] = [own]
            self.own.add(own)
        while len(self._next) < len(self._states):
            self._next.append(self._pool.take_state(self._kind))
            self.taken += self._pool.state_weight
        states = list(zip(self._states, self._next, strict=True)) or [(0, 0)] * len(self._tables)
        tables = [torch.tensor(table, dtype=torch.int32) for table in self._tables]
        return [Piece(table, self.held, 1, *own) for table, own in zip(tables, states, strict=True)]

    def close(self) -> None:
        """Returns their pages."""
        self._release(self._tables)
        for state in [*self._states, *self._next]:
            self._pool.release_state(state)

    def _release(self, tables: Sequence[Sequence[int]]) -> None:
        for page in itertools.chain(*tables):
            if not self._pool.is_forked(page):
                self.own.discard(page)
            self._pool.release(page)
