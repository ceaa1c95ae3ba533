"""The host's part of `splits.h`: a context divided among blocks, of which the last to arrive sums what all found."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from engine.kernels.cuda.launcher import Launcher
from engine.kernels.gpu.pages import PageTable

_MOST = 64


class Splits:
    """Of one kernel.

    Args:
        blocks: that a multiprocessor holds of it.
    """

    def __init__(self, card: Launcher, blocks: int) -> None:
        self._card, self._blocks = card, blocks
        self._arrived: WeakKeyDictionary[PageTable, torch.Tensor] = WeakKeyDictionary()

    def count(self, runs: int) -> int:
        """Into how many parts each context is divided, so that so many runs over contexts keep the card busy."""
        return max(1, min(-(-self._blocks * self._card.multiprocessors // runs), _MOST))

    def arrived(self, table: PageTable, runs: int) -> torch.Tensor:
        """int32 [runs or more] on the card, zero between launches; the same ones again, as graphs hold their place."""
        known = self._arrived.get(table)
        if known is None or len(known) < runs:
            known = self._arrived[table] = torch.zeros(runs, dtype=torch.int32, device=table.entries.device)
        return known
