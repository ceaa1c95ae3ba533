"""Experts that do not fit into RAM: computed from slots of a RAM tier that are filled from disk on demand.

The output of each expert for each token is kept separately, rounded as the kernels round it.  The weighted sum is taken
at the end, in fp32, in expert order, so an answer does not depend on what was already in RAM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from engine.experts.cache.pool import Slot
from engine.experts.disk_tier import DiskTier
from engine.experts.dispatch import BANK_LAYER
from engine.experts.ram_tier import RamTier
from engine.experts.record_source import Arrivals, LentSlots, RecordSource, TierRecords
from engine.experts.recording import FEW_TOKENS
from engine.experts.sites import ExpertsSite
from engine.kernels import choose_kernel, choose_torch_kernel
from engine.kernels.interface import ExpertKernel
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.experts.prediction.prefetcher import Prefetcher


class Visits(Protocol):
    """The (token, expert) pairs of one step, one row for each, sorted by expert.

    Attributes:
        tokens: T.
        spans: expert -> its rows, [begin, end), in expert order; ids that are not an expert are left out.
    """

    tokens: int
    spans: dict[int, tuple[int, int]]

    def compute(self, kernel: ExpertKernel, slots: Mapping[int, Slot], experts: list[int]) -> None:
        """Computes these experts for their tokens, unweighted.

        Every row passed to the kernel uses a single slot, so it reads no slots but these; others may be being filled.
        """

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[T, k] -> [T, H]: sums each token's visits in expert order, in fp32."""


def visits_of(hidden: torch.Tensor, index: torch.Tensor, num_experts: int) -> Visits:
    """The visits of hidden states [T, H] routed to experts [T, k]."""
    if len(hidden) == 1 and len(set(chosen := index[0].tolist())) == len(chosen):
        return _OneToken(hidden, chosen, num_experts)
    return _ManyTokens(hidden, index, num_experts)


class _OneToken:
    """Visits of a decode step, with as few operators as possible: each costs as much as reading a small expert."""

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
        # Stable, so that the rows of a token stay in expert order.
        rows = self._sources.argsort(stable=True).view(self.tokens, self._width)
        result = torch.zeros(self._hidden.shape, dtype=torch.float32)
        for visit in rows.unbind(1):
            result += self._outs[visit].float().mul_(shares[visit])
        return result.to(self._hidden.dtype)


@dataclass
class DiskBackedBank:
    """The disk and RAM tiers behind some experts modules of a model.

    Attributes:
        made_again: why the bank was rebuilt when the model was loaded, if it was.
    """

    disk: DiskTier
    ram: RamTier
    made_again: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of RAM reserved for experts."""
        return self.ram.nbytes

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about current problems."""
        made = f"The experts were prepared again because {self.made_again}." if self.made_again is not None else None
        return [note for note in (made, self.disk.note, self.ram.note) if note is not None]

    def close(self) -> None:
        """Stops the reader threads and frees the slots.  Idempotent."""
        self.disk.close()  # first, because closing the RAM tier waits for the reads in flight
        self.ram.close()


def can_be_disk_backed(site: ExpertsSite) -> bool:
    """Whether kernels compute these experts; a module with its own forward needs all its records in RAM."""
    return hasattr(site.module, "has_gate")


def bind_disk_backed(
    sites: list[ExpertsSite], bank: DiskBackedBank, kernels: NativeKernels | None, prefetcher: Prefetcher | None = None
) -> None:
    """Binds every experts module to its slots and to the kernels that compute from them.

    Args:
        prefetcher: for the bank's RAM tier, if experts are to be predicted.
    """
    lent = LentSlots(bank.ram)
    ahead = ReadAhead(bank.ram, [layer.num_experts for layer in bank.disk.header.layers])
    for site in sites:
        layer = bank.disk.header.index_of[site.name]
        slots = bank.ram.slots(layer)
        in_torch = choose_torch_kernel(site.module, slots, kernels)
        few = choose_kernel(site.module, slots, kernels)
        assert few is not None
        assert in_torch is not None
        source = TierRecords(lent, layer, site.num_experts, few)
        experts = DiskBackedExperts(source, layer, few, in_torch, ahead, prefetcher)
        setattr(site.module, BANK_LAYER, (slots, experts))


