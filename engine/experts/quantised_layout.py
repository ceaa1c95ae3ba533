"""Records whose matrices are in int8 or int4: the same parts as the plain record's, in tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.experts.bank import BankLayer
from engine.experts.record import RecordLayout, allocate_records
from engine.kernels.quantised.tiles import GROUP, Pairing, TiledMatrix, TiledShape
from engine.kernels.quantised.weights import quantise_into

if TYPE_CHECKING:
    from engine.kernels.native.library import NativeKernels

GROUP_SIZE = GROUP
_PAIRED = "gate_up_proj"
_DOWN = "down_proj"


@dataclass(frozen=True, slots=True)
class QuantisedLayout(RecordLayout):
    """Where the parts of a quantised expert lie.

    A matrix `name` of the plain layout is three parts here: `name` (tiles), `name_scales` and, for int4, `name_zeros`;
    biases are as they were.

    Attributes:
        precision: `int8` or `int4`.
        down_precision: the same, of `down_proj`, in which an error weighs more.
        plain: the layout of the same expert before it was quantised, which is how checkpoints are read.
        pairing: of the rows of `gate_up_proj`.
    """

    precision: str
    plain: RecordLayout
    pairing: Pairing
    down_precision: str

    @classmethod
    def quantising(
        cls, plain: RecordLayout, precision: str, pairing: Pairing, down_precision: str | None = None
    ) -> QuantisedLayout:
        """The layout in `precision` of an expert with the parts of `plain`; `down_proj` in one of its own if given."""
        down = down_precision or precision
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for part in plain.parts:
            if len(part.shape) == 2:
                of_part = down if part.name == _DOWN else precision
                shape = TiledShape(*part.shape, of_part, pairing if part.name == _PAIRED else Pairing.PLAIN)
                shapes |= {f"{part.name}{suffix}": size for suffix, size in shape.parts.items()}
            else:
                shapes[part.name] = (part.shape, part.dtype)
        layout = RecordLayout.of(shapes, transposed=False)
        return cls(layout.parts, layout.nbytes, precision, plain, pairing, down)

    @property
    def unquantised(self) -> RecordLayout:
        """See `RecordLayout.unquantised`."""
        return self.plain

    def tiled_shape(self, name: str) -> TiledShape:
        """Of the matrix `name`."""
        rows, columns = next(part.shape for part in self.plain.parts if part.name == name)
        precision = self.down_precision if name == _DOWN else self.precision
        return TiledShape(rows, columns, precision, self.pairing if name == _PAIRED else Pairing.PLAIN)

    def matrix(self, rows: Mapping[str, Sequence[torch.Tensor]], name: str, expert: int) -> TiledMatrix:
        """The matrix `name` of one expert, as views of its record.

        `rows` are the parts by name, one view per expert, as a `BankLayer` has them.
        """
        zeros = rows.get(f"{name}_zeros")
        return TiledMatrix(
            self.tiled_shape(name),
            rows[name][expert],
            rows[f"{name}_scales"][expert],
            zeros[expert] if zeros is not None else None,
        )

    def quantise_record(self, plain: torch.Tensor, target: torch.Tensor, kernels: NativeKernels | None = None) -> None:
        """Quantises one record: `plain`, uint8 [plain.nbytes], to `target`, uint8 [nbytes], aligned as records are.

        The bytes between the parts are zeroed, so that equal experts are equal bytes.
        """
        source = self._views(self.plain, plain)
        target.zero_()
        parts = self._views(self, target)
        for name, values in source.items():
            if values[0].dim() == 2:
                quantise_into(values[0], self.matrix(parts, name, 0), kernels)
            else:
                parts[name][0].copy_(values[0])

    @staticmethod
    def _views(layout: RecordLayout, record: torch.Tensor) -> dict[str, Any]:
        return {part.name: layout.stacked_view(record[None], part) for part in layout.parts}


def quantise_layer(plain: BankLayer, target: BankLayer, kernels: NativeKernels | None = None) -> None:
    """Quantises all experts of `plain`, in RAM, into the records of `target`, wherever they are."""
    layout = target.layout
    assert isinstance(layout, QuantisedLayout)
    here = target.device.type == "cpu"
    room = allocate_records(1, layout, torch.device("cpu"))[0]
    for expert in range(plain.num_experts):
        record = target.records[expert] if here else room
        layout.quantise_record(plain.records[expert], record, kernels)
        if not here:
            target.records[expert].copy_(record)
