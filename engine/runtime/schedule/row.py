"""A row in progress: its prompt, its pages, and its answer so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from engine.common import clock
from engine.common.chat import FinishReason
from engine.common.errors import EngineError
from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer, Piece
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.kept.block import BlockLayout
from engine.runtime.kept.copying import from_pages, into_pages
from engine.runtime.kept.prefixes import KeptPrefixes, Reused
from engine.runtime.kv.pages import NO_PREFIX, PagePool, pages_for, prefix_after
from engine.runtime.schedule.request import BatchAnswer, BatchRequest


class PagedRow:
    """A row whose keys and values are in pages.

    It reserves the pages of its prompt and of the answer's next tokens, and takes them as tokens arrive.

    Args:
        prompt: its tokens, at least one.
        most_tokens: of the answer.
        ahead: tokens of the answer whose pages are reserved at a time; `None` for all of them at once.
    """

    def __init__(
        self,
        request: BatchRequest,
        prompt: list[int],
        sequence: AnswerSequence,
        most_tokens: int,
        pool: PagePool,
        ahead: int | None = None,
    ) -> None:
        self.request, self.prompt, self.sequence = request, prompt, sequence
        self._prompt_tokens = len(prompt)
        self._pool = pool
        self._ahead = most_tokens if ahead is None else min(ahead, most_tokens)
        # The last token of an answer is never fed back.
        self._table = torch.zeros(pages_for(len(prompt) + most_tokens), dtype=torch.int32)
        self._pages: list[int] = []
        self._reserved = 0
        self.over: FinishReason | None = None
        """Why its answer has ended, once it has."""
        self.error: EngineError | None = None
        """What was wrong with it; it has ended then."""
        self.held = 0
        self.shared = 0
        self.kept = Reused()
        """What was brought from where it is kept; part of `shared`."""
        self._was_looked_for = False
        self._once_read = 0
        """Tokens that had been read when it stepped aside: `shared` counts what it never had to read."""
        self._prefix = NO_PREFIX
        self._published = 0
        """Tokens at the beginning that lie in pages offered to others; `_prefix` identifies them."""
        self.following: bytes | None = None
        """The prefix that the next page will end, if the prompt fills that page and continues after it."""
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
        if len(self._pages) < self._reserved or self.held < len(self._pages) * PAGE_TOKENS:
            return True
        return self._reserve_up_to(self.held + self._ahead) or self._reserve_up_to(self.held + 1)

    def step_aside(self) -> None:
        """Returns its pages; once it has reserved some again, it reads its prompt and its answer so far."""
        self.close()
        self._once_read = max(self._once_read, self.held)
        self.prompt = self.prompt[: self._prompt_tokens] + self.sequence.ids
        self.held = self._published = 0
        self._prefix = NO_PREFIX
        self._look_ahead()

    def take_over(self, tokens: int, fill: Callable[[torch.Tensor], None]) -> bool:
        """Goes on behind `tokens` tokens of its prompt and its answer so far; false if there are no pages for them.

        Args:
            fill: writes their keys and values into these pages.
        """
        self.prompt = self.prompt[: self._prompt_tokens] + self.sequence.ids
        self._look_ahead()
        if not self.reserve():
            return False
        fill(self.piece(tokens).pages)
        self.has_read(tokens)
        return True

    def follow(self, tokens: int, fill: Callable[[torch.Tensor, int], None]) -> bool:
        """Has room for one more after the first `tokens` tokens of its prompt and its answer, and holds those, which
        are read elsewhere; false if there are no pages for them.

        Args:
            fill: writes keys and values of the tokens from a place on, up to that number, into these pages.
        """
        if pages_for(tokens + 1) > self._reserved and not (
            self._reserve_up_to(tokens + self._ahead) or self._reserve_up_to(tokens + 1)
        ):
            return False
        if tokens > self.held:
            fill(self.piece(tokens - self.held).pages, self.held)
            self.has_read(tokens - self.held)
        return True

    @property
    def pages(self) -> torch.Tensor:
        """Its pages in order, int32."""
        return self._table[: len(self._pages)]

    @property
    def read(self) -> list[int]:
        """The tokens that are in its pages."""
        return (self.prompt[: self._prompt_tokens] + self.sequence.ids)[: self.held]

    def share_pages(self) -> None:
        """Takes over pages of rows whose prompts have the same beginning, as far as there are any."""
        while self.following is not None and self.held == len(self._pages) * PAGE_TOKENS:
            was_idle = self._pool.is_idle(self.following)
            page = self._pool.share(self.following)
            if page is None:
                return
            if not was_idle:
                self._pool.give_back_reservation(1)
            self._add(page)
            self.held += PAGE_TOKENS
            if self._once_read < self.held <= self._prompt_tokens:
                self.shared += PAGE_TOKENS
            self._published, self._prefix = self.held, self.following
            self._look_ahead()

    def bring_kept(self, kept: KeptPrefixes, layers: Sequence[PagedLayer]) -> None:
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

    def offer(self, kept: KeptPrefixes, layers: Sequence[PagedLayer]) -> None:
        """Has all that it holds kept, for its pages are going to be used by others."""
        layout = BlockLayout.of_pages(layers)
        copy = from_pages(layers, self.pages, layout) if layout is not None else None
        kept.take(self.read, layout, copy, self.request.chat)

    def piece(self, tokens: int) -> Piece:
        """Its next tokens, with pages for them."""
        while len(self._pages) < pages_for(self.held + tokens):
            self._add(self._pool.take())
        return Piece(self._table, self.held, tokens)

    def next_ids(self, tokens: int) -> list[int]:
        """The ids of its next tokens."""
        return self.prompt[self.held : self.held + tokens] if self.is_reading else self.sequence.ids[-1:]

    def has_read(self, tokens: int) -> None:
        """Records that its next tokens are in their pages, and offers complete pages for sharing."""
        self.held += tokens
        while self.held >= self._published + PAGE_TOKENS:
            begin, end = self._published, self._published + PAGE_TOKENS
            prefix = self.following or prefix_after(self._prefix, self._tokens(begin, end))
            self._pool.publish(self._pages[begin // PAGE_TOKENS], prefix)
            self._published, self._prefix = end, prefix
            self._look_ahead()

    def answer(self, reason: FinishReason | Literal["failed"], error: EngineError | None = None) -> BatchAnswer:
        """The row's outcome."""
        ids = self.sequence.ids
        return BatchAnswer(
            self.request.row,
            self.sequence.text,
            reason,
            self._prompt_tokens,
            len(ids),
            tuple(ids),
            self.shared,
            error,
            self.sequence.stopped_by,
            self.kept.ram,
            self.kept.disk,
        )

    def close(self) -> None:
        """Returns its pages."""
        self._pool.give_back_reservation(self._reserved - len(self._pages))
        for page in self._pages:
            self._pool.release(page)
        self._pages = []
        self._reserved = 0

    def _reserve_up_to(self, tokens: int) -> bool:
        pages = min(pages_for(tokens), len(self._table))
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
        self.following = prefix_after(self._prefix, self.prompt[begin:end]) if end < len(self.prompt) else None
