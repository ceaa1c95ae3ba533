"""Linear layers of one token by the native kernels: the dense part of a decode step."""

from __future__ import annotations

import torch

from engine.errors import EngineError, ErrorCode
from engine.kernels.native.library import NativeKernels

_SMALLEST = 64 * 1024
"""Weights: below this the product costs less than handing it to threads."""


def speed_up_linears(model: torch.nn.Module, kernels: NativeKernels) -> int:
    """Lets every large bf16 `Linear` of a model on the CPU compute single tokens natively; returns how many.

    More tokens, other types and subclasses (which may mean something else by it) go the library's way as before.
    """
    count = 0
    for module in model.modules():
        if type(module) is not torch.nn.Linear:
            continue
        weight, bias = module.weight, module.bias
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.numel() < _SMALLEST:
            continue
        if not weight.is_contiguous() or (bias is not None and bias.dtype != torch.bfloat16):
            continue
        module.forward = _SingleTokenLinear(module, kernels)  # type: ignore[method-assign]
        count += 1
    return count


class _SingleTokenLinear:
    """The `forward` of one linear layer."""

    def __init__(self, module: torch.nn.Linear, kernels: NativeKernels) -> None:
        self._weight, self._bias = module.weight, module.bias
        self._rows, self._columns = module.weight.shape
        self._weight_address = module.weight.data_ptr()
        self._bias_address = module.bias.data_ptr() if module.bias is not None else None
        self._kernels = kernels

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() != self._columns or input.dtype != torch.bfloat16:
            return torch.nn.functional.linear(input, self._weight, self._bias)
        out = input.new_empty((*input.shape[:-1], self._rows))
        kernels = self._kernels
        failed = kernels.linear_bf16(
            kernels.pool,
            self._weight_address,
            self._rows,
            self._columns,
            input.contiguous().data_ptr(),
            self._bias_address,
            out.data_ptr(),
        )
        if failed:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a linear layer.")
        return out
