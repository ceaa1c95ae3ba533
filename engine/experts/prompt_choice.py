"""Whether the processor takes part in a prompt's layers, or all misses are fetched, by what layers took both ways.

The split of a layer's misses is priced expert by expert.  What comes with either way is not: work of the host that the
link or the card hides, threads that another program holds up, copies that the next layer finds under way.  So each way
learns what whole layers took beyond its price, from the layer's routing to that of the layer after it, and the way
whose price with that is lower is taken: what was measured overrules what was predicted.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

_KEPT: Final = 9
"""Layers of each way whose median counts: one that another program held up says little."""
_FEWEST: Final = 3
"""Until so many layers went one way, it is not thought to take more beyond its price than the other."""
_AGAIN: Final = 32
"""Decisions in a row against a way after which one of its layers is forgotten, so that it is tried again some day."""
_LONGEST_REST: Final = 15
"""The most layers in a row that are not priced, where all misses were fetched before."""


class PromptChoice:
    """The way of a prompt's layers on one device: `True` is with the processor, `False` without."""

    def __init__(self) -> None:
        self._beyond_s: dict[bool, deque[float]] = {way: deque(maxlen=_KEPT) for way in (True, False)}
        self._unused = {True: 0, False: 0}
        self._rest = self._resting = self._tokens = 0

    def rests(self, tokens: int) -> bool:
        """Whether a layer with so many tokens need not be priced, which takes time: all its misses are fetched."""
        if not self._resting or not self._tokens <= 2 * tokens <= 4 * self._tokens:
            return False
        self._resting -= 1
        return True

    def decided(self, tokens: int, *, is_shared: bool) -> None:
        """A layer with so many tokens was priced."""
        self._tokens, self._rest = tokens, 0 if is_shared else min(2 * self._rest + 1, _LONGEST_REST)
        self._resting = self._rest

    def takes_part(self, shared_s: float, alone_s: float) -> bool:
        """Whether the processor is to compute its share.

        Args:
            shared_s, alone_s: price of the layer with it, and with all misses fetched.
        """
        with_s, without_s = (self._usual_s(way) for way in (True, False))
        if len(self._beyond_s[True]) < _FEWEST:
            with_s = min(with_s, without_s)
        if len(self._beyond_s[False]) < _FEWEST:
            without_s = min(without_s, with_s)
        taken = shared_s + with_s < alone_s + without_s
        self._unused[taken] = 0
        self._unused[not taken] += 1
        if self._unused[not taken] % _AGAIN == 0 and self._beyond_s[not taken]:
            self._beyond_s[not taken].popleft()
        return taken

    def observe(self, took_s: float, price_s: float, *, is_shared: bool) -> None:
        """A layer with this price took so long."""
        self._beyond_s[is_shared].append(took_s - price_s)

    def _usual_s(self, way: bool) -> float:
        return median(self._beyond_s[way]) if self._beyond_s[way] else 0.0
