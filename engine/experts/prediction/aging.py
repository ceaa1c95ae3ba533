"""Which residents may leave for a prefetch: those that nobody predicts and that have not been wanted for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from engine.experts.prediction.target import PrefetchTarget

_SPARED_STEPS = 2
"""Who was wanted in this step or the one before is no candidate: the token before is a predictor that always holds."""
_LONGEST = 8.0
"""Steps at most that experts are taken to stay."""
_CHOICE = 4
"""Of so many candidates for each place, the least wanted go first; no more are looked at."""


_PULL = 0.02
_FADING = 0.98
_STAYING = 0.5
"""Share of those brought for nothing who are still there when they are wanted after all."""
_MEMORY = 1000.0
"""Evictions after which what they have cost counts half."""


class Aging:
    """The order in which the experts of a tier were last wanted, and what became of those that were driven out.

    Args:
        pools: of each layer, which pool of slots its experts come into.
        stride: more than any expert's number.
    """

    def __init__(self, pools: Sequence[int], stride: int) -> None:
        self._pools = pools
        self._stride = stride
        self._stay = _LONGEST
        self._driven_out = self._brought_in_vain = self._regained = 0.0
        self._regretted = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets who is there; what evictions have cost is remembered."""
        self._order: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(max(self._pools, default=0) + 1)]
        self._uses: dict[int, int] = {}
        self._gone: dict[int, int] = {}
        self._too_early: dict[int, int] = {}

    @property
    def regret(self) -> float:
        """What a prefetch for nothing costs, in experts that were there and are not.

        Somebody who was there would have stayed, and who was brought for nothing stays, about as long as those who are
        driven out have stayed since they were wanted.  So it is the share of those driven out who were wanted again
        within that time, less that of those brought for nothing who were wanted within it all the same and still there.
        """
        lost = (self._regretted + 0.5) / (self._driven_out + 5)
        won = self._regained / (self._brought_in_vain + 5)
        return max(0.0, lost - _STAYING * won)

    def fade(self) -> None:
        """Nobody is driven out for now: what it has cost is doubted more and more."""
        self._driven_out *= _FADING
        self._regretted *= _FADING
        self._brought_in_vain *= _FADING
        self._regained *= _FADING

    def use(self, layer: int, experts: Sequence[int], step: int) -> None:
        """A layer wants these experts."""
        first, order, uses, gone = layer * self._stride, self._order[self._pools[layer]], self._uses, self._gone
        for expert in experts:
            key = first + expert
            order[key] = step
            order.move_to_end(key)
            uses[key] = uses.get(key, 0) + 1
        if gone:
            self._regretted += _taken(gone, first, experts, step - self._stay)
        if self._too_early:
            self._regained += _taken(self._too_early, first, experts, step - self._stay)

    def brought(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These have been brought ahead of need: as good as wanted now."""
        first, order = layer * self._stride, self._order[self._pools[layer]]
        for expert in experts:
            order[first + expert] = step
            order.move_to_end(first + expert)
            self._uses.setdefault(first + expert, 0)

    def in_vain(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These were brought, and not wanted when their layer came."""
        for expert in experts:
            self._too_early[layer * self._stride + expert] = step
        self._brought_in_vain += len(experts)
        if self._brought_in_vain > _MEMORY:
            self._brought_in_vain, self._regained = self._brought_in_vain / 2, self._regained / 2

    def dead(
        self, layer: int, places: int, step: int, foretold: Mapping[int, Collection[int]], target: PrefetchTarget
    ) -> list[tuple[int, int]]:
        """(layer, expert) of residents that share slots with this layer and may leave, the least wanted first.

        Args:
            places: how many are needed at most.
            predicted: layer -> experts that are expected there.
        """
        order, uses, latest = self._order[self._pools[layer]], self._uses, step - _SPARED_STEPS
        oldest = [key for key in islice(order, _CHOICE * places) if order[key] <= latest]
        oldest.sort(key=uses.__getitem__)
        found: list[tuple[int, int]] = []
        for key in oldest:
            owner, expert = divmod(key, self._stride)
            if expert in foretold.get(owner, ()):
                continue
            if target.absent(owner, [expert]):  # has left by itself
                del order[key], uses[key]
                continue
            found.append((owner, expert))
            self._stay += _PULL * (min(step - order[key], _LONGEST) - self._stay)
            if len(found) == places:
                break
        return found

    def leaving(self, dead: list[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
        """`dead`, for a target to read; whoever it reads is taken to have left."""
        for layer, expert in dead:
            key = layer * self._stride + expert
            self._gone[key] = step
            self._driven_out += 1
            self._order[self._pools[layer]].pop(key, None)
            self._uses.pop(key, None)
            if self._driven_out > _MEMORY:
                self._driven_out, self._regretted = self._driven_out / 2, self._regretted / 2
            yield layer, expert


def _taken(since: dict[int, int], first: int, experts: Sequence[int], not_before: float) -> int:
    """How many of these experts are there since no long time; they are taken out."""
    count = 0
    for expert in experts:
        begun = since.pop(first + expert, None)
        count += begun is not None and begun >= not_before
    return count
