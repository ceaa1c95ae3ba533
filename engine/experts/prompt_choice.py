"""Which way a prompt's misses go: divided between the processor and the link, all fetched, or all on the processor.

The split of a layer's misses is priced expert by expert.  What comes with each way is not: work of the host that the
link or the card hides, threads that another program holds up, copies that the next layer finds under way.  So each way
learns what whole layers took beyond its price, from the layer's routing to that of the layer after it, and the way
whose price with that is lowest is taken: what was measured overrules what was predicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Final

from engine.experts.shares import Estimate, ends_s, split_among

_KEPT: Final = 9
"""Layers of each way whose median counts: one that another program held up says little."""
_FEWEST: Final = 3
"""Until so many layers went one way, it is not thought to take more beyond its price than the others.  The first of
them finds what the way before it has left: copies for nothing, or none."""
_WORTH_TRYING: Final = 1.5
"""A way of which little is known is tried where it should take no more than so many times the best."""
_SOON: Final = 32
"""Layers in a row that went another way after which those of a way are forgotten, so that it is tried again: whatever
held up most of its few layers, such as another program, is over by then."""
_LATER: Final = 4
"""So many times as long is waited each time that it has been tried again for nothing."""
_LATEST: Final = 2048
"""The longest wait: whatever has been found, another way may become better some day."""
_LONGEST_REST: Final = 15
"""The most layers in a row that are not priced, where all misses went one way before."""


class PromptWay(Enum):
    """A way of all misses of a prompt's layer."""

    SHARED = "shared"
    FETCHED = "fetched"
    ON_CPU = "on the CPU"


def prompt_prices(
    misses: Sequence[tuple[int, int]], ahead: Collection[int], ways: Sequence[Estimate], busy_s: float
) -> tuple[dict[PromptWay, float], list[list[int]]]:
    """Seconds of a prompt's layer in each way that there is, and how both sides would share its misses.

    Args:
        misses: (expert, tokens).
        ahead: experts that are on their way to the card, which the processor takes only if it takes all.
        ways: the processor, and the link.
        busy_s: until the card has done what it has.
    """
    here, there = ways
    left = [miss for miss in misses if miss[0] not in ahead]
    left.sort(key=lambda miss: -miss[1])
    counts = [count for _, count in left]
    prices = {PromptWay.ON_CPU: max(ends_s(ways, [[count for _, count in misses], []]), busy_s)}
    here = replace(here, busy_s=here.busy_s + (len(misses) - len(left)) * there.caller_s)
    prices[PromptWay.FETCHED] = max(ends_s([here, there], [[], counts]), busy_s)
    shares = split_among(left, [here, there])
    if shares[0] and (shares[1] or len(left) < len(misses)):
        tokens = dict(left)
        shared = [[tokens[expert] for expert in mine] for mine in shares]
        prices[PromptWay.SHARED] = max(ends_s([here, there], shared), busy_s)
    shares[1][:0] = [expert for expert, _ in misses if expert in ahead]
    return prices, shares


@dataclass(slots=True)
class _OfSize:
    """What is known of prompts of about one length.

    Attributes:
        beyond_s: of each way, what its last layers took beyond their price.
        unused: layers that went another way since the last one of each way; again: after how many it is tried again.
        way: of the last layer that was priced.
        rest, resting: layers that are not priced, in a row, and how many of them are left.
    """

    beyond_s: dict[PromptWay, deque[float]] = field(
        default_factory=lambda: {way: deque(maxlen=_KEPT) for way in PromptWay}
    )
    unused: dict[PromptWay, int] = field(default_factory=lambda: dict.fromkeys(PromptWay, 0))
    again: dict[PromptWay, int] = field(default_factory=lambda: dict.fromkeys(PromptWay, _SOON))
    way: PromptWay | None = None
    rest: int = 0
    resting: int = 0

    def is_known(self, way: PromptWay) -> bool:
        """Whether there are layers enough to say what it takes beyond its price."""
        return len(self.beyond_s[way]) >= _FEWEST

    def is_tried(self, way: PromptWay, price_s: float, expected_s: float, best_s: float) -> bool:
        """Whether it is too early to say that it takes longer than the best way."""
        if not self.is_known(way):
            return expected_s <= _WORTH_TRYING * best_s
        # One of its few layers was sooner: the others may have been held up.
        beyond_s = self.beyond_s[way]
        return len(beyond_s) < _KEPT and price_s + min(beyond_s) < best_s < expected_s

    def expected_s(self, prices: Mapping[PromptWay, float]) -> dict[PromptWay, float]:
        """What each way should take in all."""
        usual_s = {way: median(self.beyond_s[way]) for way in prices if self.beyond_s[way]}
        least_s = min(usual_s.values(), default=0.0)
        return {way: price_s + (usual_s[way] if self.is_known(way) else least_s) for way, price_s in prices.items()}


class PromptChoice:
    """The way of a prompt's layers on one device, for prompts of each length."""

    def __init__(self) -> None:
        self._of_size: dict[int, _OfSize] = {}

    def way(self, tokens: int) -> PromptWay | None:
        """Of the last layer with about so many tokens, if there was one."""
        return self._of(tokens).way

    def rests(self, tokens: int) -> PromptWay | None:
        """The way of a layer with so many tokens, if it need not be priced, which takes time."""
        known = self._of(tokens)
        if not known.resting:
            return None
        known.resting -= 1
        return known.way

    def choose(self, tokens: int, prices: Mapping[PromptWay, float]) -> PromptWay:
        """The way of a layer with so many tokens.

        Args:
            prices: seconds that the layer should take in each way that there is.
        """
        known = self._of(tokens)
        expected_s = known.expected_s(prices)
        best = min(expected_s, key=lambda way: expected_s[way])
        tried = [way for way in prices if known.is_tried(way, prices[way], expected_s[way], expected_s[best])]
        taken = best if best in tried or not tried else tried[0]
        is_settled = taken is known.way is not PromptWay.SHARED and not tried
        known.way, known.rest = taken, min(2 * known.rest + 1, _LONGEST_REST) if is_settled else 0
        known.resting = known.rest
        for way in prices:
            known.unused[way] = 0 if way is taken else known.unused[way] + 1 + known.rest
            if known.beyond_s[way] and known.unused[way] >= known.again[way]:
                known.beyond_s[way].clear()
                known.again[way] = min(_LATER * known.again[way], _LATEST)
        if not tried:  # it is the best of all: if that ends, it may be due to something that passes
            known.again[taken] = _SOON
        return taken

    def observe(self, tokens: int, way: PromptWay, took_s: float, price_s: float) -> None:
        """A layer with so many tokens, which went this way at this price, took so long."""
        self._of(tokens).beyond_s[way].append(took_s - price_s)

    def _of(self, tokens: int) -> _OfSize:
        size = tokens.bit_length()
        known = self._of_size.get(size)
        if known is None:
            known = self._of_size[size] = _OfSize()
        return known
