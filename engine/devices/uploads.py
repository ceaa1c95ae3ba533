"""Uploads small tensors to a device without waiting for its queued work."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Copies a host tensor, which must not change afterwards, to a device, in order with its stream's work.

    From pageable memory, a card's copy would block the caller until all queued work is done, including the wait for an
    expert's weights.
    """
    if place.type != "cuda":
        return tensor.to(place)
    return tensor.pin_memory().to(place, non_blocking=True)
