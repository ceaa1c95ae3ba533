"""Where the parts of an expert lie in its record: all its weights in one contiguous, aligned block of memory.

The records of a layer have the same layout and are contiguous, so a layer is one tensor of bytes [E, record bytes], an
expert is one row of it, and moving an expert between tiers is one copy.  Matrices are stored as
`torch.nn.functional.linear` expects them, [out, in], whatever the module's own layout is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine.common.footprint import PART_ALIGNMENT, record_bytes, round_up
from engine.formats import TiledFormat, WeightFormat
from engine.formats.ggml import BlockType
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape

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
        """Begin and end of each run of bytes that no part has."""
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
