"""Expert computation: `reference` is what it means, the others are how it is done fast."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.gpu.proof import runs_kernels, why_not
from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords
from engine.kernels.native.experts import NativeExperts, can_compute
from engine.kernels.native.library import NativeKernels
from engine.kernels.torch_experts import TorchExperts


def choose_kernel(module: Any, layer: LayerRecords, kernels: NativeKernels | None) -> ExpertKernel | None:
    """The fastest kernel that can compute this layer's experts; `None` if the module computes by itself.

    `kernels` are the native ones, where they can be had.
    """
    in_torch = choose_torch_kernel(module, layer, kernels)
    if in_torch is not None and runs_kernels(layer.device):
        from engine.kernels.gpu import experts as on_card  # not to be had without Triton

        if on_card.can_compute(layer, in_torch.math):
            return on_card.CardExperts(layer, in_torch.math)
    if in_torch is None or kernels is None or not can_compute(layer, in_torch.math):
        return in_torch
    return NativeExperts(layer, in_torch.math, kernels, many_tokens=in_torch)


def choose_torch_kernel(module: Any, layer: LayerRecords, kernels: NativeKernels | None) -> TorchExperts | None:
    """One that computes any number of tokens in the same way; `kernels` at most dequantise for it."""
    if not hasattr(module, "has_gate"):
        return None
    return TorchExperts(layer, ExpertMath.of(module), kernels)


def card_note(device: torch.device) -> str:
    """One sentence for the user where a card computes experts the plain, slower way; else empty."""
    reason = why_not(device) if device.type == "cuda" else None
    return f"The card computes experts with PyTorch's operators, which is slower: {reason}." if reason else ""
