"""Converts matrices to tiles and back with the native kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from engine.kernels.native.structs import matrix_struct

if TYPE_CHECKING:
    import torch

    from engine.formats.tiles import TiledMatrix
    from engine.kernels.native.library import NativeKernels

_ROUNDS = 16
"""As `engine.formats.tiles.ROUNDS`."""


def quantise_natively(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels, rounds: int = _ROUNDS) -> None:
    """Fills `target` from `weight`: bf16 [rows, columns], contiguous, in RAM, like `target`."""
    struct = matrix_struct(target)
    kernels.quantise(kernels.pool, ctypes.addressof(struct), weight.data_ptr(), rounds)


def dequantise_natively(matrix: TiledMatrix, begin: int, end: int, out: torch.Tensor, kernels: NativeKernels) -> None:
    """Blocks [begin, end) of a matrix in RAM to `out`: bf16 [rows, columns], contiguous, paired like the matrix.

    The same values as `engine.formats.tiles.dequantise`.
    """
    struct = matrix_struct(matrix)
    kernels.dequantise(kernels.pool, ctypes.addressof(struct), begin, end, out.data_ptr())
