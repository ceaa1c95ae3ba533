"""Which residents may leave for a prefetch: those that nobody foretells and that have not been wanted for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from engine.experts.prediction.target import PrefetchTarget

_SPARED_STEPS = 2
"""Who was wanted in this step or the one before is no candidate: the token before is a predictor that always holds."""
_REGRET_STEPS = 8
"""Who is wanted again so soon should have stayed."""
_CHOICE = 4
"""Of so many candidates for each place, the least wanted go first."""
_LOOKED_AT = 16
"""Candidates looked at for each place at most: what a prefetch may cost is bounded."""


_FADING = 0.98
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
        self._driven_out = 0.0
        self._regretted = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets who is there; what evictions have cost is remembered."""
        self._order: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(max(self._pools, default=0) + 1)]
        self._uses: dict[int, int] = {}
        self._gone: dict[int, int] = {}

    @property
    def regret(self) -> float:
        """Share of those driven out who were wanted again soon."""
        return (self._regretted + 0.5) / (self._driven_out + 5)

    def fade(self) -> None:
        """Nobody is driven out for now: what it has cost is doubted more and more."""
        self._driven_out *= _FADING
        self._regretted *= _FADING

    def use(self, layer: int, experts: Sequence[int], step: int) -> None:
        """A layer wants these experts."""
        first, order, uses, gone = layer * self._stride, self._order[self._pools[layer]], self._uses, self._gone
        for expert in experts:
            key = first + expert
            order[key] = step
            order.move_to_end(key)
            uses[key] = uses.get(key, 0) + 1
        if gone:
            for expert in experts:
                left = gone.pop(first + expert, None)
                if left is not None and step - left <= _REGRET_STEPS:
                    self._regretted += 1

    def brought(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These have been brought ahead of need: as good as wanted now."""
        first, order = layer * self._stride, self._order[self._pools[layer]]
        for expert in experts:
            order[first + expert] = step
            order.move_to_end(first + expert)
            self._uses.setdefault(first + expert, 0)

    def dead(
        self, layer: int, places: int, step: int, foretold: Mapping[int, Collection[int]], target: PrefetchTarget
    ) -> list[tuple[int, int]]:
        """(layer, expert) of residents that share slots with this layer and may leave, the least wanted first.

        Args:
            places: how many are needed at most.
            foretold: layer -> experts that are expected there.
        """
        order, stride = self._order[self._pools[layer]], self._stride
        found: list[int] = []
        absent: list[int] = []
        looked_at = 0
        for key, used in order.items():
            looked_at += 1
            if used > step - _SPARED_STEPS or len(found) >= _CHOICE * places or looked_at > _LOOKED_AT * places:
                break
            owner, expert = divmod(key, stride)
            if expert in foretold.get(owner, ()):
                continue
            (absent if target.absent(owner, [expert]) else found).append(key)
        for key in absent:  # has left by itself
            del order[key]
            self._uses.pop(key, None)
        found.sort(key=self._uses.__getitem__)
        return [divmod(key, stride) for key in found[:places]]

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
                self._gone = {key: left for key, left in self._gone.items() if step - left <= _REGRET_STEPS}
            yield layer, expert
