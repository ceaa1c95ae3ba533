"""Linear layers with tiled weights on a card."""

from __future__ import annotations

import torch

from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.gpu.stored import CardKernels, RecordTable, matrix_in, part_in, store

_FEW_TOKENS = 16
"""Up to this many tokens, reading the tiles per token from the card's cache is faster than dequantising."""


class CardLinear:
    """The `forward` of one tiled linear layer; replaces its weight.

    Few tokens use the tiles directly, if there are kernels; otherwise each call dequantises.

    Args:
        matrix: on any device; copied to `device`.
        kernels: of the card, if it runs them.
    """

    def __init__(
        self, matrix: TiledMatrix, bias: torch.Tensor | None, device: torch.device, kernels: CardKernels | None
    ) -> None:
        self.record, self._stored = store(matrix, bias, device)
        self._kernels = kernels
        self._table = RecordTable([self.record])
        self._matrix = matrix_in(self.record[0], self._stored, matrix)
        self._bias = part_in(self.record[0], self._stored.bias_at, bias) if bias is not None else None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., rows]."""
        rows = input.reshape(-1, self._stored.columns).to(torch.bfloat16).contiguous()
        if self._kernels is not None and 0 < len(rows) <= _FEW_TOKENS:
            out = self._kernels.few.multiply_visits(self._stored, self._table, rows, None, 1)
        else:
            unpack = self._kernels.unpack if self._kernels is not None else dequantise
            out = torch.nn.functional.linear(rows, unpack(self._matrix), self._bias)
        return out.view(*input.shape[:-1], self._stored.rows).to(input.dtype)
