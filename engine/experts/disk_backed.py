"""Experts that do not fit into RAM: computed from slots of a RAM tier that are filled from disk as they are needed.

What one expert makes of one token is rounded as the kernels round it and kept by itself; the weighted sum is made of
these at the end, in fp32, in the order of the experts.  So an answer does not depend on what was in RAM already.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError, ErrorCode
from engine.experts.acquired import Acquired
from engine.experts.cache.pool import Slot
from engine.experts.disk_tier import DiskTier
from engine.experts.dispatch import BANK_LAYER
from engine.experts.ram_tier import RamTier
from engine.experts.read_ahead import ReadAhead
from engine.experts.sites import ExpertsSite
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels

if TYPE_CHECKING:
    from engine.experts.prediction.prefetcher import Prefetcher


@dataclass
class DiskBackedBank:
    """The tiers under some experts modules of a model.

    Attributes:
        made_again: why the bank had to be made once more when the model was loaded, if it had.
    """

    disk: DiskTier
    ram: RamTier
    made_again: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that are held for experts."""
        return self.ram.nbytes

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about what has gone otherwise than meant, as of now."""
        made = f"The experts were prepared again because {self.made_again}." if self.made_again is not None else None
        return [note for note in (made, self.disk.note, self.ram.note) if note is not None]

    def close(self) -> None:
        """Ends the reading threads and frees the slots.  Harmless if repeated."""
        self.disk.close()  # first: the reads on their way end, which is what the tier above waits for
        self.ram.close()


def can_be_disk_backed(site: ExpertsSite) -> bool:
    """Whether kernels compute these experts; a module that computes by itself wants all its records at hand."""
    return hasattr(site.module, "has_gate")


def bind_disk_backed(
    sites: list[ExpertsSite], bank: DiskBackedBank, kernels: NativeKernels | None, prefetcher: Prefetcher | None = None
) -> None:
    """Gives every experts module its slots and what computes from them.

    Args:
        prefetcher: of the bank's RAM tier, if experts are to be foretold.
    """
    ahead = ReadAhead(bank.ram, [layer.num_experts for layer in bank.disk.header.layers])
    for site in sites:
        layer = bank.disk.header.index_of[site.name]
        slots = bank.ram.slots(layer)
        in_torch = choose_kernel(site.module, slots, None)
        few = choose_kernel(site.module, slots, kernels)
        assert few is not None
        assert in_torch is not None
        experts = DiskBackedExperts(bank.ram, layer, site.num_experts, few, in_torch, ahead, prefetcher)
        setattr(site.module, BANK_LAYER, (slots, experts))


class DiskBackedExperts:
    """Computes one layer's experts, those in RAM while the others are read.

    Args:
        tier: where they come into slots; its slots are the experts that the kernels see.
        layer: index of the layer in the tier.
        num_experts: E.
        few_tokens: computes a step of up to `MAX_TOKENS` tokens.
        many_tokens: computes longer ones.
        ahead: reads the next layer's experts for longer ones.
        prefetcher: is told what a short step wants, and may bring what the next layers will.
    """

    def __init__(
        self,
        tier: RamTier,
        layer: int,
        num_experts: int,
        few_tokens: ExpertKernel,
        many_tokens: ExpertKernel,
        ahead: ReadAhead | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._tier = tier
        self._layer = layer
        self._experts = num_experts
        self._few_tokens = few_tokens
        self._many_tokens = many_tokens
        self._ahead = ahead
        self._prefetcher = prefetcher

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`.

        Raises:
            EngineError: an expert could not be read.
        """
        step = _Step(hidden_states, top_k_index, self._experts)
        if step.spans:
            self._compute_all(step, hidden_states)
        return step.weighted_sum(top_k_weights)

    def _compute_all(self, step: _Step, hidden: torch.Tensor) -> None:
        """All at once if there are slots for them; else in rounds, of which one is read while another is computed."""
        tier, layer, wanted = self._tier, self._layer, list(step.spans)
        capacity = tier.capacity(layer)
        if len(wanted) > capacity:
            absent = set(tier.absent(layer, wanted))
            wanted.sort(key=absent.__contains__)  # first those that are there, then the others in the file's order
            capacity = max(capacity // 2, 1)
        now = tier.acquire(layer, wanted[:capacity])
        left = [*now.left, *wanted[capacity:]]
        following = Acquired(layer)
        read = list(now.arriving)
        told = False
        try:
            while True:
                if left:
                    following = tier.acquire_ahead(layer, left[:capacity])
                    left = [*following.left, *left[capacity:]]
                    read += following.arriving
                if not (left or told):
                    told = True
                    self._foretell(step, hidden, read)
                self._compute(step, now)
                tier.release(now)
                if following.slots:
                    now, following = following, Acquired(layer)
                elif left:
                    now = tier.acquire(layer, left[:capacity])
                    left = [*now.left, *left[capacity:]]
                    read += now.arriving
                    if not now.slots:
                        message = "All places for experts in RAM are taken and not given back."
                        raise EngineError(ErrorCode.INTERNAL, message)
                else:
                    return
        finally:
            tier.release(now)
            tier.release(following)

    def _foretell(self, step: _Step, hidden: torch.Tensor, read: list[int]) -> None:
        """The step's own reads have been asked for: now for those of the layers to come."""
        if step.tokens > MAX_TOKENS:
            if self._ahead is not None:
                self._ahead.begun(self._layer, len(step.spans), read)
        elif self._prefetcher is not None:
            self._prefetcher.observe(self._layer, list(step.spans), hidden)

    def _compute(self, step: _Step, acquired: Acquired) -> None:
        """Those that are there first, then each when it has arrived."""
        arrived: SimpleQueue[int] = SimpleQueue()
        for expert, arrival in acquired.arriving.items():
            arrival.add_done_callback(lambda _, expert=expert: arrived.put(expert))  # type: ignore[misc]
        self._run(step, acquired, [expert for expert in acquired.slots if expert not in acquired.arriving])
        missing = len(acquired.arriving)
        while missing:
            batch = [arrived.get()]
            while not arrived.empty():
                batch.append(arrived.get())
            for expert in batch:
                acquired.arriving[expert].result()
            self._run(step, acquired, sorted(batch))
            missing -= len(batch)

    def _run(self, step: _Step, acquired: Acquired, experts: list[int]) -> None:
        # Which kernel computes depends on the step alone, not on how many of its experts happen to be there.
        if step.tokens > MAX_TOKENS:
            step.compute(self._many_tokens, acquired.slots, experts)
            return
        batch: list[int] = []
        rows = 0
        for expert in experts:
            count = step.rows_of(expert)
            if rows + count > MAX_TOKENS:
                step.compute(self._few_tokens, acquired.slots, batch)
                batch, rows = [], 0
            batch.append(expert)
            rows += count
        step.compute(self._few_tokens, acquired.slots, batch)


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
