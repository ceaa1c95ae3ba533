"""One layer's result, put together from parts that are computed in different places and end at different times.

Few tokens: every (token, choice) pair has a row of its own, and the rows are summed in fp32 in the router's order once
all are there.  What an expert computes is then the same wherever and whenever that happens, and so is the sum: the
answer does not depend on what the cache held.  Many tokens: rows would take too much memory, so each part sums its own
experts, and the parts are added in fp32 in the order in which they are submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from engine.kernels.interface import ExpertKernel

PAIR_ELEMENTS = 2**22
"""Up to so many elements [T * k, H] pairs have rows: 8 MiB in bf16."""

Work = Callable[[], None]


class PartialSums(Protocol):
    """The sum of one layer in one step.  What returns `Work` is to be submitted to the compute stream."""

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int], slots: int) -> Work:
        """Adds the experts of `slot_of`, which lie in these of the kernel's `slots` slots."""

    def on_host(
        self, kernel: ExpertKernel, hidden: torch.Tensor, weights: torch.Tensor, experts: list[int]
    ) -> torch.Tensor:
        """What these experts of the CPU's kernel contribute, for `add` once it has been brought to the device."""

    def add(self, contribution: torch.Tensor, experts: list[int]) -> Work:
        """Adds what `on_host` gave."""

    def finish(self) -> Work:
        """Puts the sum into `result`."""

    @property
    def result(self) -> torch.Tensor:
        """[T, H], once `finish` has run."""


def partial_sums(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, chosen: np.ndarray, experts: int
) -> PartialSums:
    """The sum for hidden [T, H], index and weights [T, k] on the device, and the same index on the host."""
    # A token by itself never as a total: kernels may then compute all experts, the unwanted ones with weight 0, and a
    # slot that nothing was copied to holds anything, NaN too.
    if len(chosen) == 1 or chosen.size * hidden.shape[1] <= PAIR_ELEMENTS:
        return _Pairs(hidden, weights, chosen, experts)
    return _Totals(hidden, index, weights, chosen, experts)


class _Pairs:
    def __init__(self, hidden: torch.Tensor, weights: torch.Tensor, chosen: np.ndarray, experts: int) -> None:
        self._hidden, self._weights, self._experts = hidden, weights, experts
        self._width = chosen.shape[1]
        self._chosen = np.minimum(chosen.reshape(-1), experts)
        # Choices that are no expert stay zero.
        self._rows = hidden.new_zeros(chosen.size, hidden.shape[1])
        self.result = torch.empty_like(hidden)

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int], slots: int) -> Work:
        pairs = self._pairs_of(list(slot_of))
        table = _table(slot_of, self._experts, slots)
        ids = table[self._chosen[pairs]]

        def work() -> None:
            place = self._hidden.device
            where = torch.from_numpy(pairs).to(place)
            rows = self._compute(kernel, self._hidden, where, torch.from_numpy(ids).to(place))
            self._rows.index_copy_(0, where, rows)

        return work

    def on_host(  # the weights come in at the end
        self,
        kernel: ExpertKernel,
        hidden: torch.Tensor,
        weights: torch.Tensor,  # noqa: ARG002
        experts: list[int],
    ) -> torch.Tensor:
        pairs = self._pairs_of(experts)
        return self._compute(kernel, hidden, torch.from_numpy(pairs), torch.from_numpy(self._chosen[pairs]))

    def add(self, contribution: torch.Tensor, experts: list[int]) -> Work:
        pairs = self._pairs_of(experts)

        def work() -> None:
            self._rows.index_copy_(0, torch.from_numpy(pairs).to(self._rows.device), contribution)

        return work

    def finish(self) -> Work:
        def work() -> None:
            rows = self._rows.view(-1, self._width, self._rows.shape[1]).float()
            self.result.copy_((rows * self._weights.float()[:, :, None]).sum(1))

        return work

    def _pairs_of(self, experts: list[int]) -> np.ndarray:
        mine = np.zeros(self._experts + 1, dtype=bool)
        mine[experts] = True
        return np.flatnonzero(mine[self._chosen])

    def _compute(
        self, kernel: ExpertKernel, hidden: torch.Tensor, pairs: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Each pair as a token with one expert; the router's weights come in at the end."""
        tokens = torch.div(pairs, self._width, rounding_mode="floor")
        ones = torch.ones(len(ids), 1, dtype=torch.float32, device=ids.device)
        return kernel(hidden.index_select(0, tokens), ids[:, None], ones)


class _Totals:
    def __init__(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, chosen: np.ndarray, experts: int
    ) -> None:
        self._hidden, self._index, self._weights = hidden, index, weights
        self._chosen, self._experts = np.minimum(chosen, experts), experts
        self._sum = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        self.result = torch.empty_like(hidden)

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int], slots: int) -> Work:
        table = torch.from_numpy(_table(slot_of, self._experts, slots))

        def work() -> None:
            ids = table.to(self._index.device)[self._index.clamp(max=self._experts)]
            self._sum.add_(kernel(self._hidden, ids, self._weights))

        return work

    def on_host(
        self, kernel: ExpertKernel, hidden: torch.Tensor, weights: torch.Tensor, experts: list[int]
    ) -> torch.Tensor:
        table = _table({expert: expert for expert in experts}, self._experts, self._experts)
        return kernel(hidden, torch.from_numpy(table[self._chosen]), weights)

    def add(self, contribution: torch.Tensor, experts: list[int]) -> Work:  # noqa: ARG002
        def work() -> None:
            self._sum.add_(contribution)

        return work

    def finish(self) -> Work:
        def work() -> None:
            self.result.copy_(self._sum)

        return work


def _table(slot_of: Mapping[int, int], experts: int, absent: int) -> np.ndarray:
    """expert -> slot, and `absent` for all others and for what is no expert."""
    table = np.full(experts + 1, absent, dtype=np.int64)
    table[list(slot_of)] = list(slot_of.values())
    return table
