"""What a card is given: the matrices of experts, and a step's visits.

A table says where the records are, and what lies where within each. Visits are sorted by expert on the card: how many
each has is never brought to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.repack import Blocks, Unpack, unpacked

if TYPE_CHECKING:
    from engine.formats import TiledFormat
    from engine.formats.ggml import BlockType
    from engine.kernels.cuda.products import CudaGroups, CudaProducts
    from engine.kernels.interface import LayerRecords, Upload


@dataclass(frozen=True)
class ExpertGroups:
    """Visits sorted by expert, and the block of them for each program.

    Attributes:
        order: int64 [visits], visits without an expert last.
        ends: int64 [experts], end of each expert's visits in `order`.
        block_expert, block_begin: int64 [programs]; the expert is `experts` if there is nothing to do.
    """

    order: torch.Tensor
    ends: torch.Tensor
    block_expert: torch.Tensor
    block_begin: torch.Tensor

    def on(self, place: torch.device, upload: Upload) -> ExpertGroups:
        """The same on a device, by one copy."""
        parts = (self.order, self.ends, self.block_expert, self.block_begin)
        return ExpertGroups(*torch.split(upload(torch.cat(parts), place), [len(part) for part in parts]))


def group(ids: torch.Tensor, experts: int, block: int) -> ExpertGroups:
    """Sorts visits.

    Args:
        ids: int64 [visits]; `experts` for visits without an expert.
        block: visits per program.
    """
    visits, place = len(ids), ids.device
    in_order, order = torch.sort(ids, stable=True)
    # Bounds of all experts by binary search: counting each would synchronise.
    every = torch.arange(experts + 1, device=place)
    bounds = torch.searchsorted(in_order, every)
    begins, ends = bounds[:-1], bounds[1:]
    blocks_end = torch.cumsum((ends - begins + block - 1) // block, 0)
    # Upper bound of blocks: each occurring expert has at most one partial block.
    programs = torch.arange(-(-visits // block) + min(experts, visits), device=place)
    expert = torch.searchsorted(blocks_end, programs, right=True)
    known = expert.clamp(max=experts - 1)
    before = torch.where(known > 0, blocks_end[(known - 1).clamp(min=0)], 0)
    return ExpertGroups(order, ends, expert, begins[known] + (programs - before) * block)


def known_groups(experts: Sequence[int], counts: Sequence[int], of: int, block: int) -> ExpertGroups:
    """The groups of visits that are sorted already, so many of each expert in turn, on the host.

    Args:
        experts: distinct ids below `of`.
    """
    ids, many = np.asarray(experts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
    ends = np.cumsum(many)
    programs = -(-many // block)
    first = np.repeat(np.cumsum(programs) - programs, programs)
    begins = np.repeat(ends - many, programs) + (np.arange(len(first)) - first) * block
    every_end = np.zeros(of, dtype=np.int64)
    every_end[ids] = ends
    parts = (np.arange(int(ends[-1])), every_end, np.repeat(ids, programs), begins)
    return ExpertGroups(*(torch.from_numpy(part) for part in parts))


ALIGNMENT = 64
"""Alignment in bytes of records and their parts, for vector loads."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix at the same position in every record; `*_at`: bytes from the record's start, -1 for none.

    Attributes:
        rows, columns: of the matrix.
        dtype: of its elements if plain, else bf16; also of biases.
        format: of tiles or blocks, otherwise `None`.
        pairing: layout of gate and up rows; `PLAIN` for other matrices.
        up, up_at: of up rows in blocks, which lie apart from the gate's.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    format: TiledFormat | BlockType | None
    pairing: Pairing
    weights_at: int
    scales_at: int = -1
    zeros_at: int = -1
    bias_at: int = -1
    table_at: int = -1
    up: BlockType | None = None
    up_at: int = -1

    @property
    def outputs(self) -> int:
        """Outputs of a product with it, after gate and up are combined."""
        return self.rows if self.pairing is Pairing.PLAIN else self.rows // 2


class RecordTable:
    """The records of a layer for one launch, in any number of memory segments.

    Args:
        pieces: segments, uint8 [n, record bytes] each, all on one device.

    Attributes:
        base: an address near them; `offsets`: int64 [E] on the device, bytes from there to each record.

    Raises:
        ValueError: a record is misaligned.
    """

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self.base = pieces[0]
        addresses = [piece.data_ptr() + row * piece.stride(0) for piece in pieces for row in range(piece.shape[0])]
        if any(address % ALIGNMENT for address in addresses):
            raise ValueError(f"records that do not begin at multiples of {ALIGNMENT} bytes")
        start = self.base.data_ptr()
        self.offsets = torch.tensor([address - start for address in addresses], device=self.base.device)
        self._pieces = pieces  # the table points into them

    def __len__(self) -> int:
        return len(self.offsets)


