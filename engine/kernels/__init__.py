"""Expert computation: `reference` is what it means, the others are how it is done fast."""

from __future__ import annotations

from typing import Any

from engine.experts.bank import BankLayer
from engine.kernels.interface import ExpertKernel, ExpertMath
from engine.kernels.torch_experts import TorchExperts


def choose_kernel(module: Any, layer: BankLayer) -> ExpertKernel | None:
    """The fastest kernel that can compute this layer's experts; `None` if the module computes by itself."""
    if not hasattr(module, "has_gate"):
        return None
    return TorchExperts(layer, ExpertMath.of(module))
