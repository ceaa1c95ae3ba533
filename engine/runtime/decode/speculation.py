"""Answers that quote: the next tokens are guessed from what was read and written, and tried in one step.

A step of several tokens reads the weights once for all of them, but with experts it reads more of them, so it can cost
several times as much as a step of one (Cascade, Saxena et al. 2025).  Both its price and how often guesses come true
are measured while answering, and a guess is tried only where it pays.

The answer does not change.  Each token is chosen from its own logits, exactly as without guesses, and a guess only
decides whether the logits after it are there already.  For a guess that is certain of itself this is speculative
sampling (Leviathan et al. 2023, section 2.3): it is accepted with its probability p, and otherwise another token is
drawn with its probability over 1 - p.  As each token takes one number from the same source of randomness, seeds repeat
as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import torch

from engine.runtime.decode.prompt_lookup import Guess, PromptLookup
from engine.runtime.decode.step_model import MOST_ROWS

_PRIOR_PRICE = 0.5
"""What each further token of a step is taken to cost, in single steps, before it was measured: on the high side."""
_NEWEST = 0.25
"""Weight of the newest measurement in an average."""
_OUTLIER = 2.0
"""A time this much above or below the average counts as if it were only so much: the machine was busy."""
_WORTH = 1.05
"""How much faster than single steps a guess must be expected to be."""
_MOST_LOST = 0.02
"""Share of an answer's time that guesses may have lost, over what they have gained."""
_FIRST_LOST = 1.0
"""What they may lose besides, in single steps: otherwise none would ever be tried."""


class SeveralSteps(Protocol):
    """A session whose cache takes several tokens at once, and lets go of them again."""

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """Appends one token [1, 1]; logits [1, V] after it."""

    def takes(self, tokens: int) -> bool:
        """Whether `several` computes so many tokens now, each as `step` would."""

    def several(self, ids: Sequence[int]) -> torch.Tensor:
        """Appends tokens; logits [q, V] after each of them."""

    def take_back(self, tokens: int) -> None:
        """Forgets the last tokens."""


class StepPrices:
    """What steps of several tokens cost with one model, measured; it outlives an answer."""

    def __init__(self) -> None:
        self.single_s = 0.0
        """Seconds of a step of one token, lately."""
        self._ratios: dict[int, float] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if tokens == 1:
            self.single_s = _averaged(self.single_s, seconds)
        elif self.single_s:
            self._ratios[tokens] = _averaged(self._ratios.get(tokens, 0.0), seconds / self.single_s)

    def ratio(self, tokens: int) -> float:
        """Time of a step of so many tokens over that of one."""
        known = self._ratios.get(tokens)
        if known is not None or tokens == 1:
            return known or 1.0
        # From the nearest that was measured, the larger one of two: further tokens cost less and less.
        nearest = min(self._ratios, key=lambda other: (abs(other - tokens), -other), default=None)
        each = _PRIOR_PRICE if nearest is None else max(0.0, self._ratios[nearest] - 1) / (nearest - 1)
        return 1 + each * (tokens - 1)


class Speculation:
    """The steps of one answer, for `decode` in place of its session's.

    Args:
        session: holds `prefix` but for nothing: the answer's first logits are there.
        prefix: tokens that the answer continues.
        most_tokens: of the answer.

    Attributes:
        guessed: tokens that were tried, and `accepted` of them were what the answer goes on with.
    """

    def __init__(self, session: SeveralSteps, prices: StepPrices, prefix: Sequence[int], most_tokens: int) -> None:
        self._session, self._prices = session, prices
        self._lookup = PromptLookup(prefix)
        self._left = most_tokens
        self._guess: Guess | None = None
        self._rows = torch.empty(0)
        self._at = 0
        self._begun_s = perf_counter()
        self._step_s = 0.0
        self._lost_s = 0.0
        self.guessed = self.accepted = 0

    def foresaw(self, token_id: int) -> bool:
        """Whether the logits after this token are there already."""
        guess = self._guess
        return guess is not None and self._at < len(guess.ids) and guess.ids[self._at] == token_id

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """The answer's next token; logits [1, V] after it."""
        self._left -= 1
        self._lookup.append(token_id)
        if self.foresaw(token_id):
            self._at += 1
            return self._rows[self._at : self._at + 1]
        self.settle()
        guess = self._worthwhile()
        begun_s = perf_counter()
        if guess is None:
            logits = self._session.step(token, token_id)
            self._prices.took(1, perf_counter() - begun_s)
            return logits
        self._rows = self._session.several([token_id, *guess.ids])
        self._step_s = perf_counter() - begun_s
        self._prices.took(1 + len(guess.ids), self._step_s)
        self._guess, self._at = guess, 0
        self.guessed += len(guess.ids)
        return self._rows[:1]

    def settle(self) -> None:
        """Takes back what the answer does not go on with, and learns from it.  Harmless if repeated."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        tried, came_true = len(guess.ids), self._at
        if came_true < tried:
            self._session.take_back(tried - came_true)
        self.accepted += came_true
        self._lookup.learn(guess, came_true)
        self._lost_s += self._step_s - (1 + came_true) * self._prices.single_s

    def _worthwhile(self) -> Guess | None:
        """The guess that promises most for its price, if any promises enough and may still be lost."""
        prices, single_s = self._prices, self._prices.single_s
        most = min(MOST_ROWS, self._left) - 1
        if most < 1 or not single_s:
            return None
        guess = self._lookup.guess(most)
        if guess is None:
            return None
        may_lose_s = _FIRST_LOST * single_s + _MOST_LOST * (perf_counter() - self._begun_s) - self._lost_s
        best, best_rate, gained = 0, _WORTH, 1.0
        for tried, chance in enumerate(guess.chances, start=1):
            gained += chance
            price = prices.ratio(1 + tried)
            if (price - 1) * single_s <= may_lose_s and gained / price > best_rate:
                best, best_rate = tried, gained / price
        while best and not self._session.takes(1 + best):
            best -= 1
        return guess.shortened(best) if best else None


def _averaged(average: float, value: float) -> float:
    if not average:
        return value
    value = min(max(value, average / _OUTLIER), average * _OUTLIER)
    return (1 - _NEWEST) * average + _NEWEST * value
