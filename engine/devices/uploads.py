"""Small tensors from the host to a device, without waiting for what the device has still to do."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """`tensor`, of the host and not used any more there, on a device; its stream has it in order with other work.

    From ordinary memory a card's copy would hold the caller up until all that was queued before is done, the wait for
    an expert's weights among it.
    """
    if place.type != "cuda":
        return tensor.to(place)
    return tensor.pin_memory().to(place, non_blocking=True)