def stored_matrix(layer: LayerRecords, name: str, bias: str | None, pairing: Pairing) -> StoredMatrix:
    """The matrix `name` of a layer's records.

    Args:
        pairing: of its rows, for a plain matrix; a tiled one has its own, and blocks have the gate's rows first.
    """
    layout = layer.layout
    parts = {part.name: part for part in layout.parts}
    bias_at = parts[bias].offset if bias is not None else -1
    if layout.is_tiled(name):
        shape = layout.tiled_shape(name)
        return StoredMatrix(
            shape.rows,
            shape.columns,
            torch.bfloat16,
            shape.format,
            shape.pairing,
            parts[name].offset,
            parts[f"{name}_scales"].offset,
            parts[f"{name}_zeros"].offset if shape.format.has_zeros else -1,
            bias_at,
            parts[f"{name}_table"].offset if shape.format.table is not None else -1,
        )
    kinds = layout.blocks_of(name)
    if kinds:
        (first, kind), (last, up) = kinds[0], kinds[-1]
        rows, width = sum(parts[each].shape[0] for each, _ in kinds), parts[first].shape[1]
        up_at = parts[last].offset + (rows // 2 * width if first == last else 0)
        return StoredMatrix(
            rows,
            width // kind.nbytes * kind.elements,
            torch.bfloat16,
            kind,
            Pairing.PLAIN if pairing is Pairing.PLAIN else Pairing.HALVES,
            parts[first].offset,
            bias_at=bias_at,
            up=up,
            up_at=up_at,
        )
    rows, columns = parts[name].shape
    return StoredMatrix(rows, columns, parts[name].dtype, None, pairing, parts[name].offset, bias_at=bias_at)


def store(
    matrix: TiledMatrix | Blocks, bias: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, StoredMatrix]:
    """A matrix and its bias as a record: uint8 [1, bytes] on the device, and its layout."""
    if isinstance(matrix, TiledMatrix):
        parts = [matrix.weights, matrix.scales, matrix.zeros, bias, matrix.table]
    else:
        parts = [matrix.in_order, None, None, bias, None]
    offsets, end = [], 0
    for part in parts:
        offsets.append(end if part is not None else -1)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT if part is not None else 0
    raw = torch.zeros(end + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % ALIGNMENT
    record = raw[skip : skip + end].view(1, end)
    for part, offset in zip(parts, offsets, strict=True):
        if part is not None:
            record[0, offset : offset + part.nbytes].copy_(part.detach().contiguous().view(-1).view(torch.uint8))
    weights, scales, zeros, bias_at, table = offsets
    if isinstance(matrix, TiledMatrix):
        shape = matrix.shape
        tiled = (shape.rows, shape.columns, torch.bfloat16, shape.format, shape.pairing)
        return record, StoredMatrix(*tiled, weights, scales, zeros, bias_at, table)
    kind = (matrix.rows, matrix.columns, torch.bfloat16, matrix.kind, Pairing.PLAIN)
    return record, StoredMatrix(*kind, weights, bias_at=bias_at)


def part_in(record: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """The part of a record, uint8 [bytes], from byte `at`, of another tensor's type and shape."""
    return record[at : at + like.nbytes].view(like.dtype).view(like.shape)


def matrix_in(record: torch.Tensor, stored: StoredMatrix, like: TiledMatrix | Blocks) -> TiledMatrix | Blocks:
    """The matrix that `store` put into a record."""
    if isinstance(like, Blocks):
        width = like.raw.shape[1]
        return Blocks(like.kind, record[stored.weights_at :][: like.rows * width].view(like.rows, width))
    return TiledMatrix(
        like.shape,
        part_in(record, stored.weights_at, like.weights),
        part_in(record, stored.scales_at, like.scales),
        part_in(record, stored.zeros_at, like.zeros) if like.zeros is not None else None,
        part_in(record, stored.table_at, like.table) if like.table is not None else None,
    )


@dataclass(frozen=True)
class CardKernels:
    """The kernels that compute products on one card.

    Attributes:
        few: for up to `most_few` visits.
        many: for more, unless they are plain numbers; `None`: PyTorch's operators compute them.
        unpack: a matrix in tiles or blocks -> its weights, bf16 [rows, columns], for those operators.
    """

    few: CudaProducts
    most_few: int
    many: CudaGroups | None
    unpack: Unpack = unpacked
