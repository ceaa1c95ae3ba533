"""A step's visits sorted by expert on the card: how many each has is never brought to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """Visits of one expert after the other, and which block of them each program computes.

    Attributes:
        order: int64 [visits], those that visit nobody last.
        ends: int64 [experts], where the visits of each end in `order`.
        block_expert, block_begin: int64 [programs]; the expert is `experts` where there is nothing to do.
    """

    order: torch.Tensor
    ends: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor


def group(ids: torch.Tensor, experts: int, block: int) -> Groups:
    """Sorts visits.

    Args:
        ids: int64 [visits]; who is no expert is at `experts`.
        block: visits that a program computes.
    """
    visits, place = len(ids), ids.device
    in_order, order = torch.sort(ids, stable=True)
    # Bounds of all experts at once: a count of each would have to be waited for.
    every = torch.arange(experts + 1, device=place)
    bounds = torch.searchsorted(in_order, every)
    begins, ends = bounds[:-1], bounds[1:]
    blocks_end = torch.cumsum((ends - begins + block - 1) // block, 0)
    # As many programs as there can be blocks: each expert that occurs has at most one that is not full.
    programs = torch.arange(-(-visits // block) + min(experts, visits), device=place)
    expert = torch.searchsorted(blocks_end, programs, right=True)
    known = expert.clamp(max=experts - 1)
    before = torch.where(known > 0, blocks_end[(known - 1).clamp(min=0)], 0)
    return Groups(order, ends, expert, begins[known] + (programs - before) * block)
