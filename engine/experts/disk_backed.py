"""Experts that do not fit into RAM: computed from slots of a RAM tier that are filled from disk as they are needed.

What one expert makes of one token is rounded as the kernels round it and kept by itself; the weighted sum is made of
these at the end, in fp32, in the order of the experts.  So an answer does not depend on what was in RAM already.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

import torch

from engine.errors import EngineError, ErrorCode
from engine.experts.cache.pool import Slot
from engine.experts.disk_tier import DiskTier
from engine.experts.dispatch import BANK_LAYER
from engine.experts.ram_tier import RamTier
from engine.experts.sites import ExpertsSite
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels


@dataclass
class DiskBackedBank:
    """The tiers under some experts modules of a model."""

    disk: DiskTier
    ram: RamTier

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that are held for experts."""
        return self.ram.nbytes

    def close(self) -> None:
        """Ends the reading threads and frees the slots.  Harmless if repeated."""
        self.disk.close()  # first: the reads on their way end, which is what the tier above waits for
        self.ram.close()


def can_be_disk_backed(site: ExpertsSite) -> bool:
    """Whether kernels compute these experts; a module that computes by itself wants all its records at hand."""
    return hasattr(site.module, "has_gate")


def bind_disk_backed(sites: list[ExpertsSite], bank: DiskBackedBank, kernels: NativeKernels | None) -> None:
    """Gives every experts module its slots and what computes from them."""
    for site in sites:
        layer = bank.disk.header.index_of[site.name]
        slots = bank.ram.slots(layer)
        in_torch = choose_kernel(site.module, slots, None)
        few = choose_kernel(site.module, slots, kernels)
        assert few is not None
        assert in_torch is not None
        setattr(site.module, BANK_LAYER, (slots, DiskBackedExperts(bank.ram, layer, site.num_experts, few, in_torch)))


class DiskBackedExperts:
    """Computes one layer's experts, those in RAM while the others are read.

    Args:
        tier: where they come into slots; its slots are the experts that the kernels see.
        layer: index of the layer in the tier.
        num_experts: E.
        few_tokens: computes a step of up to `MAX_TOKENS` tokens.
        many_tokens: computes longer ones.
    """

    def __init__(
        self, tier: RamTier, layer: int, num_experts: int, few_tokens: ExpertKernel, many_tokens: ExpertKernel
    ) -> None:
        self._tier = tier
        self._layer = layer
        self._experts = num_experts
        self._few_tokens = few_tokens
        self._many_tokens = many_tokens

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`.

        Raises:
            EngineError: an expert could not be read.
        """
        step = _Step(hidden_states, top_k_index, self._experts)
        left = list(step.spans)
        while left:  # in rounds, where a long prompt wants more experts than there are slots
            acquired = self._tier.acquire(self._layer, left)
            try:
                if not acquired.slots:
                    raise EngineError(ErrorCode.INTERNAL, "All places for experts in RAM are taken and not given back.")
                arriving = {arrival: expert for expert, arrival in acquired.arriving.items()}
                self._compute(step, acquired.slots, (e for e in acquired.slots if e not in acquired.arriving))
                while arriving:
                    done, _ = wait(arriving, return_when=FIRST_COMPLETED)
                    for arrival in done:
                        arrival.result()
                    self._compute(step, acquired.slots, sorted(arriving.pop(arrival) for arrival in done))
            finally:
                self._tier.release(acquired)
            left = acquired.left
        return step.weighted_sum(top_k_weights)

    def _compute(self, step: _Step, slots: dict[int, Slot], experts: Iterable[int]) -> None:
        # Which kernel computes depends on the step alone, not on how many of its experts happen to be there.
        if step.tokens > MAX_TOKENS:
            step.compute(self._many_tokens, slots, list(experts))
            return
        batch: list[int] = []
        rows = 0
        for expert in experts:
            count = step.rows_of(expert)
            if rows + count > MAX_TOKENS:
                step.compute(self._few_tokens, slots, batch)
                batch, rows = [], 0
            batch.append(expert)
            rows += count
        step.compute(self._few_tokens, slots, batch)


class _Step:
    """The visits of some tokens to their experts, [T, k], one row each, sorted by expert.

    Attributes:
        spans: expert -> its rows, [begin, end), in the order of the experts; ids that are no expert are left out.
    """

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

    def rows_of(self, expert: int) -> int:
        """How many tokens visit this expert."""
        begin, end = self.spans[expert]
        return end - begin

    def compute(self, kernel: ExpertKernel, slots: dict[int, Slot], experts: list[int]) -> None:
        """What these experts make of their tokens, unweighted; every row visits one slot only.

        A kernel that sees one visit per row reads no slot but those, whatever the others hold at this moment.
        """
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
        """[T, k] -> [T, H]: each token's visits in the order of the experts, in fp32."""
        shares = weights.reshape(-1)[self._order].float()[:, None]
        if self.tokens == 1:
            return (shares.mT @ self._outs.float()).to(self._hidden.dtype)
        # The rows of a token, in that order: sorted by token, stably.
        rows = self._sources.argsort(stable=True).view(self.tokens, self._width)
        result = torch.zeros(self._hidden.shape, dtype=torch.float32)
        for visit in rows.unbind(1):
            result += self._outs[visit].float().mul_(shares[visit])
        return result.to(self._hidden.dtype)
