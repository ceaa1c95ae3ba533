"""Which way a prompt's misses go: divided between the processor and the link, all fetched, or all on the processor.

The split of a layer's misses is priced expert by expert.  What comes with each way is not: work of the host that the
link or the card hides, threads that another program holds up, copies that the next layer finds under way.  So what
whole layers took, from a layer's routing to that of the layer after it, corrects the price of their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from engine.common.choice import Choice
from engine.experts.shares import Estimate, ends_s, split_among

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
    """Prompts of about one length.

    Attributes:
        choice: of their layers' way.
        way: of the last layer that was priced.
        rest, resting: layers that are not priced, in a row, and how many of them are left.
    """

    choice: Choice[PromptWay]
    way: PromptWay | None = None
    rest: int = 0
    resting: int = 0


class PromptChoice:
    """The way of a prompt's layers on one device, for prompts of each length; see `Choice` for `is_busy`."""

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._of_size: dict[int, _OfSize] = {}
        self._is_busy = is_busy

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
        taken = known.choice.take(prices, steps=1 + known.rest)
        is_settled = taken is known.way is not PromptWay.SHARED and not known.choice.is_learning
        known.way, known.rest = taken, min(2 * known.rest + 1, _LONGEST_REST) if is_settled else 0
        known.resting = known.rest
        return taken

    def observe(self, tokens: int, way: PromptWay, took_s: float, price_s: float) -> None:
        """A layer with so many tokens, which went this way at this price, took so long."""
        self._of(tokens).choice.observe(way, took_s, price_s)

    def _of(self, tokens: int) -> _OfSize:
        size = tokens.bit_length()
        if size not in self._of_size:
            self._of_size[size] = _OfSize(
                Choice(tuple(PromptWay), warm=1, run=2, first=4, in_common=0.0, is_busy=self._is_busy)
            )
        return self._of_size[size]
