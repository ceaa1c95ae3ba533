"""Matrices in tiles or blocks as rows of bf16, in one launch: operators of PyTorch's would be a dozen."""

from __future__ import annotations

import ctypes

import torch

from engine.formats import WeightFormat
from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.products import TILED, pointer
from engine.kernels.repack import Blocks

_THREADS, _TILES = 128, 4
_ALIGNMENT = 16
_RUN = 32
"""Columns of a row of blocks that a thread unpacks."""


class UnpackArguments(ctypes.Structure):
    """`UnpackArguments` in unpack.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "table", "out")),
        *((name, ctypes.c_int) for name in ("columns", "rows", "pairing")),
    )


def unpack_kernel(of_weights: WeightFormat) -> Kernel:
    """The kernel for tiles or blocks."""
    is_tiled = of_weights.name in TILED
    define = ("SWITCHYARD_FORMAT", TILED[of_weights.name]) if is_tiled else ("SWITCHYARD_BLOCKS", of_weights.name)
    return Kernel("unpack.cu", "unpack_kernel", _THREADS, (define,))


class CudaUnpacker:
    """Unpacks on one card."""

    def __init__(self, card: Launcher) -> None:
        self._card = card

    def __call__(self, matrix: TiledMatrix | Blocks) -> torch.Tensor:
        """The weights, bf16 [rows, columns]: the same bits as `dequantise` and `BlockType.dequantise` give."""
        if isinstance(matrix, Blocks):
            return self._of_blocks(matrix)
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

    def _of_blocks(self, blocks: Blocks) -> torch.Tensor:
        assert blocks.order is None
        out = torch.empty(blocks.rows, blocks.columns, dtype=torch.bfloat16, device=blocks.raw.device)
        arguments = UnpackArguments(
            blocks.raw.data_ptr(), None, None, None, out.data_ptr(), blocks.columns, blocks.rows, 0
        )
        if blocks.rows:
            grid = (-(-blocks.rows * blocks.columns // _RUN // _THREADS), 1, 1)
            self._card.launch(unpack_kernel(blocks.kind), grid, arguments)
        return out
