"""Expert computation: `reference` is the definition, the others are fast implementations."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.experts import can_compute as can_compute_on_card
from engine.kernels.gpu.proof import kernels_of, why_not
from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords
from engine.kernels.native.experts import NativeExperts, can_compute
from engine.kernels.native.library import NativeKernels
from engine.kernels.torch_experts import TorchExperts


def choose_kernel(module: Any, layer: LayerRecords, kernels: NativeKernels | None) -> ExpertKernel | None:
    """The fastest kernel for this layer's experts; `None` if the module computes them itself.

    `kernels`: the native ones, if available.
    """
    in_torch = choose_torch_kernel(module, layer, kernels)
    on_card = kernels_of(layer.device) if in_torch is not None else None
    if in_torch is not None and on_card is not None and can_compute_on_card(layer, in_torch.math):
        return CardExperts(layer, in_torch.math, on_card, many_tokens=in_torch)
    if in_torch is None or kernels is None or not can_compute(layer, in_torch.math):
        return in_torch
    return NativeExperts(layer, in_torch.math, kernels, many_tokens=in_torch)


def choose_torch_kernel(module: Any, layer: LayerRecords, kernels: NativeKernels | None) -> TorchExperts | None:
    """A kernel that handles any number of tokens the same way; it uses `kernels` only to dequantise."""
    if not hasattr(module, "has_gate"):
        return None
    on_card = kernels_of(layer.device)
    if on_card is not None:
        return TorchExperts(layer, ExpertMath.of(module), kernels, on_card.unpack)
    return TorchExperts(layer, ExpertMath.of(module), kernels)


def card_note(device: torch.device) -> str:
    """A note for the user if a card computes experts with the slower operators; otherwise empty."""
    reason = why_not(device) if device.type != "cpu" else None
    return f"The card computes experts with PyTorch's operators, which is slower: {reason}." if reason else ""
