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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from engine.common import clock
from engine.common.costs import Cost, CostModel
from engine.runtime.decode.sequence import of_one
from engine.runtime.decode.step_model import MOST_ROWS
from engine.runtime.draft_head import DraftHead

if TYPE_CHECKING:
    from engine.runtime.schedule.row import PagedRow

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
        return 1.0

    def guess(self, most: int) -> Guess | None:
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
        self._experience.learn(guess.kinds, came_true)

    def _agreed(self, place: int) -> int:
        """How many tokens before `place` are those at the end."""
        ids, agreed = self._ids, _FEWEST
        while agreed < min(_LONGEST, place) and ids[place - 1 - agreed] == ids[-1 - agreed]:
            agreed += 1
        return agreed


def _kind(agreed: int) -> int:
    return sum(agreed >= least for least in _KINDS)


_SURE = (0.3, 0.6, 0.85)
"""How sure of itself a head is, from which a guess is more likely than with less."""
_HEAD_PRIORS = (0.2, 0.45, 0.7, 0.9)
_MOST_WAITING = 32
"""Tokens that a head is given together at the latest; a prompt's come in its chunks."""


class HeadDrafter:
    """Guesses of a model's own draft head for one sequence, from the hidden states that the model has computed anyway.

    The head attends to all tokens that it was given, so it is given the prompt as well.  After a single token it
    guesses one: what it would guess after its own guess comes true too seldom for what it costs.

    Args:
        model: that has the head.
    """

    def __init__(self, model: Any, head: DraftHead) -> None:
        self._head = head
        self._embed, self._logits = model.get_input_embeddings(), model.get_output_embeddings()
        self._rotary = model.get_decoder().rotary_emb
        self._experience = Experience(_HEAD_PRIORS)
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
        kind = sum(float(likely) >= least for least in _SURE)
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


_PRIOR_PRICE = 0.4
"""What each further token of a step is taken to cost, in single steps, before it was measured: on the high side."""
_NEWEST = 0.25
"""Weight of the newest measurement in an average."""
_WORTH = 1.05
"""How much faster than single steps a guess must be expected to be."""
_MOST_LOST = 0.015
"""Share of an answer's time that guesses may have lost, over what they have gained."""
_FIRST_LOST = 0.5
"""What they may lose besides, in single steps: otherwise none would ever be tried."""
_PROBABLE = 0.5
"""A guess that is this likely is tried now and then although it does not seem to pay: prices may have changed."""
_NEAREST_PROBE, _FARTHEST_PROBE = 16, 1024
"""Tokens from one such try to the next: twice as many after each that lost."""


class StepPrices:
    """What steps of several tokens cost with one model, measured; it outlives an answer."""

    def __init__(self) -> None:
        self._costs = CostModel()
        self._costs.learn(Cost.STEP, weight=_NEWEST, further=_PRIOR_PRICE, raw=1)
        self._costs.learn(Cost.TAKING_BACK, weight=_NEWEST)
        self.single_s = 0.0
        """Seconds of a step of one token, lately."""

    def took(self, tokens: int, seconds: float) -> None:
        self._costs.observe(Cost.STEP, tokens, seconds)
        self.single_s = self._costs.predict(Cost.STEP)

    def took_back(self, seconds: float) -> None:
        """Forgetting the end of a step has taken so long, whatever its length."""
        self._costs.observe(Cost.TAKING_BACK, 1, seconds)

    def ratio(self, tokens: int) -> float:
        """Time of a step of so many tokens over that of one."""
        return self._costs.ratio(Cost.STEP, tokens)

    @property
    def back(self) -> float:
        """Time of forgetting what did not come true over that of a step of one token."""
        return self._costs.predict(Cost.TAKING_BACK) / self.single_s if self.single_s else 0.0


