"""What native steps can read in place."""

from __future__ import annotations

from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.linear import linear_struct


def is_plain(weight: torch.Tensor | None) -> bool:
    """Whether the kernels can read it: bf16, contiguous, in RAM."""
    return (
        weight is not None and weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()
    )


def is_readable(linear: Any) -> bool:
    """Whether the kernels can read the weights and the bias of a linear layer."""
    return linear_struct(linear) is not None and (linear.bias is None or is_plain(linear.bias))


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Where it lies; `None` becomes a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def out_of_memory() -> EngineError:
    """What to raise when a step had no memory for its buffers."""
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a layer.")
