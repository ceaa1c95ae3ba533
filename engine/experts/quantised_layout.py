"""Layouts of records with quantised matrices, in tiles or in blocks: the parts of the plain record in their formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.checkpoint.gguf.types import BlockType
from engine.experts.record import RecordLayout
from engine.formats import TiledFormat, WeightFormat
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape
from engine.kernels.quantise import quantise_into

if TYPE_CHECKING:
    from engine.kernels.native.library import NativeKernels

_PAIRED = "gate_up_proj"


@dataclass(frozen=True, slots=True)
class QuantisedLayout(RecordLayout):
    """Where the parts of a quantised expert lie.

    A matrix `name` of the plain layout with a tiled format becomes several parts: `name` (tiles), `name_scales`, and
    any others that the format has.  All other parts are unchanged.

    Attributes:
        formats: name and format of each tiled matrix.
        plain: layout of the same expert before quantisation, in which checkpoints are read.
        pairing: of the rows of `gate_up_proj`.
    """

    formats: tuple[tuple[str, TiledFormat], ...]
    plain: RecordLayout
    pairing: Pairing

    @classmethod
    def quantising(
        cls, plain: RecordLayout, format_of: Callable[[str], WeightFormat], pairing: Pairing
    ) -> QuantisedLayout:
        """The layout of an expert with the parts of `plain`, each matrix in the format of `format_of(name)`."""
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
        layout = RecordLayout.of(shapes, transposed=False)
        return cls(layout.parts, layout.nbytes, tuple(formats.items()), plain, pairing)

    @property
    def unquantised(self) -> RecordLayout:
        return self.plain

    def is_tiled(self, name: str) -> bool:
        """Whether the matrix `name` is tiled."""
        return any(name == tiled for tiled, _ in self.formats)

    def tiled_shape(self, name: str) -> TiledShape:
        """Shape of the tiled matrix `name`."""
        rows, columns = next(part.shape for part in self.plain.parts if part.name == name)
        return TiledShape(rows, columns, dict(self.formats)[name], self.pairing if name == _PAIRED else Pairing.PLAIN)

    def matrix(self, rows: Mapping[str, Sequence[torch.Tensor]], name: str, expert: int) -> TiledMatrix:
        """The matrix `name` of one expert, as views of its record.

        `rows` are the parts by name, one view per expert, as in `BankLayer.rows`.
        """
        zeros, table = rows.get(f"{name}_zeros"), rows.get(f"{name}_table")
        return TiledMatrix(
            self.tiled_shape(name),
            rows[name][expert],
            rows[f"{name}_scales"][expert],
            zeros[expert] if zeros is not None else None,
            table[expert] if table is not None else None,
        )

    def quantise_record(self, plain: torch.Tensor, target: torch.Tensor, kernels: NativeKernels | None = None) -> None:
        """Quantises one record: `plain`, uint8 [plain.nbytes], to `target`, uint8 [nbytes], aligned as records are.

        Padding between the parts is zeroed, so that equal experts have equal bytes.
        """
        source = self._views(self.plain, plain)
        target.zero_()
        parts = self._views(self, target)
        for name, values in source.items():
            if self.is_tiled(name):
                quantise_into(values[0], self.matrix(parts, name, 0), kernels)
            else:
                parts[name][0].copy_(values[0])

    @staticmethod
    def _views(layout: RecordLayout, record: torch.Tensor) -> dict[str, Any]:
        return {part.name: layout.stacked_view(record[None], part) for part in layout.parts}


@dataclass(frozen=True, slots=True)
class BlockLayout(RecordLayout):
    """Where the parts of an expert lie whose matrices are rows of blocks, as a GGUF file has them.

    A gated first matrix is two parts, its gate rows and then, with `_up` behind the name, its up rows, unless the file
    has it in one piece; the two may be of different types.

    Attributes:
        kinds: the parts in blocks of each matrix, and their types.
        plain: layout of the same expert in plain numbers, as the library has it.
        alternates: whether the library has gate and up rows in turn; here the gate's, and its biases, come first.
    """

    kinds: tuple[tuple[str, tuple[tuple[str, BlockType], ...]], ...]
    plain: RecordLayout
    alternates: bool

    @classmethod
    def storing(cls, plain: RecordLayout, kinds: Mapping[str, Sequence[BlockType]], *, alternates: bool) -> BlockLayout:
        """The layout of an expert with the parts of `plain`, the matrices `kinds` in blocks of these types."""
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
        layout = RecordLayout.of(shapes, transposed=False)
        return cls(layout.parts, layout.nbytes, tuple(named.items()), plain, alternates)

    @property
    def unquantised(self) -> RecordLayout:
        return self.plain

    def blocks_of(self, name: str) -> Sequence[tuple[str, BlockType]]:
        """The parts of a matrix that are in blocks, and their types; empty if it is in plain numbers."""
        return dict(self.kinds).get(name, ())
