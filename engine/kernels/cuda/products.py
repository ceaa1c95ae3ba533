"""Products with matrices in records by the kernels in `products.cu`."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch

from engine.formats import TiledFormat, WeightFormat
from engine.formats.ggml import BlockType
from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.cuda.compiled import THREADS, Argument, Kernel
from engine.kernels.cuda.driver import Launcher, OnCard
from engine.kernels.gpu.stored import ExpertGroups, RecordTable, StoredMatrix
from engine.kernels.interface import Activation
from engine.kernels.repack import Blocks

MOST_VISITS = 1024
"""As in products.cu."""
_ROWS = (1, 2, 4, 8)
"""Visits that share a reading of weights, as kernels are compiled."""
_TILED_BLOCK, _ROWS_BLOCK = 32, 8
_BLOCKS_PER_MULTIPROCESSOR = 4
"""That many keep a card's memory busy; fewer, and the columns are split."""
_LEAST_GROUPS, _LEAST_RUNS, _LEAST_STEPS = 16, 32, 2
"""Of a part of the columns of tiles, blocks and numbers: less is not worth adding up."""
_COUNTERS = 1024
_PLACES = ("weights_at", "scales_at", "zeros_at", "bias_at", "table_at", "up_at")

TILED = {"int8": "Int8", "int4": "Int4", "lut4": "Lut4"}
"""Structs of formats.h by the name of the format."""
PLAIN = {torch.bfloat16: "PlainBf16", torch.float16: "PlainFp16", torch.float32: "PlainFp32"}


def _of_activation(activation: Activation | None) -> dict[str, Argument]:
    """`Activation` in activation.h."""
    if activation is None:
        return {"kind": -1}
    has_limit = math.isfinite(activation.limit)
    limit = activation.limit if has_limit else 0.0
    return {"kind": int(activation.kind), "has_limit": has_limit, "limit": limit, "alpha": activation.alpha}


def product_kernel(of_format: str, rows: int) -> Kernel:
    """The kernel for a format of formats.h and this many visits at a time."""
    return Kernel("products.cu", (("SWITCHYARD_FORMAT", of_format), ("SWITCHYARD_ROWS", str(rows))))


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


class CudaProducts(OnCard):
    """Multiplies visits one by one, or few that share an expert, on one card: bound by reading weights.

    A step's calls must come one after the other (on one stream): those with the same table share counters.
    """

    most_visits = MOST_VISITS

    def __init__(self, card: Launcher) -> None:
        super().__init__(card)
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
        parts = arrived = None
        if splits > 1 or shares is not None:
            parts = x.new_empty(visits * splits * blocks * block, dtype=torch.float32)
            arrived = self._counters(table, blocks * (1 if shares is not None else leaders))
        tokens = None if ids is None else visits // max(width, together)
        experts = len(table) if slot_of is None else len(slot_of)
        kernel = product_kernel(_name(matrix), _rows_at_once(visits, tokens, experts))
        self.start(
            kernel, grid, x=x, out=out, ids=ids, slot_of=slot_of, shares=shares, absent=absent, parts=parts,
            arrived=arrived, experts=experts, slots=len(table), visits=visits, width=width, together=together,
            splits=splits, floats=floats, **_of_matrix(matrix, table, activation),
        )  # fmt: skip
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


def _of_matrix(matrix: StoredMatrix, table: RecordTable, activation: Activation | None) -> dict[str, Argument]:
    places = {name: getattr(matrix, name) for name in _PLACES}
    return places | {
        "records": table.offsets, "base": table.base, "columns": matrix.columns, "rows": matrix.rows,
        "pairing": int(matrix.pairing), "activation": _of_activation(activation),
    }  # fmt: skip


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


def tile_rows(matrix: TiledMatrix | torch.Tensor) -> dict[str, Argument]:
    """`TileRows` in formats.h."""
    if isinstance(matrix, torch.Tensor):
        return {"weights": matrix}
    return {"weights": matrix.weights, "scales": matrix.scales, "zeros": matrix.zeros, "table": matrix.table}


def unpack_kernel(of_weights: WeightFormat) -> Kernel:
    """The kernel for tiles or blocks."""
    is_tiled = of_weights.name in TILED
    define = ("SWITCHYARD_FORMAT", TILED[of_weights.name]) if is_tiled else ("SWITCHYARD_BLOCKS", of_weights.name)
    return Kernel("unpack.cu", (define,))


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
        grid, pairing = (-(-shape.groups // _TILES), shape.blocks, 1), int(shape.pairing)
        sizes = {"columns": shape.columns, "rows": shape.rows}
        self.start(unpack_kernel(shape.format), grid, matrix=tile_rows(matrix), out=out, pairing=pairing, **sizes)
        return out

    def _of_blocks(self, blocks: Blocks) -> torch.Tensor:
        assert blocks.order is None
        out = torch.empty(blocks.rows, blocks.columns, dtype=torch.bfloat16, device=blocks.raw.device)
        if blocks.rows:
            grid, sizes = (-(-out.numel() // _RUN // THREADS), 1, 1), {"columns": blocks.columns, "rows": blocks.rows}
            self.start(unpack_kernel(blocks.kind), grid, matrix={"weights": blocks.raw}, out=out, **sizes)
        return out


_NEIGHBOURS = 8
"""Visits that matrix units take at a time."""
_BLOCKS = (16, 64)
"""Visits of a block, as kernels are compiled."""


ROUND_KERNEL = Kernel("round_rows.cu")


def group_kernel(of_format: str, block: int) -> Kernel:
    """The kernel for tiles or blocks (`engine.kernels.cuda.products.struct_of`) and so many visits of a block."""
    defines = [("SWITCHYARD_FORMAT", of_format), ("SWITCHYARD_TILES", str(block // _NEIGHBOURS))]
    if of_format.startswith("Blocks<"):
        defines.append(("SWITCHYARD_RESIDENT", "2"))
    return Kernel("group_products.cu", tuple(defines))


def group_kernels(of_format: str) -> list[Kernel]:
    """All that may be asked for to multiply with matrices of a format."""
    return [group_kernel(of_format, block) for block in _BLOCKS]


class CudaGroups(OnCard):
    """Multiplies visits sorted by expert, in blocks, on one card: bound by computing.

    x is rounded to 8 bits per 32 columns, as the CPU's kernels do.  Matrices of plain numbers are left to others.
    """

    @staticmethod
    def takes(matrix: StoredMatrix) -> bool:
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
        sorted_visits: Argument = {"experts": len(table), **vars(groups)}
        codes = x.new_empty(blocks * columns * block * 8, dtype=torch.int32)
        scales = x.new_empty(blocks * columns * block * 2, dtype=torch.float32)
        rounded: Argument = {"codes": codes, "scales": scales}
        sizes = {"columns": matrix.columns, "width": width, "tiles": tiles}
        self.start(ROUND_KERNEL, (blocks, tiles, 1), x=x, groups=sorted_visits, to=rounded, **sizes)
        out = x.new_empty(visits, matrix.outputs)
        kernel, grid = group_kernel(struct_of(matrix.format, matrix.up), block), (blocks, -(-matrix.rows // 128), 1)
        self.start(kernel, grid, out=out, groups=sorted_visits, x=rounded, **_of_matrix(matrix, table, activation))
        return out
