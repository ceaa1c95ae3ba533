"""Products with matrices in records by the kernels in `products.cu`."""

from __future__ import annotations

import ctypes
import math
from weakref import WeakKeyDictionary

import torch

from engine.formats import TiledFormat, WeightFormat
from engine.formats.ggml import BlockType
from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher, OnCard
from engine.kernels.gpu.stored import ExpertGroups, RecordTable, StoredMatrix
from engine.kernels.interface import Activation
from engine.kernels.repack import Blocks

MOST_VISITS = 1024
"""As in products.cu."""
_ROWS = (1, 2, 4, 8)
"""Visits that share a reading of weights, as kernels are compiled."""
_THREADS = 128
_TILED_BLOCK, _ROWS_BLOCK = 32, 8
_BLOCKS_PER_MULTIPROCESSOR = 4
"""That many keep a card's memory busy; fewer, and the columns are split."""
_LEAST_GROUPS, _LEAST_RUNS, _LEAST_STEPS = 16, 32, 2
"""Of a part of the columns of tiles, blocks and numbers: less is not worth adding up."""
_COUNTERS = 1024

TILED = {"int8": "Int8", "int4": "Int4", "lut4": "Lut4"}
"""Structs of formats.h by the name of the format."""
PLAIN = {torch.bfloat16: "PlainBf16", torch.float16: "PlainFp16", torch.float32: "PlainFp32"}


class ActivationArguments(ctypes.Structure):
    """`Activation` in activation.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("has_limit", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )

    @classmethod
    def of(cls, activation: Activation | None) -> ActivationArguments:
        """`None`: there is none."""
        if activation is None:
            return cls(kind=-1)
        has_limit = math.isfinite(activation.limit)
        return cls(int(activation.kind), has_limit, activation.limit if has_limit else 0.0, activation.alpha)


class ProductArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "ids", "slot_of", "records", "base", "shares")),
        *((name, ctypes.c_void_p) for name in ("parts", "arrived", "absent")),
        *((name, ctypes.c_int64) for name in ("weights_at", "scales_at", "zeros_at", "bias_at", "table_at", "up_at")),
        *((name, ctypes.c_int) for name in ("experts", "slots", "visits", "width", "together", "columns", "rows")),
        ("splits", ctypes.c_int),
        ("pairing", ctypes.c_int),
        ("floats", ctypes.c_int),
        ("activation", ActivationArguments),
    )


def product_kernel(of_format: str, rows: int) -> Kernel:
    """The kernel for a format of formats.h and this many visits at a time."""
    return Kernel(
        "products.cu", "product_kernel", _THREADS, (("SWITCHYARD_FORMAT", of_format), ("SWITCHYARD_ROWS", str(rows)))
    )


def product_kernels(of_format: str) -> list[Kernel]:
    """All that may be asked for to multiply with matrices of a format of formats.h or blocks.h."""
    return [product_kernel(of_format, rows) for rows in _ROWS]


def struct_of(of_weights: WeightFormat, up: WeightFormat | None = None) -> str:
    """The format's name in formats.h or blocks.h.

    Args:
        up: of up rows in blocks, if it is another.
    """
    if isinstance(of_weights, BlockType):
        return f"Blocks<{','.join(dict.fromkeys((of_weights.name, (up or of_weights).name)))}>"
    return TILED.get(of_weights.name) or f"Plain{of_weights.name.title()}"


class CudaProducts:
    """Multiplies visits one by one, or few that share an expert, on one card: bound by reading weights.

    A step's calls must come one after the other (on one stream): those with the same table share counters.
    """

    most_visits = MOST_VISITS

    def __init__(self, card: Launcher) -> None:
        self.card = card
        self._arrived: WeakKeyDictionary[RecordTable, torch.Tensor] = WeakKeyDictionary()

    def multiply_visits(
        self,
        matrix: StoredMatrix,
        table: RecordTable,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        width: int,
        activation: Activation | None = None,
        *,
        shares: torch.Tensor | None = None,
        slot_of: torch.Tensor | None = None,
        absent: torch.Tensor | None = None,
        floats: bool = False,
    ) -> torch.Tensor:
        """Up to `MOST_VISITS` visits; weights of an expert are read once for several of them.

        Args:
            x: [T, columns], contiguous, of the matrix's type.
            ids: int64 [visits]: visit v is row v // width of x to expert ids[v]; `None`: each row of x to the first.
            activation: applied to the product, if any.
            shares: float32 [tokens, k]: adds up the k visits of each token, with these as weights.
            slot_of: int32 [experts]: the record of each expert, -1 for none; by default experts are records.
            absent: int32 [visits]: becomes 1 for visits of experts without a record, 0 for others.
            floats: whether the result is float32, not of the type of `x`; of a linear layer, without ids and shares.

        Returns:
            [visits, outputs], zeros for ids that are no expert or have no record; [tokens, rows] with shares, to which
            those contribute nothing.
        """
        visits = len(x) if ids is None else len(ids)
        block = _TILED_BLOCK if isinstance(matrix.format, TiledFormat) else _ROWS_BLOCK
        leaders = 1 if ids is None else visits
        _, blocks, splits = grid = grid_of(matrix, leaders, self.card.multiprocessors)
        rows = matrix.rows if shares is not None else matrix.outputs
        together = shares.shape[1] if shares is not None else 1
        out = x.new_empty(visits // together, rows, dtype=torch.float32 if floats else None)
        x = x if x.data_ptr() % 16 == 0 else x.clone()
        arguments = ProductArguments(
            x=x.data_ptr(), out=out.data_ptr(), ids=pointer(ids), slot_of=pointer(slot_of),
            records=table.offsets.data_ptr(), base=table.base.data_ptr(), shares=pointer(shares),
            absent=pointer(absent), weights_at=matrix.weights_at, scales_at=matrix.scales_at,
            zeros_at=matrix.zeros_at, bias_at=matrix.bias_at, table_at=matrix.table_at, up_at=matrix.up_at,
            experts=len(table) if slot_of is None else len(slot_of), slots=len(table), visits=visits, width=width,
            together=together, columns=matrix.columns, rows=matrix.rows, splits=splits, pairing=int(matrix.pairing),
            floats=int(floats), activation=ActivationArguments.of(activation),
        )  # fmt: skip
        if splits > 1 or shares is not None:
            parts = x.new_empty(visits * splits * blocks * block, dtype=torch.float32)
            arguments.parts = parts.data_ptr()
            arguments.arrived = self._counters(table, blocks * (1 if shares is not None else leaders)).data_ptr()
        tokens = None if ids is None else visits // max(width, together)
        kernel = product_kernel(_name(matrix), _rows_at_once(visits, tokens, arguments.experts))
        self.card.launch(kernel, grid, arguments)
        return out

    def _counters(self, table: RecordTable, count: int) -> torch.Tensor:
        known = self._arrived.get(table)
        if known is None or len(known) < count:
            known = torch.zeros(max(_COUNTERS, count), dtype=torch.int32, device=table.offsets.device)
            self._arrived[table] = known
        return known


def grid_of(matrix: StoredMatrix, leaders: int, multiprocessors: int) -> tuple[int, int, int]:
    """Blocks of a launch: visits that lead, blocks of rows, parts of the columns.

    Args:
        leaders: visits of different experts; 1 for a linear layer.
    """
    if isinstance(matrix.format, TiledFormat):
        blocks, most = -(-matrix.rows // _TILED_BLOCK), -(-matrix.columns // 32) // _LEAST_GROUPS
    elif matrix.format is not None:
        blocks, most = -(-matrix.rows // _ROWS_BLOCK), matrix.columns // 32 // _LEAST_RUNS
    else:
        blocks = -(-matrix.rows // _ROWS_BLOCK)
        most = matrix.columns * matrix.dtype.itemsize // (16 * 32) // _LEAST_STEPS
    wanted = -(-_BLOCKS_PER_MULTIPROCESSOR * multiprocessors // (leaders * blocks))
    return leaders, blocks, max(1, min(wanted, most))


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where it lies; `None`: there is none."""
    return None if tensor is None else tensor.data_ptr()


