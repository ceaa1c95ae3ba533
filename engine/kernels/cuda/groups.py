"""Products of many visits sorted by expert, by `group_products.cu`."""

from __future__ import annotations

import ctypes

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.products import ActivationArguments, struct_of
from engine.kernels.gpu.stored import ExpertGroups, RecordTable, StoredMatrix
from engine.kernels.interface import Activation

_THREADS, _WARPS = 128, 4
_NEIGHBOURS = 8
"""Visits that matrix units take at a time."""
_BLOCKS = (16, 64)
"""Visits of a block, as kernels are compiled."""


class GroupsArguments(ctypes.Structure):
    """`Groups` in groups.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("order", "ends", "block_expert", "block_begin")),
        ("experts", ctypes.c_int),
    )


class RoundedRows(ctypes.Structure):
    """`RoundedRows` in groups.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("codes", "scales"))


class RoundArguments(ctypes.Structure):
    """`RoundArguments` in round_rows.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("groups", GroupsArguments),
        ("to", RoundedRows),
        *((name, ctypes.c_int) for name in ("columns", "width", "tiles")),
    )


class GroupProductArguments(ctypes.Structure):
    """`GroupProductArguments` in group_products.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("groups", GroupsArguments),
        ("x", RoundedRows),
        *((name, ctypes.c_void_p) for name in ("records", "base")),
        *((name, ctypes.c_int64) for name in ("weights_at", "scales_at", "zeros_at", "bias_at", "table_at", "up_at")),
        *((name, ctypes.c_int) for name in ("columns", "rows", "pairing")),
        ("activation", ActivationArguments),
    )


ROUND_KERNEL = Kernel("round_rows.cu", "round_rows_kernel", _THREADS)


def group_kernel(of_format: str, block: int) -> Kernel:
    """The kernel for tiles or blocks (`engine.kernels.cuda.products.struct_of`) and so many visits of a block."""
    defines = [("SWITCHYARD_FORMAT", of_format), ("SWITCHYARD_TILES", str(block // _NEIGHBOURS))]
    if of_format.startswith("Blocks<"):
        defines.append(("SWITCHYARD_RESIDENT", "2"))
    return Kernel("group_products.cu", "group_product_kernel", _THREADS, tuple(defines))


def group_kernels(of_format: str) -> list[Kernel]:
    """All that may be asked for to multiply with matrices of a format."""
    return [group_kernel(of_format, block) for block in _BLOCKS]


class CudaGroups:
    """Multiplies visits sorted by expert, in blocks, on one card: bound by computing.

    x is rounded to 8 bits per 32 columns, as the CPU's kernels do.  Matrices of plain numbers are left to others.
    """

    def __init__(self, card: Launcher) -> None:
        self.card = card

    def takes(self, matrix: StoredMatrix) -> bool:
        """Whether there is a kernel for matrices like this."""
        return matrix.format is not None

    def multiply_groups(
        self,
        matrix: StoredMatrix,
        table: RecordTable,
        x: torch.Tensor,
        visits: int,
        groups: ExpertGroups,
        block: int,
        width: int,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Multiplies `block` visits of an expert at a time.

        Args:
            x: bf16 [T, columns], contiguous; visit v is its row v // width.
            block: 16 or 64; what `groups` was made for.
            activation: applied to the product, if any.

        Returns:
            [visits, outputs], in the original order of visits; unwritten for visits without an expert.
        """
        assert matrix.format is not None
        x = x if x.data_ptr() % 16 == 0 else x.clone()
        blocks, tiles, columns = len(groups.block_expert), block // _NEIGHBOURS, -(-matrix.columns // 32)
        sorted_visits = GroupsArguments(
            groups.order.data_ptr(), groups.ends.data_ptr(), groups.block_expert.data_ptr(),
            groups.block_begin.data_ptr(), len(table),
        )  # fmt: skip
        codes = x.new_empty(blocks * columns * block * 8, dtype=torch.int32)
        scales = x.new_empty(blocks * columns * block * 2, dtype=torch.float32)
        rounded = RoundedRows(codes.data_ptr(), scales.data_ptr())
        rounding = RoundArguments(x.data_ptr(), sorted_visits, rounded, matrix.columns, width, tiles)
        self.card.launch(ROUND_KERNEL, (blocks, tiles, 1), rounding)
        out = x.new_empty(visits, matrix.outputs)
        arguments = GroupProductArguments(
            out.data_ptr(), sorted_visits, rounded, table.offsets.data_ptr(), table.base.data_ptr(), matrix.weights_at,
            matrix.scales_at, matrix.zeros_at, matrix.bias_at, matrix.table_at, matrix.up_at, matrix.columns,
            matrix.rows, int(matrix.pairing), ActivationArguments.of(activation),
        )  # fmt: skip
        row_blocks = -(-matrix.rows // 32)
        self.card.launch(
            group_kernel(struct_of(matrix.format, matrix.up), block), (blocks, -(-row_blocks // _WARPS), 1), arguments
        )
        return out
