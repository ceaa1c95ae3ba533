"""Expert computation: `reference` is what it means, the others are how it is done fast."""

from __future__ import annotations

from typing import Any

from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords
from engine.kernels.native.experts import NativeExperts, can_compute
from engine.kernels.native.library import NativeKernels
from engine.kernels.torch_experts import TorchExperts


def choose_kernel(module: Any, layer: LayerRecords, kernels: NativeKernels | None) -> ExpertKernel | None:
    """The fastest kernel that can compute this layer's experts; `None` if the module computes by itself.

    `kernels` are the native ones, where they can be had.
    """
    if not hasattr(module, "has_gate"):
        return None
    math = ExpertMath.of(module)
    in_torch = TorchExperts(layer, math, kernels)
    if kernels is not None and can_compute(layer, math):
        return NativeExperts(layer, math, kernels, many_tokens=in_torch)
    return in_torch
