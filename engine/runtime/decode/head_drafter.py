"""Guesses of a model's own draft head, from the hidden states that the model has computed anyway.

The head attends to all tokens that it was given, so it is given the prompt as well.  After a single token it guesses
one: what it would guess after its own guess comes true too seldom for what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from engine.common import clock
from engine.runtime.decode.speculation import Experience, Guess
from engine.runtime.draft_head import DraftHead

if TYPE_CHECKING:
    from engine.runtime.schedule.row import PagedRow

_KINDS = (0.3, 0.6, 0.85)
"""How sure of itself the head is, from which a guess is more likely than with less."""
_PRIORS = (0.2, 0.45, 0.7, 0.9)
_MOST_WAITING = 32
"""Tokens that the head is given together at the latest; a prompt's come in its chunks."""
_NEWEST = 0.25


class HeadDrafter:
    """Of one sequence.

    Args:
        model: that has the head.
    """

    def __init__(self, model: Any, head: DraftHead) -> None:
        self._head = head
        self._embed, self._logits = model.get_input_embeddings(), model.get_output_embeddings()
        self._rotary = model.get_decoder().rotary_emb
        self._experience = Experience(_PRIORS)
        self.takes_s = 0.0
        self._next: int | None = None
        self.clear()

    def clear(self) -> None:
        self._ids: list[int] = []
        self._given: list[int] = []
        """Positions of the tokens whose hidden states the head holds, in order; it need not be all of them."""
        self._waiting: list[tuple[int, torch.Tensor]] = []
        """Positions, and hidden states [1, 1, H] that the head was not given yet."""
        self._cache = DynamicCache()
        self._cache.layers = [DynamicLayer()]

    def take(self, start: int, ids: Sequence[int], hidden: torch.Tensor, of: PagedRow | None = None) -> None:
        """The hidden states [1, q, H] of tokens from position `start` on.

        Args:
            of: knows the tokens before them, if others may have computed some.
        """
        self._forget(start, ids[0])
        if len(self._ids) != start and of is not None:
            self.clear()
            self._ids = list(of.read)
        self._ids.extend(ids)
        self._waiting += [(start + at, hidden[:, at : at + 1]) for at in range(hidden.shape[1])]
        if len(self._waiting) > _MOST_WAITING:
            self._give(self._ids)

    def take_back(self, tokens: int) -> None:
        self._forget(len(self._ids) - tokens, None)

    def append(self, token_id: int) -> None:
        self._next = token_id

    def hopes(self) -> float:
        return self._experience.overall()

    def guess(self, most: int) -> Guess | None:
        if self._next is None or most < 1 or not self._waiting or self._waiting[-1][0] != len(self._ids) - 1:
            return None
        begun_s = clock.now()
        out = self._give([*self._ids, self._next])
        assert out is not None
        likely, token = self._logits(out[:, -1:])[0, -1].float().softmax(-1).max(-1)
        kind = sum(float(likely) >= least for least in _KINDS)
        took_s = clock.now() - begun_s
        self.takes_s += (_NEWEST if self.takes_s else 1.0) * (took_s - self.takes_s)
        return Guess((int(token),), (self._experience.chance(kind),), (kind,))

    def learn(self, guess: Guess, came_true: int) -> None:
        self._experience.learn(guess.kinds, came_true)

    def _give(self, ids: Sequence[int]) -> torch.Tensor | None:
        """Gives the head what waits and is followed by one of `ids`; its output for these [1, q, H]."""
        ready = [(position, hidden) for position, hidden in self._waiting if position + 1 < len(ids)]
        if not ready:
            return None
        self._waiting = self._waiting[len(ready) :]
        after = [position + 1 for position, _ in ready]
        device = ready[0][1].device
        embedded = self._embed(torch.tensor([[ids[position] for position in after]], device=device))
        positions = torch.tensor([after], device=device)
        hidden = torch.cat([state for _, state in ready], dim=1)
        self._given += [position for position, _ in ready]
        out: torch.Tensor = self._head(embedded, hidden, self._rotary(embedded, positions), positions, self._cache)
        return out

    def _forget(self, tokens: int, next_id: int | None) -> None:
        """Only so many tokens are left, of which the last is followed by `next_id`."""
        was = self._ids[tokens] if tokens < len(self._ids) else self._next
        keeps_last = next_id is not None and was == next_id
        del self._ids[tokens:]
        self._waiting = [(position, hidden) for position, hidden in self._waiting if position < tokens]
        wrong = sum(position >= (tokens if keeps_last else tokens - 1) for position in self._given)
        if wrong:
            self._cache.crop(-wrong)
            del self._given[-wrong:]