def _name(matrix: StoredMatrix) -> str:
    return PLAIN[matrix.dtype] if matrix.format is None else struct_of(matrix.format, matrix.up)


def _rows_at_once(visits: int, tokens: int | None, experts: int) -> int:
    """Few visits share an expert (a token's experts differ), all share a linear layer (`None`)."""
    wanted = visits if tokens is None else min(tokens, max(2, -(-visits // experts)))
    return next((rows for rows in _ROWS if rows >= wanted), _ROWS[-1])


_TILES = 4
_ALIGNMENT = 16
_RUN = 32
"""Columns of a row of blocks that a thread unpacks."""


class UnpackArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "zeros", "table", "out")),
        *((name, ctypes.c_int) for name in ("columns", "rows", "pairing")),
    )


def unpack_kernel(of_weights: WeightFormat) -> Kernel:
    """The kernel for tiles or blocks."""
    is_tiled = of_weights.name in TILED
    define = ("SWITCHYARD_FORMAT", TILED[of_weights.name]) if is_tiled else ("SWITCHYARD_BLOCKS", of_weights.name)
    return Kernel("unpack.cu", "unpack_kernel", _THREADS, (define,))


class CudaUnpacker(OnCard):
    """Unpacks on one card."""

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


_WARPS = 4
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
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("codes", "scales"))


class RoundArguments(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("groups", GroupsArguments),
        ("to", RoundedRows),
        *((name, ctypes.c_int) for name in ("columns", "width", "tiles")),
    )


class GroupProductArguments(ctypes.Structure):
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
