"""One call into the native kernels for all experts of a layer, for the few tokens of a decode step."""

from __future__ import annotations

import ctypes

import torch

from engine.errors import EngineError, ErrorCode
from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords
from engine.kernels.native.library import ExpertsStruct, NativeKernels

MAX_TOKENS = 8
"""Up to this many tokens the weights' way from RAM is what is waited for; beyond it matrix products are better."""


def can_compute(layer: LayerRecords, math: ExpertMath) -> bool:
    """Whether the native kernels know these experts: bf16 in RAM, gated by SiLU, without biases or norm."""
    return (
        layer.device.type == "cpu"
        and math.first == "gate_up_proj"
        and math.is_silu_gate
        and math.first_bias is None
        and math.norm is None
        and {part.dtype for part in layer.layout.parts} == {torch.bfloat16}
    )


class NativeExperts:
    """Computes one layer's experts natively for up to `MAX_TOKENS` tokens, and by `many_tokens` for more."""

    def __init__(self, layer: LayerRecords, kernels: NativeKernels, many_tokens: ExpertKernel) -> None:
        parts = {part.name: part for part in layer.layout.parts}
        hidden, inner = parts["down_proj"].shape
        self.struct = ExpertsStruct(
            layer.records.data_ptr(),
            layer.layout.nbytes,
            parts["gate_up_proj"].offset,
            parts["down_proj"].offset,
            layer.num_experts,
            hidden,
            inner,
        )
        self._layer = layer  # the struct points into its records
        self._address = ctypes.addressof(self.struct)
        self._kernels = kernels
        self._many_tokens = many_tokens

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`."""
        tokens, width = top_k_index.shape
        if tokens > MAX_TOKENS or hidden_states.dtype != torch.bfloat16:
            return self._many_tokens(hidden_states, top_k_index, top_k_weights)
        hidden_states = hidden_states.contiguous()
        index = top_k_index.contiguous()
        if index.dtype != torch.int64:
            index = index.long()
        weights = top_k_weights.float().contiguous()
        out = torch.empty_like(hidden_states)
        kernels = self._kernels
        failed = kernels.experts_bf16(
            kernels.pool,
            self._address,
            tokens,
            width,
            hidden_states.data_ptr(),
            index.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
        )
        if failed:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a layer's experts.")
        return out
