"""What guesses the next tokens of an answer, and how much its guesses are worth by experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_WEIGHT = 4.0
"""How many guesses a prior counts for."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that may come next.

    Attributes:
        ids: those.
        chances: [i] how likely the first i + 1 of them are to come true.
        kinds: [i] of what kind the guess of token i is, for the drafter's experience.
    """

    ids: tuple[int, ...]
    chances: tuple[float, ...]
    kinds: tuple[int, ...]

    def shortened(self, tokens: int) -> Guess:
        return Guess(self.ids[:tokens], self.chances[:tokens], self.kinds[:tokens])


class Drafter(Protocol):
    """Guesses for one answer.

    Attributes:
        takes_s: seconds that a guess takes lately.
    """

    takes_s: float

    def append(self, token_id: int) -> None:
        """The answer has one token more."""

    def hopes(self) -> float:
        """How likely its next guess is to come true, as far as that is known before it is made."""

    def guess(self, most: int) -> Guess | None:
        """Up to `most` tokens that may come next, or `None` if it knows of none."""

    def learn(self, guess: Guess, came_true: int) -> None:
        """So many of a guess's tokens, from the first on, came true."""


class Experience:
    """How often guesses of each kind came true, beginning with what is taken to be so."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._true = [_WEIGHT * prior for prior in priors]
        self._tried = [_WEIGHT] * len(priors)

    def chance(self, kind: int) -> float:
        """That a token comes true if those before it did."""
        return self._true[kind] / self._tried[kind]

    def overall(self) -> float:
        return sum(self._true) / sum(self._tried)

    def learn(self, kinds: Sequence[int], came_true: int) -> None:
        """So many tokens of a guess, from the first on, came true."""
        for number, kind in enumerate(kinds[: came_true + 1]):
            self._tried[kind] += 1
            self._true[kind] += number < came_true
