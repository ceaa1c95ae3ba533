"""One layer's routing in one step, as the host knows it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Routing:
    """Which token visits which expert.  A pair is one token's visit: token * k + choice.

    Args:
        index: [T, k] on the host; ids at or above `experts` are no expert.

    Attributes:
        width: k.
        visits: expert -> its pairs; experts in ascending order.
        absent: pairs that visit no expert.
    """

    def __init__(self, index: torch.Tensor, experts: int) -> None:
        self.width = index.shape[1]
        visits: dict[int, list[int]] = {}
        self.absent: list[int] = []
        for pair, expert in enumerate(index.reshape(-1).tolist()):
            if expert >= experts:
                self.absent.append(pair)
            elif expert in visits:
                visits[expert].append(pair)
            else:
                visits[expert] = [pair]
        self.experts = sorted(visits)
        self.visits = visits

    def tokens(self, expert: int) -> int:
        """How many tokens visit it."""
        return len(self.visits[expert])

    def pairs(self, experts: Iterable[int]) -> torch.Tensor:
        """[n], the pairs of these experts, one expert after the other."""
        pairs: list[int] = []
        for expert in experts:
            pairs += self.visits[expert]
        return torch.tensor(pairs)