class ReadAhead:
    """Prefetches the next layer's experts during a prompt, before they are routed, since most will be needed anyway.

    Otherwise the disk would idle during attention, between the last read of one layer and the first of the next.
    Experts are read in file order, into free slots and slots of experts that were read for this prompt and have been
    computed.  Experts that were in RAM before stay there for decoding.

    Args:
        experts: number of experts in each layer of the tier.
    """

    def __init__(self, tier: RamTier, experts: Sequence[int]) -> None:
        self._tier = tier
        self._experts = experts
        self._layer = -1
        self._done_with: list[tuple[int, int]] = []

    def begun(self, layer: int, wanted: int, read: Iterable[int]) -> None:
        """All experts of a layer have been requested.

        Args:
            wanted: how many experts the layer's tokens use.
            read: those that had to be read from disk; none is needed again in this prompt.
        """
        if layer <= self._layer:
            self._done_with = []
        self._layer = layer
        following = layer + 1
        # Urgent reads go first, so wasted ones delay no step, but they do use disk bandwidth.
        if following < len(self._experts) and 3 * wanted >= 2 * self._experts[layer]:
            evictable = iter(self._done_with)
            self._tier.prefetch(following, range(self._experts[following]), evictable)
            self._done_with = list(evictable)
        self._done_with += [(layer, expert) for expert in read]


class DiskBackedExperts:
    """Computes one layer's experts: first those in RAM, while the others are read.

    Args:
        source: brings experts into slots; kernels index the slots as if they were experts.
        layer: index of the layer in the tier.
        few_tokens: computes steps of up to `MAX_TOKENS` tokens.
        many_tokens: computes longer steps.
        ahead: prefetches the next layer's experts in longer steps.
        prefetcher: observes the routing of short steps, and may prefetch for the next layers.
    """

    def __init__(
        self,
        source: RecordSource,
        layer: int,
        few_tokens: ExpertKernel,
        many_tokens: ExpertKernel,
        ahead: ReadAhead | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self._source, self._layer = source, layer
        self._few_tokens, self._many_tokens = few_tokens, many_tokens
        self._ahead, self._prefetcher = ahead, prefetcher

    records_itself = True

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`.

        Raises:
            EngineError: an expert could not be read.
        """
        step = visits_of(hidden_states, top_k_index, self._source.num_experts)
        if step.spans:
            self._compute_all(step, hidden_states)
        return step.weighted_sum(top_k_weights)

    def _compute_all(self, step: Visits, hidden: torch.Tensor) -> None:
        """Computes the resident experts first, then the others as they arrive."""
        notified = False

        def notify() -> None:
            """Starts prefetching for later layers, once all of this step's own reads are queued."""
            nonlocal notified
            if notified or arrivals.left:
                return
            notified = True
            if step.tokens > MAX_TOKENS:
                if self._ahead is not None:
                    self._ahead.begun(self._layer, len(step.spans), arrivals.read)
            elif self._prefetcher is not None:
                self._prefetcher.observe(self._layer, list(step.spans), hidden)

        arrivals = Arrivals(self._source, list(step.spans), notify)
        try:
            for held, there in arrivals:
                if not (notified or arrivals.left):
                    notify()
                self._run(step, held.rows, there)
        except BaseException:
            arrivals.release()
            raise
        if RECORDER.on and step.tokens <= FEW_TOKENS:
            RECORDER.on_cpu += len(step.spans)
            if RECORDER.uses is not None:
                were_there = tuple(expert for expert in step.spans if expert not in arrivals.read)
                RECORDER.uses.append((RECORDER.step, RECORDER.layer, list(step.spans), were_there))

    def _run(self, step: Visits, slots: Mapping[int, Slot], experts: list[int]) -> None:
        begun_ns = time.perf_counter_ns()
        self._run_now(step, slots, experts)
        if RECORDER.on:
            RECORDER.span(lanes.CPU_EXPERTS, lanes.EXPERTS, begun_ns, time.perf_counter_ns(), count=len(experts))

    def _run_now(self, step: Visits, slots: Mapping[int, Slot], experts: list[int]) -> None:
        # The kernel depends on the step alone, not on which experts happen to be resident: same input, same bits.
        if step.tokens > MAX_TOKENS:
            step.compute(self._many_tokens, slots, experts)
            return
        batch: list[int] = []
        rows = 0
        for expert in experts:
            begin, end = step.spans[expert]
            count = end - begin
            if rows + count > MAX_TOKENS:
                step.compute(self._few_tokens, slots, batch)
                batch, rows = [], 0
            batch.append(expert)
            rows += count
        step.compute(self._few_tokens, slots, batch)
