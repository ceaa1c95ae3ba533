"""Slots for records of one layout: a share of the RAM budget, and who is in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from engine.errors import EngineError, ErrorCode
from engine.experts.bank import BankLayer
from engine.experts.bank_header import BankHeader
from engine.experts.cache.policies import Key, make_policy
from engine.experts.cache.pool import Pool
from engine.experts.cache.selection import PolicySelector
from engine.experts.record import RecordLayout, allocate_records

ADAPTIVE = "auto"
"""Name of the choice among the policies by what each would have hit."""


class SlotGroup:
    """The slots that the layers with records of one layout share.

    Attributes:
        slots: the memory, as kernels see it: a layer whose experts are the slots.
        pool: who is in them.
        selector: chooses the policy while running, if that was asked for.
    """

    def __init__(
        self,
        layout: RecordLayout,
        count: int,
        policy: str = ADAPTIVE,
        popularity: Mapping[Key, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.slots = BankLayer("slots", layout, allocate_records(count, layout, torch.device("cpu")))
        self.selector = PolicySelector(count, popularity=popularity) if policy == ADAPTIVE else None
        name = self.selector.adopted if self.selector is not None else policy
        self.pool = Pool(range(count), make_policy(name, count, popularity, seed))

    @property
    def free(self) -> int:
        """Slots with nobody in them or on the way to them."""
        return self.pool.capacity - len(self.pool.residents) - len(self.pool.arriving)

    def observe(self, keys: Sequence[Key]) -> None:
        """One step's experts, for the choice of the policy."""
        if self.selector is not None and (policy := self.selector.observe(keys)) is not None:
            self.pool.adopt(policy)


def fewest_slots(layers: Iterable[tuple[RecordLayout, int]], at_least: int) -> dict[RecordLayout, int]:
    """The slots of each layout without which nothing can be computed.

    Args:
        layers: layout and number of experts of each.
        at_least: experts of one layer that must fit at once.
    """
    fewest: dict[RecordLayout, int] = {}
    for layout, experts in layers:
        fewest[layout] = max(fewest.get(layout, 0), min(at_least, experts))
    return fewest


def share_slots(header: BankHeader, budget: int, at_least: int) -> dict[RecordLayout, int]:
    """How many slots each layout gets of `budget` bytes: in proportion to its records, never more than it has.

    Args:
        at_least: experts of one layer that must fit at once.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, with the least budget that would do.
    """
    experts: dict[RecordLayout, int] = {}
    for layer in header.layers:
        experts[layer.layout] = experts.get(layer.layout, 0) + layer.num_experts
    floor = fewest_slots(((layer.layout, layer.num_experts) for layer in header.layers), at_least)
    least = sum(count * layout.nbytes for layout, count in floor.items())
    if least > budget:
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"The experts of one step need {least / 1e6:.0f} MB of RAM, more than the {budget / 1e6:.0f} MB that are "
            "left for them: raise the RAM budget or choose a smaller model.",
        )
    # Above the floor in proportion; what rounding leaves goes to the layouts after, and the small ones come last.
    spare, wanted = budget - least, header.records_nbytes - least
    shares: dict[RecordLayout, int] = {}
    for layout in sorted(experts, key=lambda layout: layout.nbytes, reverse=True):
        more = (experts[layout] - floor[layout]) * layout.nbytes
        extra = min(spare * more // max(wanted, 1), more) // layout.nbytes
        shares[layout] = floor[layout] + extra
        spare -= extra * layout.nbytes
        wanted -= more
    return shares
