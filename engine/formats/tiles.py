"""Tiles: the memory layout of quantised weights, identical on disk, in RAM and on a device, for every format.

A tile is 32 rows x 32 columns. Its upper and lower halves (16 rows each) are vectors of 64 bytes, 4 bytes per row, so a
dot-product instruction needs no shuffling. 8-bit codes: 8 vectors, the j-th with columns 4j..4j+3. 4-bit codes: 4
vectors, the j-th with columns 4j..4j+3 in the low nibbles and 16+4j..16+4j+3 in the high ones. Each row of a tile, 32
weights, has a scale of 16 bits; its type, anything else, and the meaning of a code, are up to the format
(`engine.formats.weight_format.TiledFormat`).

Matrices are zero-padded to whole tiles.  native/src/switchyard_kernels.h defines the same layout.

Where the parts of an expert lie in its record (`RecordLayout`): all its weights are in one contiguous, aligned block of
memory. The records of a layer have the same layout and are contiguous, so a layer is one tensor of bytes
[E, record bytes], an expert is one row of it, and moving an expert between tiers is one copy. Matrices are stored as
`torch.nn.functional.linear` expects them, [out, in], whatever the module's own layout is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from engine.common.footprint import PART_ALIGNMENT, record_bytes, round_up
from engine.formats.coded import CodedMatrix, record_scales
from engine.formats.ggml import BlockType
from engine.formats.weight_format import GROUP, TILE_ROWS, TiledFormat, WeightFormat

ROUNDS = 16
"""Optimisation rounds over all starts, for formats that optimise."""
_CHUNK = 1 << 22
"""Weights quantised per step: bounds the memory for intermediate results."""


class Pairing(IntEnum):
    """Which rows the two halves of a tile hold.

    `PLAIN`: the matrix's rows in order. Otherwise 16 gate rows above the matching 16 up rows, of a matrix in which all
    gate rows come first (`HALVES`) or the two alternate (`ALTERNATING`).
    """

    PLAIN = 0
    HALVES = 1
    ALTERNATING = 2


@dataclass(frozen=True)
class TiledShape:
    """The shape of a matrix in tiles; rows are even if they are paired."""

    rows: int
    columns: int
    format: TiledFormat
    pairing: Pairing = Pairing.PLAIN

    @property
    def blocks(self) -> int:
        return -(-self.rows // TILE_ROWS)

    @property
    def groups(self) -> int:
        return -(-self.columns // GROUP)

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Suffix of a part's name -> shape and dtype: the parts of a tiled matrix."""
        parts = self.format.parts(self.rows, self.columns)
        return {suffix: (shape, getattr(torch, dtype)) for suffix, (shape, dtype) in parts.items()}


@dataclass(frozen=True)
class TiledMatrix:
    """A tiled matrix.

    Attributes:
        weights: uint8 [blocks, groups, bytes of a tile].
        scales: [blocks, groups, 32], of the format's type.
        zeros: uint8 [blocks, groups, 32] where the format has them.
        table: int8 [16] where the format has one.
    """

    shape: TiledShape
    weights: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        shape: TiledShape,
        device: torch.device | None = None,
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> TiledMatrix:
        """Allocates one, like `empty`: the table is set to the format's, nothing else is initialised."""
        made = {name: empty(size, dtype=dtype, device=device) for name, (size, dtype) in shape.parts.items()}
        matrix = cls(shape, *(made.get(suffix) for suffix in ("", "_scales", "_zeros", "_table")))  # type: ignore[arg-type]
        matrix.set_table()
        return matrix

    def set_table(self, table: tuple[int, ...] | None = None) -> None:
        if self.table is not None:
            self.table.copy_(torch.tensor(table or self.shape.format.table, dtype=torch.int8))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        named = {"": self.weights, "_scales": self.scales, "_zeros": self.zeros, "_table": self.table}
        return {suffix: tensor for suffix, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())


