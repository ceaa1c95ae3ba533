"""What may come next, guessed from a place in the prompt or the answer that reads like the end of the answer.

Prompt lookup (Saxena 2023; Yang et al. 2023, "Inference with Reference"): summaries, edits and quotations repeat whole
runs of tokens, and after the last few of one of them the run most likely goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.runtime.decode.drafter import Experience, Guess

_FEWEST = 2
"""Tokens that must agree."""
_PLACES = 8
"""Places that are compared, the latest first."""
_LONGEST = 16
"""More tokens that agree say nothing more."""

_KINDS = (3, 4, 6, 10, 16)
"""Lengths of agreement from which a guess is more likely than with fewer."""
_PRIORS = (0.25, 0.45, 0.6, 0.75, 0.85, 0.9)
"""How likely a token is to come true after fewer than 3 that agree, 3, 4 or 5, and so on."""


class PromptLookup:
    """Guesses for one answer.

    Args:
        ids: tokens that it continues.
    """

    takes_s = 0.0

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}
        """Two tokens -> where what followed them is, the latest last."""
        self._experience = Experience(_PRIORS)
        for token in ids:
            self.append(token)

    def append(self, token_id: int) -> None:
        """The answer has one token more, or its prompt."""
        ids = self._ids
        if len(ids) >= _FEWEST:
            # Only now: the end of the text must not be found itself.
            pair = (ids[-2], ids[-1])
            found = self._after.setdefault(pair, [])
            found.append(len(ids))
            if len(found) > _PLACES:
                del found[0]
        ids.append(token_id)

    def hopes(self) -> float:
        """Looking costs nothing."""
        return 1.0

    def guess(self, most: int) -> Guess | None:
        """See `Drafter.guess`."""
        ids = self._ids
        found = self._after.get((ids[-2], ids[-1])) if len(ids) >= _FEWEST else None
        if not found:
            return None
        agreed, place = max((self._agreed(place), place) for place in found)
        guessed: list[int] = []
        for at in range(place, place + most):
            # Beyond the end of the text the guess itself goes on: what repeats does so with the same period.
            guessed.append(ids[at] if at < len(ids) else guessed[at - len(ids)])
        kinds = tuple(_kind(agreed + number) for number in range(most))
        chances, chance = [], 1.0
        for kind in kinds:
            chance *= self._experience.chance(kind)
            chances.append(chance)
        return Guess(tuple(guessed), tuple(chances), kinds)

    def learn(self, guess: Guess, came_true: int) -> None:
        """See `Drafter.learn`."""
        self._experience.learn(guess.kinds, came_true)

    def _agreed(self, place: int) -> int:
        """How many tokens before `place` are those at the end."""
        ids, agreed = self._ids, _FEWEST
        while agreed < min(_LONGEST, place) and ids[place - 1 - agreed] == ids[-1 - agreed]:
            agreed += 1
        return agreed


def _kind(agreed: int) -> int:
    return sum(agreed >= least for least in _KINDS)
