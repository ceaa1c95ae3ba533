"""The visits of a step's tokens to their experts: computed in any order, some at a time, summed in one order.

What one expert makes of one token is rounded as the kernels round it and kept by itself; the weighted sum is made of
these at the end, in fp32, in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engine.experts.cache.pool import Slot
from engine.kernels.interface import ExpertKernel


class Visits(Protocol):
    """One row for each visit, sorted by expert.

    Attributes:
        tokens: T.
        spans: expert -> its rows, [begin, end), in the order of the experts; ids that are no expert are left out.
    """

    tokens: int
    spans: dict[int, tuple[int, int]]

    def compute(self, kernel: ExpertKernel, slots: Mapping[int, Slot], experts: list[int]) -> None:
        """What these experts make of their tokens, unweighted; every row that the kernel sees visits one slot only.

        So it reads no slot but those, whatever the others hold at this moment.
        """

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[T, k] -> [T, H]: each token's visits in the order of the experts, in fp32."""


def visits_of(hidden: torch.Tensor, index: torch.Tensor, num_experts: int) -> Visits:
    """The visits of [T, H] to [T, k]."""
    if len(hidden) == 1 and len(set(chosen := index[0].tolist())) == len(chosen):
        return _OneToken(hidden, chosen, num_experts)
    return _ManyTokens(hidden, index, num_experts)


class _OneToken:
    """Of a decode step: no operator that can be done without, for each takes as long as reading a small expert."""

    tokens = 1

    def __init__(self, hidden: torch.Tensor, chosen: list[int], num_experts: int) -> None:
        self._hidden = hidden
        self._order = sorted(range(len(chosen)), key=chosen.__getitem__)
        self.spans = {
            chosen[place]: (row, row + 1) for row, place in enumerate(self._order) if 0 <= chosen[place] < num_experts
        }
        self._outs = hidden.new_zeros(len(chosen), hidden.shape[1])

    def compute(self, kernel: ExpertKernel, slots: Mapping[int, Slot], experts: list[int]) -> None:
        """See `Visits`."""
        if not experts:
            return
        experts = sorted(experts)
        rows = [self.spans[expert][0] for expert in experts]
        index = torch.tensor([slots[expert] for expert in experts])[:, None]
        made = kernel(self._hidden.expand(len(rows), -1), index, torch.ones(len(rows), 1))
        if rows[-1] - rows[0] == len(rows) - 1:
            self._outs[rows[0] : rows[-1] + 1] = made
        else:
            self._outs[rows] = made

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """See `Visits`."""
        return (weights[:, self._order].float() @ self._outs.float()).to(self._hidden.dtype)


class _ManyTokens:
    def __init__(self, hidden: torch.Tensor, index: torch.Tensor, num_experts: int) -> None:
        self.tokens, self._width = index.shape
        self._hidden = hidden
        flat = index.reshape(-1)
        self._order = flat.argsort(stable=True)
        occurring, counts = flat[self._order].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        self.spans: dict[int, tuple[int, int]] = {}
        begin = 0
        for expert, count in zip(occurring.tolist(), counts.tolist(), strict=True):
            if 0 <= expert < num_experts:
                self.spans[expert] = begin, begin + count
            begin += count
        self._sources = self._order // self._width
        self._outs = hidden.new_zeros(flat.shape[0], hidden.shape[1])

    def compute(self, kernel: ExpertKernel, slots: Mapping[int, Slot], experts: list[int]) -> None:
        """See `Visits`."""
        if not experts:
            return
        spans = [self.spans[expert] for expert in experts]
        rows = torch.cat([torch.arange(*span) for span in spans])
        counts = torch.tensor([end - begin for begin, end in spans])
        index = torch.tensor([slots[expert] for expert in experts]).repeat_interleave(counts)[:, None]
        self._outs[rows] = kernel(
            self._hidden[self._sources[rows]], index, torch.ones(index.shape, dtype=torch.float32)
        )

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """See `Visits`."""
        shares = weights.reshape(-1)[self._order].float()[:, None]
        # The rows of a token, in that order: sorted by token, stably.
        rows = self._sources.argsort(stable=True).view(self.tokens, self._width)
        result = torch.zeros(self._hidden.shape, dtype=torch.float32)
        for visit in rows.unbind(1):
            result += self._outs[visit].float().mul_(shares[visit])
        return result.to(self._hidden.dtype)