def rows_of(matrix: TiledMatrix, begin: int, end: int) -> TiledMatrix:
    """Rows of a matrix, as views of it; they begin where a block does, and end where one or the matrix does."""
    shape = matrix.shape
    if (begin, end) == (0, shape.rows):
        return matrix
    blocks = slice(begin // TILE_ROWS, -(-end // TILE_ROWS))
    return TiledMatrix(
        TiledShape(end - begin, shape.columns, shape.format, shape.pairing),
        matrix.weights[blocks],
        matrix.scales[blocks],
        matrix.zeros[blocks] if matrix.zeros is not None else None,
        matrix.table,
    )


def dequantise(matrix: TiledMatrix, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[rows, columns], computed in fp32 and rounded once; on any device."""
    shape, tiles = matrix.shape, matrix.weights
    grid = (shape.blocks, shape.groups, 2)
    if shape.format.code_bits == 8:
        # block, group, half, vector, row, column -> block, half, row, group, vector, column
        q = tiles.view(torch.int8).view(*grid, 8, 16, 4).permute(0, 2, 4, 1, 3, 5)
    else:
        pairs = tiles.view(*grid, 4, 16, 4)
        nibbles = torch.stack((pairs & 15, pairs >> 4), dim=3)
        # block, group, half, nibble, vector, row, column -> block, half, row, group, nibble, vector, column
        q = nibbles.permute(0, 2, 5, 1, 3, 4, 6)
    codes = q.reshape(shape.blocks, TILE_ROWS, shape.groups, GROUP)
    values = codes.float() if matrix.table is None else matrix.table.float()[codes.long()]
    if matrix.zeros is not None:
        values -= matrix.zeros.mT[..., None].float() / 16
    values *= matrix.scales.mT[..., None].float()
    return _from_blocks(values.flatten(2), shape).to(dtype)


def quantise_in_torch(weight: torch.Tensor, target: TiledMatrix, rounds: int = ROUNDS) -> None:
    """Fills `target` from `weight` [rows, columns], of any floating type, by its format's `fit`."""
    shape = target.shape
    blocks = to_blocks(weight.detach(), shape)
    step = max(1, _CHUNK // max(1, blocks[0].numel()))
    for begin in range(0, shape.blocks, step):
        chunk = slice(begin, begin + step)
        of_chunk = TiledMatrix(
            TiledShape(blocks[chunk].shape[0] * TILE_ROWS, shape.columns, shape.format),
            target.weights[chunk],
            target.scales[chunk],
            target.zeros[chunk] if target.zeros is not None else None,
        )
        pack(*shape.format.fit(blocks[chunk], rounds), of_chunk)


RecordCodes = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Rows as a record holds them: codes [rows, groups, 32], scales and zeros [rows, groups]."""


def keep_codes(matrix: CodedMatrix, rounds: int = ROUNDS) -> RecordCodes:
    """The matrix's own codes; groups that its format cannot hold are fitted to it."""
    bits, sixteenths, kept = record_scales(matrix)
    codes = torch.from_numpy(matrix.groups.copy())
    scales = torch.from_numpy(bits).view(getattr(torch, matrix.format.scale_type))
    zeros = None if sixteenths is None else torch.from_numpy(sixteenths)
    if not kept.all():
        others = ~torch.from_numpy(kept)
        values = torch.from_numpy(matrix.values()).view(codes.shape)
        codes[others], scales[others], fitted = matrix.format.fit(values[others], rounds)
        if zeros is not None and fitted is not None:
            zeros[others] = fitted
    return codes, scales, zeros


def fit_codes(weight: torch.Tensor, target_format: TiledFormat, rounds: int = ROUNDS) -> RecordCodes:
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    return target_format.fit(padded.view(len(padded), -1, GROUP), rounds)


def store_codes(sources: Sequence[RecordCodes], target: TiledMatrix) -> None:
    """Fills `target`, but for its table, with the rows of one source, or of two: first gate and then up rows."""
    shape = target.shape
    every_codes, every_scales, every_zeros = zip(*sources, strict=True)
    codes, scales = joined(every_codes, shape.pairing), joined(every_scales, shape.pairing)
    found_zeros = [each for each in every_zeros if each is not None]
    zeros = joined(found_zeros, shape.pairing) if found_zeros else None
    blocks = _rows_of_blocks(codes.flatten(1), shape).view(shape.blocks, TILE_ROWS, shape.groups, GROUP)
    pack(blocks, _rows_of_blocks(scales, shape), None if zeros is None else _rows_of_blocks(zeros, shape), target)


def joined(parts: Sequence[torch.Tensor], pairing: Pairing) -> torch.Tensor:
    """All rows, or first gate and then up rows, [rows, ...], as one matrix has them."""
    if len(parts) < 2:
        return parts[0]
    return torch.stack(list(parts), 1).flatten(0, 1) if pairing is Pairing.ALTERNATING else torch.cat(list(parts))


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, target: TiledMatrix) -> None:
    """Fills `target`.

    Args:
        codes: uint8 or int8 [blocks, 32, groups, 32], in the layout of `to_blocks`.
        scales, zeros: [blocks, 32, groups].
    """
    shape = target.shape
    grid = (shape.blocks, 2, 16, shape.groups)
    if shape.format.code_bits == 8:
        target.weights.copy_(codes.view(torch.uint8).reshape(*grid, 8, 4).permute(0, 3, 1, 4, 2, 5).flatten(2))
    else:
        low, high = codes.view(torch.uint8).reshape(*grid, 2, 4, 4).unbind(4)
        target.weights.copy_((low | high << 4).permute(0, 3, 1, 4, 2, 5).flatten(2))
    target.scales.copy_(scales.mT)
    if zeros is not None and target.zeros is not None:
        target.zeros.copy_(zeros.mT)


def to_blocks(weight: torch.Tensor, shape: TiledShape) -> torch.Tensor:
    """[rows, columns] -> fp32 [blocks, 32, groups, 32], padded with zeros, rows in tile order."""
    blocks = torch.zeros(shape.blocks, TILE_ROWS, shape.groups * GROUP, device=weight.device)
    blocks[..., : shape.columns] = _rows_of_blocks(weight, shape)
    return blocks.view(shape.blocks, TILE_ROWS, shape.groups, GROUP)


def _rows_of_blocks(weight: torch.Tensor, shape: TiledShape) -> torch.Tensor:
    """[rows, any] -> [blocks, 32, any], rows in tile order, padded with rows of zeros."""
    padded = weight.new_zeros(shape.blocks * TILE_ROWS, weight.shape[1])
    if shape.pairing is Pairing.PLAIN:
        padded[: shape.rows] = weight
        return padded.view(shape.blocks, TILE_ROWS, -1)
    pairs = shape.rows // 2
    if shape.pairing is Pairing.HALVES:
        paired = weight.reshape(2, pairs, -1)
    else:
        paired = weight.reshape(pairs, 2, -1).transpose(0, 1)
    halves = padded.view(2, shape.blocks * TILE_ROWS // 2, -1)
    halves[:, :pairs] = paired
    return halves.view(2, shape.blocks, 16, -1).transpose(0, 1).reshape(shape.blocks, TILE_ROWS, -1)


def _from_blocks(blocks: torch.Tensor, shape: TiledShape) -> torch.Tensor:
    """[blocks, 32, padded columns] -> [rows, columns]."""
    blocks = blocks[..., : shape.columns]
    if shape.pairing is Pairing.PLAIN:
        return blocks.flatten(0, 1)[: shape.rows]
    halves = blocks.reshape(shape.blocks, 2, TILE_ROWS // 2, shape.columns)
    pairs = shape.rows // 2
    if shape.pairing is Pairing.ALTERNATING:
        return halves.transpose(1, 2).flatten(0, 2)[: shape.rows]
    return halves.transpose(0, 1).flatten(1, 2)[:, :pairs].flatten(0, 1)


_PAIRED = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One tensor of an expert.

    Attributes:
        name: the module's parameter name (`gate_up_proj`, `down_proj_bias`, ...).
        shape, dtype: of one expert, as stored in the record.
        transposed: whether the module's own parameter has the last two dimensions swapped.
        offset: bytes from the start of the record.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The parts of a record.

    A matrix `name` in a tiled format is several parts: `name` (tiles), `name_scales`, and any others that the format
    has.  One in blocks, as a GGUF file has it, is one part, but a gated first matrix two: its gate rows and then, with
    `_up` behind the name, its up rows, unless the file has it in one piece; the two may be of different types.

    Attributes:
        plain: layout of the same expert in plain numbers, as the library has it, if this one is quantised.
        tiled: name and format of each matrix in tiles.
        pairing: of the rows of `gate_up_proj` in tiles.
        kinds: the parts in blocks of each matrix, and their types.
        alternates: whether the library has gate and up rows in turn; in blocks the gate's, and its biases, come first.
    """

    parts: tuple[PartSpec, ...]
    nbytes: int
    plain: RecordLayout | None = None
    tiled: tuple[tuple[str, TiledFormat], ...] = ()
    pairing: Pairing = Pairing.PLAIN
    kinds: tuple[tuple[str, tuple[tuple[str, BlockType], ...]], ...] = ()
    alternates: bool = False

    @classmethod
    def of(cls, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], *, transposed: bool) -> RecordLayout:
        parts, offset = [], 0
        for name, (shape, dtype) in shapes.items():
            turned = transposed and len(shape) == 2
            stored = (shape[1], shape[0]) if turned else shape
            part = PartSpec(name, stored, dtype, turned, offset)
            parts.append(part)
            offset = round_up(offset + part.nbytes, PART_ALIGNMENT)
        return cls(tuple(parts), record_bytes(part.nbytes for part in parts))

    @classmethod
    def in_tiles(cls, plain: RecordLayout, format_of: Callable[[str], WeightFormat], pairing: Pairing) -> RecordLayout:
        """That of an expert with the parts of `plain`, each matrix in the format of `format_of(name)`."""
        formats: dict[str, TiledFormat] = {}
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for part in plain.parts:
            form = format_of(part.name) if len(part.shape) == 2 else None
            if isinstance(form, TiledFormat):
                formats[part.name] = form
                rows, columns = part.shape
                shape = TiledShape(rows, columns, form, pairing if part.name == _PAIRED else Pairing.PLAIN)
                shapes |= {f"{part.name}{suffix}": size for suffix, size in shape.parts.items()}
            else:
                shapes[part.name] = (part.shape, part.dtype)
        made = cls.of(shapes, transposed=False)
        return replace(made, plain=plain, tiled=tuple(formats.items()), pairing=pairing)

    @classmethod
    def in_blocks(
        cls, plain: RecordLayout, kinds: Mapping[str, Sequence[BlockType]], *, alternates: bool
    ) -> RecordLayout:
        """That of an expert with the parts of `plain`, the matrices `kinds` in blocks of these types."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        named: dict[str, tuple[tuple[str, BlockType], ...]] = {}
        for part in plain.parts:
            if part.name not in kinds:
                shapes[part.name] = (part.shape, part.dtype)
                continue
            rows, columns = part.shape
            pieces = named[part.name] = tuple(zip((part.name, f"{part.name}_up"), kinds[part.name], strict=False))
            for name, kind in pieces:
                shapes[name] = ((rows // len(pieces), columns // kind.elements * kind.nbytes), torch.uint8)
        made = cls.of(shapes, transposed=False)
        return replace(made, plain=plain, kinds=tuple(named.items()), alternates=alternates)

    @property
    def unquantised(self) -> RecordLayout:
        return self.plain or self

    @property
    def padding(self) -> list[tuple[int, int]]:
        ends = [0, *(part.offset + part.nbytes for part in self.parts)]
        return [
            (end, begin)
            for end, begin in zip(ends, [*(part.offset for part in self.parts), self.nbytes], strict=True)
            if begin > end
        ]

    def is_tiled(self, name: str) -> bool:
        return any(name == tiled for tiled, _ in self.tiled)

    def tiled_shape(self, name: str) -> TiledShape:
        rows, columns = next(part.shape for part in self.unquantised.parts if part.name == name)
        return TiledShape(rows, columns, dict(self.tiled)[name], self.pairing if name == _PAIRED else Pairing.PLAIN)

    def matrix(self, rows: Mapping[str, Sequence[torch.Tensor] | torch.Tensor], name: str, expert: int) -> TiledMatrix:
        zeros, table = rows.get(f"{name}_zeros"), rows.get(f"{name}_table")
        return TiledMatrix(
            self.tiled_shape(name),
            rows[name][expert],
            rows[f"{name}_scales"][expert],
            zeros[expert] if zeros is not None else None,
            table[expert] if table is not None else None,
        )

    def blocks_of(self, name: str) -> Sequence[tuple[str, BlockType]]:
        """The parts of a matrix that are in blocks, and their types; empty if it is stored otherwise."""
        return dict(self.kinds).get(name, ())

    def views(self, records: torch.Tensor) -> dict[str, torch.Tensor]:
        return {part.name: self.stacked_view(records, part) for part in self.parts}

    def stacked_view(self, records: torch.Tensor, part: PartSpec) -> torch.Tensor:
        """A part of all experts, [E, *shape], as a view of their records [E, nbytes] (uint8)."""
        typed = records.view(part.dtype)
        strides = [math.prod(part.shape[i + 1 :]) for i in range(len(part.shape))]
        return typed.as_strided(
            (records.shape[0], *part.shape),
            (self.nbytes // part.dtype.itemsize, *strides),
            typed.storage_offset() + part.offset // part.dtype.itemsize,
        )
