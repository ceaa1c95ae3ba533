"""Within a prompt the next layer's experts are read before its router has spoken, where most are wanted anyway.

Between one layer's last read and the next layer's first the disk would idle, for as long as attention takes.  They are
read in the order of the file, into free slots and those of experts that were read for this prompt and have been
computed: who was in RAM before stays for decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.experts.ram_tier import RamTier


class ReadAhead:
    """For the prompts of one model; told of every layer in turn.

    Args:
        experts: how many each layer of the tier has.
    """

    def __init__(self, tier: RamTier, experts: Sequence[int]) -> None:
        self._tier = tier
        self._experts = experts
        self._layer = -1
        self._done_with: list[tuple[int, int]] = []

    def begun(self, layer: int, wanted: int, read: Iterable[int]) -> None:
        """The last experts of a layer have been asked for.

        Args:
            wanted: how many the layer's tokens want.
            read: those that had to be read for them; none is needed again in this prompt.
        """
        if layer <= self._layer:
            self._done_with = []
        self._layer = layer
        following = layer + 1
        # Wasted reads delay nobody (they come after those that are waited for), but they take the disk's time.
        if following < len(self._experts) and 3 * wanted >= 2 * self._experts[layer]:
            leaving = iter(self._done_with)
            self._tier.prefetch(following, range(self._experts[following]), leaving)
            self._done_with = list(leaving)
        self._done_with += [(layer, expert) for expert in read]
