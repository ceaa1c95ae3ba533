"""Which residents a prefetch may evict: those that are not predicted and have been unused longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from engine.experts.prediction.target import PrefetchTarget

_SPARED_STEPS = 2
"""Experts used in this step or the previous one are never evicted: routing repeats from token to token."""
_LONGEST = 8.0
"""Upper bound of the estimated residency, in steps."""
_CHOICE = 4
"""Candidates examined per slot needed; of these, the least used are evicted first."""


_EWMA_WEIGHT = 0.02
_DECAY = 0.98
_STAYING = 0.5
"""Share of wasted prefetches that are still resident when they are needed after all."""
_MEMORY = 1000.0
"""Events after which the counts are halved."""


class Aging:
    """Recency of the experts of a tier, and how often those evicted for prefetches were needed again.

    Args:
        pools: for each layer, the index of its pool of slots.
        stride: greater than any expert's number.
    """

    def __init__(self, pools: Sequence[int], stride: int) -> None:
        self._pools = pools
        self._stride = stride
        self._stay = _LONGEST
        self._evicted = self._wasted = self._wasted_then_used = 0.0
        self._evicted_then_used = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the residents, but not the statistics of evictions."""
        self._order: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(max(self._pools, default=0) + 1)]
        self._uses: dict[int, int] = {}
        self._recently_evicted: dict[int, int] = {}
        self._recently_wasted: dict[int, int] = {}

    @property
    def regret(self) -> float:
        """Expected number of extra misses per wasted prefetch.

        An evicted expert would have stayed, and a wasted one does stay, for about the age at which experts are evicted.
        So the cost is the share of evicted experts needed again within that time, minus the share of wasted prefetches
        needed within it and still resident.
        """
        lost = (self._evicted_then_used + 0.5) / (self._evicted + 5)
        won = self._wasted_then_used / (self._wasted + 5)
        return max(0.0, lost - _STAYING * won)

    def decay(self) -> None:
        """Decays the statistics while nothing is evicted, because they become outdated."""
        self._evicted *= _DECAY
        self._evicted_then_used *= _DECAY
        self._wasted *= _DECAY
        self._wasted_then_used *= _DECAY

    def use(self, layer: int, experts: Sequence[int], step: int) -> None:
        """A layer uses these experts."""
        first, order, uses = layer * self._stride, self._order[self._pools[layer]], self._uses
        evicted = self._recently_evicted
        for expert in experts:
            key = first + expert
            order[key] = step
            order.move_to_end(key)
            uses[key] = uses.get(key, 0) + 1
        if evicted:
            self._evicted_then_used += _pop_recent(evicted, first, experts, step - self._stay)
        if self._recently_wasted:
            self._wasted_then_used += _pop_recent(self._recently_wasted, first, experts, step - self._stay)

    def prefetched(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These experts are being prefetched, which counts as recent."""
        first, order = layer * self._stride, self._order[self._pools[layer]]
        for expert in experts:
            order[first + expert] = step
            order.move_to_end(first + expert)
            self._uses.setdefault(first + expert, 0)

    def wasted(self, layer: int, experts: Sequence[int], step: int) -> None:
        """These experts were prefetched but not used when their layer came."""
        for expert in experts:
            self._recently_wasted[layer * self._stride + expert] = step
        self._wasted += len(experts)
        if self._wasted > _MEMORY:
            self._wasted, self._wasted_then_used = self._wasted / 2, self._wasted_then_used / 2

    def dead(
        self, layer: int, places: int, step: int, predicted: Mapping[int, Collection[int]], target: PrefetchTarget
    ) -> list[tuple[int, int]]:
        """(layer, expert) of residents in this layer's pool that may be evicted, least used first.

        Args:
            places: how many are needed at most.
            predicted: layer -> experts predicted for it.
        """
        order, uses, latest = self._order[self._pools[layer]], self._uses, step - _SPARED_STEPS
        oldest = [key for key in islice(order, _CHOICE * places) if order[key] <= latest]
        oldest.sort(key=uses.__getitem__)
        found: list[tuple[int, int]] = []
        for key in oldest:
            owner, expert = divmod(key, self._stride)
            if expert in predicted.get(owner, ()):
                continue
            if target.absent(owner, [expert]):  # evicted by the cache's own policy
                del order[key], uses[key]
                continue
            found.append((owner, expert))
            self._stay += _EWMA_WEIGHT * (min(step - order[key], _LONGEST) - self._stay)
            if len(found) == places:
                break
        return found

    def evicting(self, dead: list[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
        """Iterates over `dead` for a target, and counts every item it consumes as evicted."""
        for layer, expert in dead:
            key = layer * self._stride + expert
            self._recently_evicted[key] = step
            self._evicted += 1
            self._order[self._pools[layer]].pop(key, None)
            self._uses.pop(key, None)
            if self._evicted > _MEMORY:
                self._evicted, self._evicted_then_used = self._evicted / 2, self._evicted_then_used / 2
            yield layer, expert


def _pop_recent(since: dict[int, int], first: int, experts: Sequence[int], not_before: float) -> int:
    """Removes these experts from `since`; returns how many were recorded at or after `not_before`."""
    count = 0
    for expert in experts:
        begun = since.pop(first + expert, None)
        count += begun is not None and begun >= not_before
    return count
