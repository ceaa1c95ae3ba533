"""Attention layers and linear layers of many rows in one native call each: the dense part of a batch."""

from __future__ import annotations

import ctypes

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.paged_attention import PagedLayerStruct, Pieces
from engine.kernels.native.structs import AttentionStruct, SparseBlockStruct


def attention_rows(
    kernels: NativeKernels,
    layer: AttentionStruct,
    paged: PagedLayerStruct,
    pieces: Pieces,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Hidden states [T, H] plus the attention of a layer: norm, projections, rotation, pages and output.

    Args:
        layer: its weights; `paged` its pages.
        pieces: the sequences of these tokens.
        hidden: float32 or bf16.
        cos, sin: [T, angles], at least one per pair of dimensions.

    Returns:
        float32.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`.
    """
    hidden, cos, sin = (each.float().contiguous() for each in (hidden, cos, sin))
    out = torch.empty_like(hidden)
    failed = kernels.attention_rows(
        kernels.pool,
        ctypes.addressof(layer),
        ctypes.addressof(paged),
        pieces.address_for(paged.held),
        len(pieces.pieces),
        hidden.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[-1],
        out.data_ptr(),
    )
    if failed:
        raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute attention.")
    return out


def route_rows(
    kernels: NativeKernels, block: SparseBlockStruct, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of a sparse block's experts: normed hidden states, bf16 [T, H], ids [T, k] and float weights [T, k].

    Args:
        block: its norm and its router; `hidden` is float32, contiguous.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`.
    """
    tokens, width = hidden.shape[0], block.router.top_k
    normed = torch.empty_like(hidden, dtype=torch.bfloat16)
    chosen, shares = torch.empty(tokens, width, dtype=torch.int64), torch.empty(tokens, width)
    pointers = (tensor.data_ptr() for tensor in (hidden, normed, chosen, shares))
    if kernels.route_rows(kernels.pool, ctypes.addressof(block), tokens, *pointers):
        raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to route a layer.")
    return normed, chosen, shares


class RowsLinear:
    """The `forward` of a linear layer for many rows, while a batch is computed."""

    def __init__(self, module: torch.nn.Linear, kernels: NativeKernels) -> None:
        struct = linear_struct(module)
        assert struct is not None
        self._module, self._kernels, self._struct = module, kernels, struct
        self._address = ctypes.addressof(struct)
        self._bias_address = module.bias.data_ptr() if module.bias is not None else None
        self._library_forward = module.forward

    @staticmethod
    def can(module: torch.nn.Module) -> bool:
        """Whether this is a linear layer with weights and bias that the kernels support."""
        if type(module) is not torch.nn.Linear or linear_struct(module) is None:
            return False
        return module.bias is None or (module.bias.dtype == torch.bfloat16 and module.bias.is_contiguous())

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., rows] in bf16; other types use the original forward.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        if input.dtype != torch.bfloat16:
            return self._library_forward(input)
        rows, kernels = input.reshape(-1, self._struct.columns).contiguous(), self._kernels
        out = rows.new_empty(rows.shape[0], self._struct.rows)
        pointers = (rows.data_ptr(), self._bias_address, 0, out.data_ptr())
        if kernels.linear_rows(kernels.pool, self._address, rows.shape[0], *pointers):
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a linear layer.")
        return out.view(*input.shape[:-1], -1)
