"""A row under way: its prompt, its pages, and its answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from engine.common.chat import FinishReason
from engine.common.errors import EngineError
from engine.kernels.native.paged_attention import PAGE_TOKENS, Piece
from engine.runtime.batch.page_pool import NO_PREFIX, PagePool, pages_for, prefix_after
from engine.runtime.batch.request import BatchAnswer, BatchRequest
from engine.runtime.decoding import Limits
from engine.runtime.detokenizer import IncrementalDetokenizer
from engine.runtime.sampling import greedy_token, make_chooser, penalise_repetition
from engine.runtime.stopping import StopStrings


class RowText:
    """An answer, token by token: what ends it, and its text so far."""

    def __init__(self, request: BatchRequest, prompt: Sequence[int], limits: Limits, tokenizer: Any) -> None:
        self._request, self._limits = request, limits
        self._prompt = prompt
        sampling = request.sampling
        self._choose = make_chooser(sampling, torch.device("cpu"))
        self.is_plainly_greedy = (
            self._choose is greedy_token and sampling.repetition_penalty == 1 and request.constraint is None
        )
        """Whether the likeliest token is all that counts."""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(limits.stop)
        self._parts: list[str] = []
        self.ids: list[int] = []

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from logits [V]."""
        request = self._request
        logits = logits[None].float()
        if request.sampling.repetition_penalty != 1:
            seen = torch.tensor([[*self._prompt, *self.ids]])
            logits = penalise_repetition(logits, seen, request.sampling.repetition_penalty)
        if request.constraint is not None:
            logits = request.constraint.restrict(logits[0])[None]
        return int(self._choose(logits))

    def take(self, token: int) -> FinishReason | None:
        """Adds a token; why the answer is over with it, if it is."""
        limits, constraint = self._limits, self._request.constraint
        self.ids.append(token)
        if token in limits.end_ids:
            return self._flush("stop")
        complete = constraint is not None and constraint.accept(token)
        text, stopped = self._stops.feed(self._detokenizer.feed(token))
        self._parts.append(text)
        if stopped:
            return "stop_string"
        if complete:
            return self._flush("stop")
        if len(self.ids) >= limits.max_tokens:
            return self._flush(limits.reached)
        return None

    def text(self) -> str:
        """The answer so far."""
        return "".join(self._parts)

    def _flush(self, reason: FinishReason) -> FinishReason:
        text, stopped = self._stops.feed(self._detokenizer.flush())
        self._parts.append(text)
        if stopped:
            return "stop_string"
        self._parts.append(self._stops.flush())
        return reason


class PagedRow:
    """A row whose keys and values lie in pages.

    It has reserved the pages of its prompt and of the longest answer; it takes them as tokens come.

    Args:
        prompt: its tokens, one at least.
    """

    def __init__(
        self, request: BatchRequest, prompt: list[int], text: RowText, most_tokens: int, pool: PagePool
    ) -> None:
        self.request, self.prompt, self.text = request, prompt, text
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
        return self.prompt[self.held : self.held + tokens] if self.is_reading else self.text.ids[-1:]

    def has_read(self, tokens: int) -> None:
        """The tokens of that piece are in their pages; whole pages of the prompt are there for others."""
        self.held += tokens
        while self.following is not None and self.held >= self._following_end:
            self._pool.publish(self._pages[self._following_end // PAGE_TOKENS - 1], self.following)
            self._prefix = self.following
            self._look_ahead()

    def answer(self, reason: FinishReason | Literal["failed"], error: EngineError | None = None) -> BatchAnswer:
        """What came of it."""
        ids = self.text.ids
        return BatchAnswer(
            self.request.row, self.text.text(), reason, len(self.prompt), len(ids), tuple(ids), self.shared, error
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
