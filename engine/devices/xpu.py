"""Intel's cards through `torch.xpu`.  Not yet run on one.

Decode steps are not captured: torch's graphs for these cards are too new to be trusted unproven.
"""

from __future__ import annotations

import torch

from engine.devices.card import CardKind
from engine.devices.host_memory import PageableMemory


def identity_of(index: int) -> str:
    """What times depend on: the card, its memory and its driver.  Its link is not known to torch."""
    properties = torch.xpu.get_device_properties(index)
    driver = getattr(properties, "driver_version", "")
    return f"{properties.name} {properties.total_memory >> 20} MiB driver {driver} XPU".replace("driver  ", "")


def _is_built() -> bool:
    return getattr(torch.version, "xpu", None) is not None


XPU = CardKind(
    "xpu",
    torch.xpu,
    lambda _place: PageableMemory(),
    identity_of,
    is_built=_is_built,
    variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
)
