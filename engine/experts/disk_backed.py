"""Experts that do not fit into RAM: computed from slots of a RAM tier that are filled from disk on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.experts.bank import BankLayer
from engine.experts.disk_tier import DiskTier
from engine.experts.dispatch import BANK_LAYER
from engine.experts.executor import ExpertExecutor
from engine.experts.ram_tier import RamTier
from engine.experts.record_source import LentSlots, TierRecords
from engine.experts.sites import ExpertsSite
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel
from engine.kernels.native.library import NativeKernels


@dataclass
class DiskBackedBank:
    """The disk and RAM tiers behind some experts modules of a model."""

    disk: DiskTier
    ram: RamTier
    lent: LentSlots = field(init=False)

    def __post_init__(self) -> None:
        self.lent = LentSlots(self.ram)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM reserved for experts."""
        return self.ram.nbytes

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about current problems."""
        return [note for note in (self.disk.note, self.ram.note) if note is not None]

    def slots(self, site: ExpertsSite) -> BankLayer:
        """What the kernels of an experts module see."""
        return self.ram.slots(self.disk.table.index_of[site.name])

    def source(self, site: ExpertsSite, kernel: ExpertKernel) -> TierRecords:
        """Its records, for this kernel on the CPU."""
        return TierRecords(self.lent, self.disk.table.index_of[site.name], site.num_experts, kernel)

    def close(self) -> None:
        """Stops the reader threads and frees the slots.  Idempotent."""
        self.disk.close()  # first, because closing the RAM tier waits for the reads in flight
        self.ram.close()


def can_be_disk_backed(site: ExpertsSite) -> bool:
    """Whether kernels compute these experts; a module with its own forward needs all its records in RAM.

    So do those that guess tokens, which a bank of the same model has or has not, as it is asked to guess or not.
    """
    return hasattr(site.module, "has_gate") and not site.is_beside


def bind_disk_backed(sites: list[ExpertsSite], bank: DiskBackedBank, kernels: NativeKernels | None) -> None:
    """Binds every experts module to its slots and to the kernels that compute from them."""
    ahead = ReadAhead(bank.ram, [layer.num_experts for layer in bank.disk.table.layers])
    for site in sites:
        slots = bank.slots(site)
        kernel = choose_kernel(site.module, slots, kernels)
        assert kernel is not None
        experts = ExpertExecutor(bank.source(site, kernel), bank.disk.table.index_of[site.name], ahead=ahead)
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
