"""One way out of several, chosen again for every step of some work, and learnt from what the steps take.

What is predicted decides until it is measured.  The way in use is compared with the others by short trials next to its
own steps, so that whatever makes all of them slower for a while (another program, heat, a longer context) says nothing
of any.  All that a trial loses is counted: neither the steps nor the time of trials exceed a fiftieth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Final, Generic, TypeVar, cast

Arm = TypeVar("Arm", bound=Hashable)

TRIALS: Final = 0.02
"""Share of the steps, and of their time, that trials may take."""
_LATELY: Final = 9
"""Steps of the way in use whose median is what such steps take of late."""
_NEWEST: Final = 3
"""Of these, the newest: where their median differs before a trial, or after it, something is changing, and it says
nothing."""
_SPREAD: Final = 0.05
"""Weight of the newest step in how far single steps are from what they take."""
_HELD_UP: Final = math.log(2)
"""A step counts as no longer, and no shorter, than so much: something else has run meanwhile."""
_FARTHEST: Final = math.log(4)
"""The same in a trial."""
_KEPT: Final = 5
"""Tried steps of a way whose median counts: two of them may have been held up.  One that nobody had tried before is not
left sooner."""
_FEWEST: Final = 3
"""Tried steps without which nothing is thought to be measured: one of two may have been held up."""
_SURE: Final = 2.0
"""Standard errors by which another way has to be better, and may be thought better when it is tried."""
_UNKNOWN: Final = 0.5
"""Standard deviation of the logarithm of what a way takes over what is predicted, before it was tried."""
_AGES: Final = 5e-4
"""Variance that each step adds to what was found of a way: nothing is ruled out for ever."""
_LEAST_S: Final = 1e-9


def clearly_least(costs: Mapping[Arm, float], present: Arm | None, margin: float = 0.0, least: float = 0.0) -> Arm:
    """The way that costs least; the present one stays unless another costs less by more than chance.

    Args:
        margin: that is a share of the present one's costs.
        least: and so much more.
    """
    best = min(costs, key=lambda arm: costs[arm])
    mine = cast("Arm", present)
    if mine not in costs or costs[best] < (1 - margin) * costs[mine] - least:
        return best
    return mine


class _Found(Generic[Arm]):
    """What is known of a way: logarithms of what it takes, over its prediction and the common level."""

    __slots__ = ("offset", "tried", "tried_at")

    def __init__(self) -> None:
        self.offset = 0.0
        self.tried: deque[float] = deque(maxlen=_KEPT)
        self.tried_at = 0

    @property
    def is_measured(self) -> bool:
        return len(self.tried) >= _FEWEST

    def add(self, beyond: float) -> None:
        self.tried.append(min(max(beyond, -_FARTHEST), _FARTHEST))
        if self.is_measured:
            self.offset = median(self.tried)

    def variance(self, spread: float) -> float:
        """Of `offset`, if single steps have this variance."""
        own = 1.6 * spread / len(self.tried) if self.is_measured else _UNKNOWN**2
        return own + 1.6 * spread / _LATELY


class Choice(Generic[Arm]):
    """The way of each step.

    Args:
        arms: all ways, the preferred ones first.
        margin: share of a step's time by which another way has to be better to be taken.
        warm: steps after a change of way that say nothing: they find what the way before has left.
        run: steps of a trial that count.
        first: steps after which it is believed how far the first way is from its prediction.
        in_common: share of that which is expected of untried ways, too: all of it where predictions only say which of
            them is thought better.
        is_busy: whether other programs hold up what is being measured; nothing is tried meanwhile, nor learnt of ways.

    Attributes:
        arms: all ways.
        present: the way in use, if there has been a step.
        steps, trials: how many there were, and how many of them were tried.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        margin: float = 0.05,
        warm: int = 0,
        run: int = 2,
        first: int = 8,
        in_common: float = 0.5,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.arms = tuple(arms)
        self._found: dict[Arm, _Found[Arm]] = {arm: _Found() for arm in arms}
        self._margin, self._is_busy = -math.log1p(-margin), is_busy
        self._warm, self._run, self._first, self._own = warm, run, first, 1 - in_common
        self.present: Arm | None = None
        self.steps = self.trials = 0
        self._usual_s = self._lost_s = self._expected_s = 0.0
        self._pending: deque[tuple[Arm, float]] = deque(maxlen=_LATELY)
        """Of the last trial, until it is known what steps of the way in use take after it."""
        self._lately: deque[float] = deque(maxlen=_LATELY)
        self._level, self._levelled, self._spread = 0.0, 0, 0.0
        self._trial: Arm | None = None
        self._left = 0
        self._last: Arm | None = None
        self._taken: Arm | None = None
        self._in_turn = self._proving = self._absent = 0

    @property
    def is_learning(self) -> bool:
        """Whether the step that was taken last says something new: others need not be timed, where that costs time."""
        return self._levelled < self._first or self._proving > 0 or self.is_trying

    @property
    def is_trying(self) -> bool:
        """Whether the step that was taken last is a trial."""
        return self._taken != self.present

    def price(self, arm: Arm, predicted_s: float) -> float:
        """What a step should take in a way for which this is predicted."""
        return predicted_s * math.exp(self._level + self._found[arm].offset)

    def take(self, predicted: Mapping[Arm, float], steps: int = 1) -> Arm:
        """The way of the next step.

        Args:
            predicted: seconds of it in every way that there is this time.
            steps: since this was asked last.
        """
        self.steps += steps
        found, log = self._found, math.log
        scores = {arm: log(seconds or _LEAST_S) + found[arm].offset for arm, seconds in predicted.items()}
        best = min(scores, key=scores.__getitem__)
        present = self.present if self.present is not None else best
        self._absent = 0 if present in scores else self._absent + 1
        if self._absent > _LATELY:
            self._change_to(best)
        elif self._absent:  # this time it does not exist
            self._trial, self._expected_s, self._taken = None, 0.0, best
            return best
        present = self.present if self.present is not None else best
        if self._trial not in scores:
            self._trial = None
            if best != present and self._is_better(best, scores):
                self._change_to(best)
                present = best
            elif self.trials + self._warm + self._run <= TRIALS * self.steps:
                self._trial, self._left = self._worth_trying(scores, predicted), self._warm + self._run
        self.present = present
        taken = present if self._trial is None else self._trial
        if self._trial is not None:
            self._expected_s = self.price(present, predicted[present])
            self.trials += 1
            self._left -= 1
            if not self._left:
                self._trial = None
        self._taken = taken
        return taken

    def observe(self, arm: Arm, seconds: float, predicted_s: float) -> None:
        """A step took so long in this way, for which so much was predicted."""
        if not (0 < seconds < math.inf and predicted_s > 0):
            return
        self._in_turn = self._in_turn + 1 if arm == self._last else 1
        self._last = arm
        if self._in_turn <= self._warm:  # what changing takes counts whole, there and back
            self._lost_s += max(0.0, seconds - self._usual_s) if self._levelled else 0.0
            return
        if arm != self.present:
            held_up_s = math.exp(_FARTHEST) * self._expected_s
            self._lost_s += max(0.0, min(seconds, held_up_s) - self._expected_s)
        found, beyond = self._found[arm], math.log(seconds / predicted_s)
        if arm != self.present:
            self._pending.append((arm, beyond))
            return
        if self._proving:
            self._proving -= 1
            found.add(beyond - self._level)
            return
        self._levelled += 1
        level, beyond = self._level, beyond - found.offset
        off = min(max(beyond - level, -_HELD_UP), _HELD_UP) if self._lately else 0.0
        self._lately.append(beyond)
        self._level = median(self._lately)
        self._spread += max(_SPREAD, 1 / self._levelled) * (off * off - self._spread)
        self._usual_s = predicted_s * math.exp(self._level + found.offset)
        if self._levelled == self._first:
            for other in self._found.values():
                if not other.is_measured and other is not found:
                    other.offset = -self._own * (self._level + found.offset)
            found.tried.extend([found.offset] * _KEPT)
        if self._pending and self._in_turn - self._warm >= _NEWEST:
            self._learn_of_trial()

    def _change_to(self, arm: Arm) -> None:
        if self.present is not None:
            self._found[self.present].tried_at = self.steps
        self.present, self._absent = arm, 0
        self._pending.clear()
        if self._levelled < self._first:  # too little is known of the one before to compare it with
            self._lately.clear()
            self._levelled = 0
        elif not self._found[arm].is_measured:
            self._proving = _KEPT  # against what steps took until now

    @property
    def _is_steady(self) -> bool:
        """Whether the newest steps of the way in use take as long as those before."""
        newest = median(list(self._lately)[-_NEWEST:])
        return abs(newest - self._level) <= max(self._margin, _SURE * math.sqrt(self._spread))

    def _learn_of_trial(self) -> None:
        """A trial counts if steps of the way in use took the same before and after it."""
        if self._is_steady and not self._is_busy():
            for arm, beyond in self._pending:
                self._found[arm].add(beyond - self._level)
        self._pending.clear()

    def _is_better(self, arm: Arm, scores: Mapping[Arm, float]) -> bool:
        """Whether this way is clearly better than the present one, by what was measured where that was."""
        if self.present is None or arm == self.present or self._proving:
            return False
        found = self._found[arm]
        error = _SURE * math.sqrt(found.variance(self._spread)) if found.is_measured else 0.0
        return scores[self.present] - scores[arm] > max(self._margin, error)

    def _worth_trying(self, scores: Mapping[Arm, float], predicted: Mapping[Arm, float]) -> Arm | None:
        """Of the ways that may be better the one that was tried longest ago, if that can be afforded."""
        if self._proving or self._levelled < self._first or self._pending or not self._is_steady:
            return None
        assert self.present is not None
        present_s, hopeful = self.price(self.present, predicted[self.present]), dict[Arm, int]()
        for arm, score in scores.items():
            found = self._found[arm]
            ages = _AGES * (self.steps - found.tried_at)
            hope = score - _SURE * math.sqrt(found.variance(self._spread) + ages)
            if arm != self.present and hope < scores[self.present] - self._margin:
                hopeful[arm] = found.tried_at
        if not hopeful:
            return None
        longest_ago = min(hopeful, key=lambda arm: hopeful[arm])
        steps = self._warm + self._run
        lost_s = steps * max(0.0, self.price(longest_ago, predicted[longest_ago]) - present_s)
        is_dear = self._lost_s + lost_s > TRIALS * self.steps * self._usual_s
        if is_dear or self._is_busy():
            return None
        self._found[longest_ago].tried_at = self.steps
        return longest_ago