class Speculation:
    """Which tokens of one answer are worth trying, and what came of those that were.

    Args:
        prefix: tokens that the answer continues.
        most_tokens: of the answer.
        drafters: what guesses besides their text.

    Attributes:
        guessed: tokens that were tried, and `accepted` of them were what the answer goes on with.
    """

    def __init__(
        self, prices: StepPrices, prefix: Sequence[int], most_tokens: int, drafters: Sequence[Drafter] = ()
    ) -> None:
        self._prices = prices
        self._drafters: list[Drafter] = [PromptLookup(prefix), *drafters]
        self._drafter = self._drafters[0]
        self._left = most_tokens
        self._begun_s = clock.now()
        self._lost_s = 0.0
        self._since_probe, self._to_probe = 0, _NEAREST_PROBE
        self.guessed = self.accepted = 0

    def append(self, ids: Sequence[int]) -> None:
        self._left -= len(ids)
        self._since_probe += len(ids)
        with of_one():
            for drafter in self._drafters:
                for token_id in ids:
                    drafter.append(token_id)

    def guess(self, takes: Callable[[int], bool], *, rows: int = 1, tokens: int = 1) -> Guess | None:
        """The guess that promises most for its price, if any promises enough and may still be lost.

        Args:
            takes: whether a step computes so many tokens of the answer.
            rows: sequences that share the step, and the tokens that it has without this guess.
        """
        begun_s = clock.now()
        with of_one():
            guess = self._worthwhile(takes, rows, tokens)
        if guess is None:
            self._lost_s += clock.now() - begun_s
        else:
            self.guessed += len(guess.ids)
        return guess

    def settle(self, guess: Guess, came_true: int, seconds: float, *, rows: int = 1, tokens: int = 1) -> None:
        """So many tokens of a guess came true, in a step that took so long.

        Args:
            rows, tokens: as for `guess`.
        """
        prices = self._prices
        self.accepted += came_true
        with of_one():
            self._drafter.learn(guess, came_true)
        without_s = prices.single_s
        if tokens > 1:
            without_s = seconds * prices.ratio(tokens) / prices.ratio(tokens + len(guess.ids))
        lost_s = seconds - without_s - came_true * prices.single_s * prices.ratio(rows) / rows
        self._lost_s += lost_s
        self._to_probe = _NEAREST_PROBE if lost_s < 0 else min(2 * self._to_probe, _FARTHEST_PROBE)
        self._since_probe = 0

    def took_back(self, seconds: float) -> None:
        """A step that computes once more what came true took so long."""
        lost_s = max(0.0, seconds - self._prices.single_s)
        self._prices.took_back(lost_s)
        self._lost_s += lost_s

    def _worthwhile(self, can_take: Callable[[int], bool], rows: int, tokens: int) -> Guess | None:
        prices = self._prices
        single_s = prices.single_s
        most = min(MOST_ROWS - tokens, self._left - 1)
        if most < 1 or not single_s:
            return None
        may_lose = _FIRST_LOST + (_MOST_LOST * (clock.now() - self._begun_s) - self._lost_s) / single_s
        best: Guess | None = None
        best_rate = _WORTH
        for drafter in self._drafters:
            takes = drafter.takes_s / single_s
            hopes = drafter.hopes()
            if takes and (takes > may_lose or (best is not None and best.chances[0] >= hopes)):
                continue
            is_due = self._since_probe >= self._to_probe
            if takes and not is_due and 1 + hopes < _WORTH * (prices.ratio(2) + takes):
                continue
            guess = drafter.guess(most)
            tried, rate = 0, 0.0
            if guess is not None:
                tried, rate = self._tried(guess, takes, may_lose, rows, tokens)
                while tried and not can_take(1 + tried):
                    tried -= 1
            if guess is None or not tried:
                continue
            if rate <= best_rate and not (best is None and is_due and guess.chances[0] >= _PROBABLE):
                continue
            best, best_rate, self._drafter = guess.shortened(tried), rate, drafter
        return best

    def _tried(self, guess: Guess, takes: float, may_lose: float, rows: int, tokens: int) -> tuple[int, float]:
        """How many of a guess's tokens to try, and how much faster than a step without them that should be.

        Args:
            takes: what the guess took, in single steps.
            may_lose: most single steps that trying may lose.
        """
        prices = self._prices
        without = prices.ratio(tokens)
        best, best_rate, gained = 0, 0.0, float(rows)
        for tried, chance in enumerate(guess.chances, start=1):
            gained += chance
            price = prices.ratio(tokens + tried) + takes + (1 - chance) * prices.back
            rate = gained / rows * without / price
            if price - without <= may_lose and rate > best_rate:
                best, best_rate = tried, rate
        return best, best_rate
