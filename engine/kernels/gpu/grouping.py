"""A step's visits sorted by expert on the card: the counts never go to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """Visits sorted by expert, and the block of them for each program.

    Attributes:
        order: int64 [visits], visits without an expert last.
        ends: int64 [experts], end of each expert's visits in `order`.
        block_expert, block_begin: int64 [programs]; the expert is `experts` if there is nothing to do.
    """

    order: torch.Tensor
    ends: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor


def group(ids: torch.Tensor, experts: int, block: int) -> Groups:
    """Sorts visits.

    Args:
        ids: int64 [visits]; `experts` for visits without an expert.
        block: visits per program.
    """
    visits, place = len(ids), ids.device
    in_order, order = torch.sort(ids, stable=True)
    # Bounds of all experts by binary search: counting each would synchronise.
    every = torch.arange(experts + 1, device=place)
    bounds = torch.searchsorted(in_order, every)
    begins, ends = bounds[:-1], bounds[1:]
    blocks_end = torch.cumsum((ends - begins + block - 1) // block, 0)
    # Upper bound of blocks: each occurring expert has at most one partial block.
    programs = torch.arange(-(-visits // block) + min(experts, visits), device=place)
    expert = torch.searchsorted(blocks_end, programs, right=True)
    known = expert.clamp(max=experts - 1)
    before = torch.where(known > 0, blocks_end[(known - 1).clamp(min=0)], 0)
    return Groups(order, ends, expert, begins[known] + (programs - before) * block)
