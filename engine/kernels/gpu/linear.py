"""Linear layers with tiled weights on a card."""

from __future__ import annotations

import torch

from engine.formats.tiles import TiledMatrix, dequantise, rows_of
from engine.kernels.gpu.stored import CardKernels, RecordTable, matrix_in, part_in, store

_FEW_TOKENS = 16
"""Up to this many tokens, reading the tiles per token from the card's cache is faster than dequantising."""


class CardLinear:
    """The `forward` of one tiled linear layer; replaces its weight.

    Few tokens use the tiles directly, if there are kernels; otherwise each call dequantises.

    Args:
        matrix: on any device; copied to `device`.
        kernels: of the card, if it runs them.

    Attributes:
        matrix: on `device`, within `record`.
    """

    def __init__(
        self, matrix: TiledMatrix, bias: torch.Tensor | None, device: torch.device, kernels: CardKernels | None
    ) -> None:
        self.record, self._stored = store(matrix, bias, device)
        self._kernels = kernels
        self._table = RecordTable([self.record])
        self.matrix = matrix_in(self.record[0], self._stored, matrix)
        self._bias = part_in(self.record[0], self._stored.bias_at, bias) if bias is not None else None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., rows]."""
        if self._kernels is None or not self.is_for_few(input):
            return self.rows(input, 0, self._stored.rows)
        rows = input.reshape(-1, self._stored.columns).to(torch.bfloat16).contiguous()
        out = self._kernels.few.multiply_visits(self._stored, self._table, rows, None, 1)
        return out.view(*input.shape[:-1], self._stored.rows).to(input.dtype)

    def is_for_few(self, input: torch.Tensor) -> bool:
        """Whether tiles are read directly for so many tokens, if there are kernels."""
        return 0 < input.numel() <= _FEW_TOKENS * self._stored.columns

    def rows(self, input: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """[.., columns] -> [.., end - begin], with weights unpacked.

        Args:
            begin, end: rows of the matrix; where a block of tiles begins, and where one or the matrix ends.
        """
        tokens = input.reshape(-1, self._stored.columns).to(torch.bfloat16).contiguous()
        unpack = self._kernels.unpack if self._kernels is not None else dequantise
        bias = self._bias[begin:end] if self._bias is not None else None
        out = torch.nn.functional.linear(tokens, unpack(rows_of(self.matrix, begin, end)), bias)
        return out.view(*input.shape[:-1], end - begin).to(input.dtype)
