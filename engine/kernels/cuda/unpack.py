"""Tiled matrices as rows of bf16, in one launch: what `engine.formats.tiles.dequantise` takes a dozen operators for."""

from __future__ import annotations

import ctypes

import torch

from engine.formats import WeightFormat
from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.launcher import Launcher
from engine.kernels.cuda.products import TILED, pointer

_THREADS, _TILES = 128, 4
_ALIGNMENT = 16


class UnpackArguments(ctypes.Structure):
    """`UnpackArguments` in unpack.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "table", "out")),
        *((name, ctypes.c_int) for name in ("columns", "rows", "pairing")),
    )


def unpack_kernel(of_weights: WeightFormat) -> Kernel:
    """The kernel for a tiled format."""
    return Kernel("unpack.cu", "unpack_kernel", _THREADS, (("SWITCHYARD_FORMAT", TILED[of_weights.name]),))


class CudaUnpacker:
    """Unpacks on one card."""

    def __init__(self, card: Launcher) -> None:
        self._card = card

    def __call__(self, matrix: TiledMatrix) -> torch.Tensor:
        """The weights, bf16 [rows, columns]: the same bits as `dequantise` gives."""
        shape = matrix.shape
        if any(not part.is_contiguous() or part.data_ptr() % _ALIGNMENT for part in matrix.parts.values()):
            return dequantise(matrix)
        out = torch.empty(shape.rows, shape.columns, dtype=torch.bfloat16, device=matrix.weights.device)
        arguments = UnpackArguments(
            *(pointer(part) for part in (matrix.weights, matrix.scales, matrix.zeros, matrix.table, out)),
            *(shape.columns, shape.rows, int(shape.pairing)),
        )
        self._card.launch(unpack_kernel(shape.format), (-(-shape.groups // _TILES), shape.blocks, 1), arguments)
        return out
